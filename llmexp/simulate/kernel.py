"""The event loop, compiled: ``loop.py``, ``arrivals.py``, ``scheduler.py`` and ``blocks.py`` over arrays,
function by function. It makes the same decisions and does the same floating-point operations in the same
order, so its records are equal.

Sequences are rows of ``Seqs``; the lists and queues of blocks are rings of array indices.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from llmexp.simulate.cost import StepCost
from llmexp.simulate.errors import StandstillReason, standstill
from llmexp.simulate.records import (
    REQUEST_COUNTS,
    REQUEST_TIMES,
    SPAN_COUNTS,
    STEP_COUNTS,
    STEP_TIMES,
    Tables,
    sorted_spans,
)
from llmexp.simulate.requests import Floats, Ints, Requests, steps_without_token
from llmexp.simulate.settings import Settings

NO_CAP = 2**62
ADMITTED, PREEMPTED, FINISHED = (STEP_COUNTS.index(name) for name in ("admitted", "preempted", "finished"))
QUERIES, HITS = STEP_COUNTS.index("queries"), STEP_COUNTS.index("hits")
PREEMPTED_QUERIES, PREEMPTED_HITS = (
    STEP_COUNTS.index("preempted_queries"),
    STEP_COUNTS.index("preempted_hits"),
)
FREE_BLOCKS = STEP_COUNTS.index("free_blocks")
RUNNING, WAITING, SCHEDULED = (STEP_COUNTS.index(name) for name in ("running", "waiting", "scheduled"))
WORK = STEP_COUNTS.index("prefill_tokens")  # where the terms of the work begin
DONE, STUCK, TIMELESS, FRUITLESS = range(4)
REASONS: dict[int, StandstillReason] = {STUCK: "stuck", TIMELESS: "timeless", FRUITLESS: "fruitless"}

F = TypeVar("F", bound=Callable[..., Any])
Indices = npt.NDArray[np.int32]
Heap = list[tuple[int, float, int, int]]


def _compiled(function: F) -> F:
    return numba.njit(cache=True)(function)  # type: ignore[no-any-return]


class Limits(NamedTuple):
    """``Settings`` as numbers."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    caching: bool
    chunked: bool
    by_priority: bool
    threshold: int
    adaptive: bool
    whole: bool
    watermark_blocks: int


class Pool(NamedTuple):
    """``BlockPool``. The free queue is a ring through block 0, equal cached blocks a ring from the oldest."""

    after: Indices
    before: Indices
    ref_count: Indices
    chain_id: Indices  # -1: none
    newer: Indices
    older: Indices
    oldest: Indices  # by chain id; -1: not cached
    num_free: Ints  # one entry


class Seqs(NamedTuple):
    """``Sequence``, by request, and the batch: ``running[:size]`` in order, each with a row of ``tables``."""

    prompt_tokens: Ints
    total_tokens: Ints
    priority: Ints
    chain_ids: npt.NDArray[np.int64] | npt.NDArray[np.int32]
    chain_start: Ints
    num_chained: Ints
    own_id: Ints
    arrival_s: Floats
    order: Ints
    num_tokens: Ints
    num_computed: Ints
    num_preemptions: Ints
    num_blocks: Ints
    num_cached_blocks: Ints
    num_new: Ints  # scheduled in this step
    slot: Ints
    tables: Indices  # (max_num_seqs, blocks)
    free_slots: Ints
    running: Ints
    size: Ints  # one entry


def run(requests: Requests, settings: Settings, cost: StepCost, max_concurrency: int | None) -> Tables:
    """What ``loop.run`` does, with vLLM's scheduler and block cache."""
    limits = Limits(
        settings.block_size,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.enable_prefix_caching,
        settings.enable_chunked_prefill,
        settings.policy == "priority",
        settings.long_prefill_token_threshold,
        settings.long_prefill_token_threshold_adaptive,
        settings.scheduler_reserve_full_isl,
        settings.watermark_blocks,
    )
    turns = np.flatnonzero(requests.after >= 0)
    turns = turns[np.argsort(requests.after[turns], kind="stable")]
    first = np.flatnonzero(requests.after < 0)
    status, duration_s, now_s, pool, seqs, waiting, tables = _serve(
        limits,
        _pool(settings.num_gpu_blocks, requests),
        _seqs(requests, settings),
        np.array([cost.fixed, cost.compute, cost.memory]),
        requests.arrival_s,
        first[np.argsort(requests.arrival_s[first], kind="stable")],
        np.searchsorted(requests.after[turns], np.arange(len(requests) + 1)),
        turns,
        len(requests) if max_concurrency is None else max_concurrency,
        steps_without_token(requests),
    )
    if status != DONE:
        reason = REASONS[status]
        raise standstill(reason, now_s, duration_s, int(seqs.size[0]), waiting, int(pool.num_free[0]))
    return Tables(*tables[:-1], sorted_spans(tables[-1]))  # type: ignore[call-arg]


def _pool(num_blocks: int, requests: Requests) -> Pool:
    blocks = np.arange(num_blocks, dtype=np.int32)
    num_ids = requests.num_chain_ids + int((requests.num_blocks - requests.num_chained).sum())
    return Pool(
        after=np.roll(blocks, -1),
        before=np.roll(blocks, 1),
        ref_count=np.zeros(num_blocks, np.int32),
        chain_id=np.full(num_blocks, -1, np.int32),
        newer=np.zeros(num_blocks, np.int32),
        older=np.zeros(num_blocks, np.int32),
        oldest=np.full(num_ids, -1, np.int32),
        num_free=np.array([num_blocks - 1]),
    )


def _seqs(requests: Requests, settings: Settings) -> Seqs:
    n, slots = len(requests), settings.max_num_seqs
    total_tokens = requests.prompt_tokens + requests.output_tokens
    longest = -(-(int(total_tokens.max(initial=1)) - 1) // settings.block_size)
    return Seqs(
        prompt_tokens=requests.prompt_tokens,
        total_tokens=total_tokens,
        priority=requests.priority,
        chain_ids=requests.chain_ids,
        chain_start=requests.chain_offsets,
        num_chained=requests.num_chained,
        own_id=requests.own_ids,
        arrival_s=np.zeros(n),
        order=np.zeros(n, np.int64),
        num_tokens=requests.prompt_tokens.copy(),
        num_computed=np.zeros(n, np.int64),
        num_preemptions=np.zeros(n, np.int64),
        num_blocks=np.zeros(n, np.int64),
        num_cached_blocks=np.zeros(n, np.int64),
        num_new=np.zeros(n, np.int64),
        slot=np.zeros(n, np.int64),
        tables=np.empty((slots, longest), np.int32),
        free_slots=np.arange(slots),
        running=np.zeros(slots, np.int64),
        size=np.zeros(1, np.int64),
    )


# --- blocks.py ---------------------------------------------------------------------------------------------


@_compiled
def _unlink(pool: Pool, block: int) -> None:
    before, after = pool.before[block], pool.after[block]
    pool.after[before] = after
    pool.before[after] = before
    pool.num_free[0] -= 1


@_compiled
def _link(pool: Pool, block: int, before: int) -> None:
    after = pool.after[before]
    pool.after[before] = block
    pool.before[block] = before
    pool.after[block] = after
    pool.before[after] = block
    pool.num_free[0] += 1


@_compiled
def _evict(pool: Pool, block: int) -> None:
    chain_id = pool.chain_id[block]
    if chain_id < 0:
        return
    newer, older = pool.newer[block], pool.older[block]
    if newer == block:
        pool.oldest[chain_id] = -1
    else:
        pool.newer[older] = newer
        pool.older[newer] = older
        if pool.oldest[chain_id] == block:
            pool.oldest[chain_id] = newer
    pool.chain_id[block] = -1


@_compiled
def _register(pool: Pool, block: int, chain_id: int) -> None:
    pool.chain_id[block] = chain_id
    oldest = pool.oldest[chain_id]
    if oldest < 0:
        pool.oldest[chain_id] = pool.newer[block] = pool.older[block] = block
    else:  # the newest lies before the oldest in the ring
        newest = pool.older[oldest]
        pool.newer[newest] = block
        pool.older[block] = newest
        pool.newer[block] = oldest
        pool.older[oldest] = block


@_compiled
def _chain(seqs: Seqs, i: int, block: int) -> int:
    chained = seqs.num_chained[i]
    if block < chained:
        return int(seqs.chain_ids[seqs.chain_start[i] + block])
    return int(seqs.own_id[i] + block - chained)


@_compiled
def _blocks_for(limits: Limits, num_tokens: int) -> int:
    return -(-num_tokens // limits.block_size)


@_compiled
def _match(limits: Limits, pool: Pool, seqs: Seqs, i: int) -> tuple[int, int]:
    """Hit blocks, and how many of them are idle."""
    hits = idle = 0
    if limits.caching:
        most = (seqs.num_tokens[i] - 1) // limits.block_size
        while hits < most:
            block = pool.oldest[_chain(seqs, i, hits)]
            if block < 0:
                break
            idle += pool.ref_count[block] == 0
            hits += 1
    return hits, idle


@_compiled
def _touch(pool: Pool, seqs: Seqs, i: int, hits: int) -> None:
    row = seqs.tables[seqs.slot[i]]
    for k in range(hits):
        block = pool.oldest[_chain(seqs, i, k)]
        if pool.ref_count[block] == 0:
            _unlink(pool, block)
        pool.ref_count[block] += 1
        row[k] = block
    seqs.num_blocks[i] = seqs.num_cached_blocks[i] = hits


@_compiled
def _fill(limits: Limits, pool: Pool, seqs: Seqs, i: int, num_tokens: int) -> None:
    row = seqs.tables[seqs.slot[i]]
    for k in range(seqs.num_blocks[i], _blocks_for(limits, num_tokens)):
        block = pool.after[0]
        _unlink(pool, block)
        pool.ref_count[block] = 1
        _evict(pool, block)
        row[k] = block
        seqs.num_blocks[i] += 1
    if limits.caching:
        for k in range(seqs.num_cached_blocks[i], num_tokens // limits.block_size):
            _register(pool, row[k], _chain(seqs, i, k))
            seqs.num_cached_blocks[i] += 1


@_compiled
def _release(pool: Pool, seqs: Seqs, i: int) -> None:
    row = seqs.tables[seqs.slot[i]]
    front = 0
    for k in range(seqs.num_blocks[i] - 1, -1, -1):
        block = row[k]
        pool.ref_count[block] -= 1
        if pool.ref_count[block] == 0:
            if pool.chain_id[block] < 0:
                _link(pool, block, front)
                front = block
            else:
                _link(pool, block, pool.before[0])
    seqs.num_blocks[i] = seqs.num_cached_blocks[i] = 0


# --- scheduler.py ------------------------------------------------------------------------------------------


@_compiled
def _push(limits: Limits, seqs: Seqs, waiting: Heap, i: int) -> None:
    if limits.by_priority:
        heappush(waiting, (seqs.priority[i], seqs.arrival_s[i], i, i))
    else:
        heappush(waiting, (0, 0.0, seqs.order[i], i))


@_compiled
def _cap(limits: Limits, num_seqs: int) -> int:
    if limits.threshold == 0 or num_seqs <= 1:
        return NO_CAP
    if limits.adaptive:
        return max(limits.threshold, limits.max_num_batched_tokens // num_seqs)
    return limits.threshold


@_compiled
def _victim(limits: Limits, seqs: Seqs) -> int:
    last = int(seqs.size[0]) - 1
    if not limits.by_priority:
        return last
    worst = 0
    for k in range(1, last + 1):
        a, b = seqs.running[worst], seqs.running[k]
        if (seqs.priority[b], seqs.arrival_s[b]) > (seqs.priority[a], seqs.arrival_s[a]):
            worst = k
    return worst


@_compiled
def _leave(pool: Pool, seqs: Seqs, position: int) -> None:
    """The sequence at this position of the batch gives up its blocks and its slot."""
    i = seqs.running[position]
    _release(pool, seqs, i)
    for k in range(position, seqs.size[0] - 1):
        seqs.running[k] = seqs.running[k + 1]
    seqs.size[0] -= 1
    seqs.free_slots[seqs.size[0]] = seqs.slot[i]


@_compiled
def _continue_running(limits: Limits, pool: Pool, seqs: Seqs, waiting: Heap, cap: int, row: Ints) -> int:
    block_size, budget = limits.block_size, int(limits.max_num_batched_tokens)
    # what the loop reads for every token, out of the tuples: each access through them counts references
    running, size, scheduled, num_free = seqs.running, seqs.size, seqs.num_new, pool.num_free
    num_tokens, computed, num_blocks = seqs.num_tokens, seqs.num_computed, seqs.num_blocks
    k = 0
    while k < size[0] and budget > 0:
        i = running[k]
        num_new = min(int(num_tokens[i] - computed[i]), cap, budget)
        end = computed[i] + num_new
        while _blocks_for(limits, end) - num_blocks[i] > num_free[0]:
            position = _victim(limits, seqs)
            victim = running[position]
            _leave(pool, seqs, position)
            k -= position < k
            budget += int(scheduled[victim])
            scheduled[victim] = computed[victim] = 0
            seqs.num_preemptions[victim] += 1
            _push(limits, seqs, waiting, victim)
            row[PREEMPTED] += 1
            if victim == i:
                return budget
        if num_new > 1 or end % block_size <= 1:  # a token amid a block neither needs nor fills one
            _fill(limits, pool, seqs, i, end)
        scheduled[i] = num_new
        budget -= num_new
        k += 1
    return budget


@_compiled
def _admit_waiting(
    limits: Limits, pool: Pool, seqs: Seqs, waiting: Heap, cap: int, budget: int, row: Ints
) -> None:
    while budget > 0 and len(waiting) > 0 and seqs.size[0] < limits.max_num_seqs:
        i = waiting[0][3]
        hits, idle = _match(limits, pool, seqs, i)
        num_hit_tokens = hits * limits.block_size
        num_new = min(seqs.num_tokens[i] - num_hit_tokens, cap)
        if num_new > budget and not limits.chunked:
            return
        num_new = min(num_new, budget)
        num_tokens = num_hit_tokens + num_new
        headroom = limits.watermark_blocks if seqs.size[0] > 0 else 0
        room = pool.num_free[0] - idle - headroom + hits
        if _blocks_for(limits, seqs.num_tokens[i] if limits.whole else num_tokens) > room:
            return
        heappop(waiting)
        seqs.slot[i] = seqs.free_slots[seqs.size[0]]
        seqs.running[seqs.size[0]] = i
        seqs.size[0] += 1
        _touch(pool, seqs, i, hits)
        _fill(limits, pool, seqs, i, num_tokens)
        seqs.num_computed[i] = num_hit_tokens
        seqs.num_new[i] = num_new
        budget -= num_new
        row[ADMITTED] += 1
        if limits.caching:
            again = seqs.num_preemptions[i] > 0
            row[PREEMPTED_QUERIES if again else QUERIES] += seqs.num_tokens[i]
            row[PREEMPTED_HITS if again else HITS] += num_hit_tokens


# --- records.py, cost.py, arrivals.py, loop.py -------------------------------------------------------------


@_compiled
def _grown(rows: Any) -> Any:
    larger = np.zeros((2 * rows.shape[0], rows.shape[1]), rows.dtype)
    larger[: rows.shape[0]] = rows
    return larger


@_compiled
def _dot(coefficients: Floats, row: Ints) -> float:
    total = 0.0 + float(coefficients[0])
    for k in range(1, len(coefficients)):
        total += float(coefficients[k] * row[WORK + k - 1])
    return total


@_compiled
def _serve(
    limits: Limits,
    pool: Pool,
    seqs: Seqs,
    cost: Floats,
    delay_s: Floats,
    first: Ints,
    turn_start: Ints,
    turns: Ints,
    slots: int,
    patience: int,
) -> Any:
    n = len(delay_s)
    step_times = np.zeros((1024, len(STEP_TIMES)))
    step_counts = np.zeros((1024, len(STEP_COUNTS)), np.int64)
    spans = np.zeros((2 * n + 1024, len(SPAN_COUNTS)), np.int64)
    request_times = np.full((n, len(REQUEST_TIMES)), np.nan)
    request_counts = np.zeros((n, len(REQUEST_COUNTS)), np.int64)
    decoding = np.full(n, -1)  # each request's latest span of decode steps
    waiting = [(0, 0.0, 0, 0) for _ in range(0)]
    due = [(delay_s[i], i) for i in first]
    running, size, scheduled = seqs.running, seqs.size, seqs.num_new
    num_tokens, num_computed, num_preemptions = seqs.num_tokens, seqs.num_computed, seqs.num_preemptions
    prompt_tokens, total_tokens = seqs.prompt_tokens, seqs.total_tokens
    number = num_spans = entered = idle_steps = 0
    now_s = open_since_s = duration_s = 0.0
    status = DONE
    while True:
        while slots > 0 and len(due) > 0 and due[0][0] <= now_s:
            due_s, i = heappop(due)
            seqs.arrival_s[i] = request_times[i, 0] = max(due_s, open_since_s)
            seqs.order[i] = entered
            _push(limits, seqs, waiting, i)
            entered += 1
            slots -= 1

        if number == len(step_counts):
            step_times, step_counts = _grown(step_times), _grown(step_counts)
        row = step_counts[number]
        row[:] = 0
        cap = _cap(limits, size[0] + len(waiting))
        budget = _continue_running(limits, pool, seqs, waiting, cap, row)
        continued = size[0]
        if row[PREEMPTED] == 0:
            _admit_waiting(limits, pool, seqs, waiting, cap, budget, row)

        while num_spans + size[0] > len(spans):
            spans = _grown(spans)
        for k in range(size[0]):
            i = running[k]
            num_new = scheduled[i]
            if num_new == 0:
                continue
            computed = num_computed[i]
            if k >= continued and num_preemptions[i] == 0:
                request_times[i, 1] = now_s
                request_counts[i, 0] = computed
            num_computed[i] += num_new
            samples = num_computed[i] == num_tokens[i]
            decodes = num_new == 1 and samples and num_tokens[i] > prompt_tokens[i]
            row[SCHEDULED] += 1
            row[WORK + (1 if decodes else 0)] += num_new
            row[WORK + 2] += samples
            row[WORK + 3] += num_new * computed + num_new * (num_new + 1) // 2
            row[WORK + 4] += computed + num_new
            span = decoding[i]
            if decodes and span >= 0 and spans[span, 1] + spans[span, 2] == number:
                spans[span, 2] += 1
            else:
                spans[num_spans] = (i, number, 1, num_new, computed)
                if decodes:
                    decoding[i] = num_spans
                num_spans += 1

        if row[SCHEDULED] == 0 and row[PREEMPTED] == 0:
            next_s = due[0][0] if slots > 0 and len(due) > 0 else np.nan
            if next_s > now_s:
                now_s = next_s
                continue
            if size[0] > 0 or len(waiting) > 0 or not np.isnan(next_s):
                status = STUCK
            break
        duration_s = 0.0
        if row[SCHEDULED] > 0:
            duration_s = _dot(cost[0], row) + max(_dot(cost[1], row), _dot(cost[2], row))
            if not 0.0 < duration_s < np.inf:
                status = TIMELESS
                break
        row[RUNNING] = size[0]
        row[WAITING] = len(waiting)
        row[FREE_BLOCKS] = pool.num_free[0]
        step_times[number] = (now_s, duration_s)
        number += 1
        now_s += duration_s

        idle_steps += 1
        k = 0
        while k < size[0]:
            i = running[k]
            took_part = scheduled[i] > 0
            scheduled[i] = 0
            if took_part and num_computed[i] == num_tokens[i]:
                idle_steps = 0
                num_tokens[i] += 1
                if num_tokens[i] == prompt_tokens[i] + 1:
                    request_times[i, 2] = now_s
                if num_tokens[i] == total_tokens[i]:
                    _leave(pool, seqs, k)
                    request_times[i, 3] = now_s
                    request_counts[i, 1] = num_preemptions[i]
                    row[FINISHED] += 1
                    if slots == 0:
                        open_since_s = now_s
                    slots += 1
                    for t in turns[turn_start[i] : turn_start[i + 1]]:
                        heappush(due, (now_s + delay_s[t], t))
                    continue
            k += 1
        if idle_steps > patience:
            status = FRUITLESS
            break
    tables = (
        step_times[:number],
        step_counts[:number],
        request_times,
        request_counts,
        spans[:num_spans],
    )
    return status, duration_s, now_s, pool, seqs, len(waiting), tables
