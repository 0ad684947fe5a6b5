"""The event loop, compiled: ``loop.py``, ``arrivals.py``, ``scheduler.py`` and ``blocks.py`` over arrays,
function by function. It makes the same decisions and does the same floating-point operations in the same
order, so its records are equal.

Blocks and sequences are records in arrays, named by their index; queues of blocks are rings of indices.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from llmexp.simulate.cost import FrontEnd, StepCost
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
FRONT_END = ("request_s", "prompt_token_s", "output_s", "token_s", "echo_s")
DONE, STUCK, TIMELESS, FRUITLESS = range(4)
REASONS: dict[int, StandstillReason] = {STUCK: "stuck", TIMELESS: "timeless", FRUITLESS: "fruitless"}

F = TypeVar("F", bound=Callable[..., Any])
Heap = list[tuple[int, float, int, int]]
Records = np.ndarray[Any, np.dtype[np.void]]

BLOCK = np.dtype(
    [
        # the free queue is a ring through block 0, equal cached blocks a ring from the oldest
        ("after", np.int32),
        ("before", np.int32),
        ("newer", np.int32),
        ("older", np.int32),
        ("ref_count", np.int32),
        ("chain_id", np.int32),  # -1: none
    ]
)
SEQUENCE = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_ahead", np.int64),
        ("num_computed", np.int64),
        ("num_new", np.int64),  # scheduled in this step
        ("num_blocks", np.int64),
        ("num_cached_blocks", np.int64),
        ("prompt_tokens", np.int64),
        ("total_tokens", np.int64),
        ("span", np.int64),  # the latest span of decode steps; -1: none
        ("slot", np.int64),
        ("num_preemptions", np.int64),
        ("arrival_s", np.float64),
        ("order", np.int64),
        ("priority", np.int64),
        ("chain_start", np.int64),
        ("num_chained", np.int64),
        ("own_id", np.int64),
    ]
)


def _compiled(function: F) -> F:
    return numba.njit(cache=True)(function)  # type: ignore[no-any-return]


# The names Limits and State are in numba's cache files: a renamed one cannot read an old cache.
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


class State(NamedTuple):
    """The engine: its block pool, the sequences by request, and the batch ``running[:size]``, whose sequences
    each have a row (``slot``) of ``tables``."""

    blocks: Records  # BLOCK
    oldest: npt.NDArray[np.int32]  # cached block by chain id; -1: none
    num_free: Ints  # one entry
    seqs: Records  # SEQUENCE
    chain_ids: npt.NDArray[np.int32]
    running: Ints
    size: Ints  # one entry
    tables: npt.NDArray[np.int32]  # (max_num_seqs, blocks)
    free_slots: Ints


def run(
    requests: Requests,
    settings: Settings,
    cost: StepCost,
    max_concurrency: int | None,
    keeps_place: bool,
    front_end: FrontEnd,
) -> Tables:
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
    state = _state(requests, settings)
    status, now_s, duration_s, num_waiting, tables = _serve(
        limits,
        state,
        np.array([cost.fixed, cost.compute, cost.memory]),
        cost.prefill_launch_s,
        requests.arrival_s,
        first[np.argsort(requests.arrival_s[first], kind="stable")],
        np.searchsorted(requests.after[turns], np.arange(len(requests) + 1)),
        turns,
        len(requests) if max_concurrency is None else min(max_concurrency, len(requests)),
        keeps_place,
        np.array([getattr(front_end, name) for name in FRONT_END]),
        steps_without_token(requests),
        2 if settings.async_scheduling else 1,
    )
    if status != DONE:
        num_running, num_free = int(state.size[0]), int(state.num_free[0])
        raise standstill(REASONS[status], now_s, duration_s, num_running, num_waiting, num_free)
    return Tables(*tables[:-1], sorted_spans(tables[-1]))  # type: ignore[call-arg]


def _state(requests: Requests, settings: Settings) -> State:
    numbers = np.arange(settings.num_gpu_blocks)
    blocks = np.zeros(settings.num_gpu_blocks, BLOCK)
    blocks["after"], blocks["before"], blocks["chain_id"] = np.roll(numbers, -1), np.roll(numbers, 1), -1
    seqs = np.zeros(len(requests), SEQUENCE)
    seqs["num_tokens"] = seqs["prompt_tokens"] = requests.prompt_tokens
    seqs["total_tokens"] = requests.prompt_tokens + requests.output_tokens
    seqs["span"] = -1
    seqs["priority"] = requests.priority
    seqs["chain_start"] = requests.chain_offsets[:-1]
    seqs["num_chained"] = requests.num_chained
    seqs["own_id"] = requests.own_ids
    longest = -(-(int(seqs["total_tokens"].max(initial=1)) - 1) // settings.block_size)
    num_ids = requests.num_chain_ids + int((requests.num_blocks - requests.num_chained).sum())
    return State(
        blocks=blocks,
        oldest=np.full(num_ids, -1, np.int32),
        num_free=np.array([settings.num_gpu_blocks - 1]),
        seqs=seqs,
        chain_ids=requests.chain_ids,
        running=np.zeros(settings.max_num_seqs, np.int64),
        size=np.zeros(1, np.int64),
        tables=np.empty((settings.max_num_seqs, longest), np.int32),
        free_slots=np.arange(settings.max_num_seqs),
    )


# --- blocks.py ---------------------------------------------------------------------------------------------


@_compiled
def _unlink(state: State, block: int) -> None:
    before, after = state.blocks[block].before, state.blocks[block].after
    state.blocks[before].after = after
    state.blocks[after].before = before
    state.num_free[0] -= 1


@_compiled
def _link(state: State, block: int, before: int) -> None:
    after = state.blocks[before].after
    state.blocks[before].after = block
    state.blocks[block].before = before
    state.blocks[block].after = after
    state.blocks[after].before = block
    state.num_free[0] += 1


@_compiled
def _evict(state: State, block: int) -> None:
    chain_id = state.blocks[block].chain_id
    if chain_id < 0:
        return
    newer, older = state.blocks[block].newer, state.blocks[block].older
    if newer == block:
        state.oldest[chain_id] = -1
    else:
        state.blocks[older].newer = newer
        state.blocks[newer].older = older
        if state.oldest[chain_id] == block:
            state.oldest[chain_id] = newer
    state.blocks[block].chain_id = -1


@_compiled
def _register(state: State, block: int, chain_id: int) -> None:
    state.blocks[block].chain_id = chain_id
    oldest = state.oldest[chain_id]
    if oldest < 0:
        state.oldest[chain_id] = oldest = newest = block
    else:
        newest = state.blocks[oldest].older  # the ring goes from the newest on to the oldest
    state.blocks[newest].newer = block
    state.blocks[block].older = newest
    state.blocks[block].newer = oldest
    state.blocks[oldest].older = block


@_compiled
def _chain(state: State, i: int, block: int) -> int:
    seq = state.seqs[i]
    if block < seq.num_chained:
        return int(state.chain_ids[seq.chain_start + block])
    return int(seq.own_id + block - seq.num_chained)


@_compiled
def _blocks_for(limits: Limits, num_tokens: int) -> int:
    return -(-num_tokens // limits.block_size)


@_compiled
def _match(limits: Limits, state: State, i: int) -> tuple[int, int]:
    """Hit blocks, and how many of them are idle."""
    hits = idle = 0
    if limits.caching:
        most = (state.seqs[i].num_tokens - 1) // limits.block_size
        while hits < most:
            block = state.oldest[_chain(state, i, hits)]
            if block < 0:
                break
            idle += state.blocks[block].ref_count == 0
            hits += 1
    return hits, idle


@_compiled
def _touch(state: State, i: int, hits: int) -> None:
    seq = state.seqs[i]
    table = state.tables[seq.slot]
    for k in range(hits):
        block = state.oldest[_chain(state, i, k)]
        if state.blocks[block].ref_count == 0:
            _unlink(state, block)
        state.blocks[block].ref_count += 1
        table[k] = block
    seq.num_blocks = seq.num_cached_blocks = hits


@_compiled
def _fill(limits: Limits, state: State, i: int, num_tokens: int) -> None:
    seq = state.seqs[i]
    table = state.tables[seq.slot]
    for k in range(seq.num_blocks, _blocks_for(limits, num_tokens)):
        block = state.blocks[0].after
        _unlink(state, block)
        state.blocks[block].ref_count = 1
        _evict(state, block)
        table[k] = block
        seq.num_blocks += 1
    _register_full(limits, state, i, num_tokens)


@_compiled
def _register_full(limits: Limits, state: State, i: int, num_tokens: int) -> None:
    if limits.caching:
        seq = state.seqs[i]
        table = state.tables[seq.slot]
        full = min(num_tokens, seq.num_tokens - seq.num_ahead) // limits.block_size
        for k in range(seq.num_cached_blocks, full):
            _register(state, table[k], _chain(state, i, k))
            seq.num_cached_blocks += 1


@_compiled
def _release(state: State, i: int) -> None:
    seq = state.seqs[i]
    table = state.tables[seq.slot]
    front = 0
    for k in range(seq.num_blocks - 1, -1, -1):
        block = table[k]
        state.blocks[block].ref_count -= 1
        if state.blocks[block].ref_count == 0:
            if state.blocks[block].chain_id < 0:
                _link(state, block, front)
                front = block
            else:
                _link(state, block, state.blocks[0].before)
    seq.num_blocks = seq.num_cached_blocks = 0


# --- scheduler.py ------------------------------------------------------------------------------------------


@_compiled
def _push(limits: Limits, state: State, waiting: Heap, i: int) -> None:
    seq = state.seqs[i]
    if limits.by_priority:
        heappush(waiting, (seq.priority, seq.arrival_s, i, i))
    else:
        heappush(waiting, (0, 0.0, seq.order, i))


@_compiled
def _cap(limits: Limits, num_seqs: int) -> int:
    if limits.threshold == 0 or num_seqs <= 1:
        return NO_CAP
    if limits.adaptive:
        return max(limits.threshold, limits.max_num_batched_tokens // num_seqs)
    return limits.threshold


@_compiled
def _victim(limits: Limits, state: State) -> int:
    last = int(state.size[0]) - 1
    if not limits.by_priority:
        return last
    worst = 0
    for k in range(1, last + 1):
        a, b = state.seqs[state.running[worst]], state.seqs[state.running[k]]
        if (b.priority, b.arrival_s) > (a.priority, a.arrival_s):
            worst = k
    return worst


@_compiled
def _leave(state: State, position: int) -> None:
    """The sequence at this position of the batch gives up its blocks and its slot."""
    i = state.running[position]
    _release(state, i)
    for k in range(position, state.size[0] - 1):
        state.running[k] = state.running[k + 1]
    state.size[0] -= 1
    state.free_slots[state.size[0]] = state.seqs[i].slot


@_compiled
def _finish(state: State, waiting: Heap, i: int) -> None:
    """A sequence has its last token, which may have come while it was preempted."""
    for k in range(state.size[0]):
        if state.running[k] == i:
            _leave(state, k)
            return
    for k in range(len(waiting)):
        if waiting[k][3] == i:
            waiting.pop(k)
            heapify(waiting)
            return


@_compiled
def _continue_running(limits: Limits, state: State, waiting: Heap, cap: int, row: Ints) -> int:
    budget = int(limits.max_num_batched_tokens)
    k = 0
    while k < state.size[0] and budget > 0:
        i = state.running[k]
        seq = state.seqs[i]
        if seq.num_tokens == seq.total_tokens:
            k += 1
            continue
        num_new = min(int(seq.num_tokens - seq.num_computed), cap, budget)
        num_tokens = seq.num_computed + num_new
        while _blocks_for(limits, num_tokens) - seq.num_blocks > state.num_free[0]:
            position = _victim(limits, state)
            victim = state.running[position]
            _leave(state, position)
            k -= position < k
            budget += int(state.seqs[victim].num_new)
            state.seqs[victim].num_new = 0
            state.seqs[victim].num_computed = 0
            state.seqs[victim].num_preemptions += 1
            _push(limits, state, waiting, victim)
            row[PREEMPTED] += 1
            if victim == i:
                return budget
        if num_new > 1 or num_tokens % limits.block_size <= 1:  # amid a block, nothing is to be done
            _fill(limits, state, i, num_tokens)
        seq.num_new = num_new
        budget -= num_new
        k += 1
    return budget


@_compiled
def _admit_waiting(limits: Limits, state: State, waiting: Heap, cap: int, budget: int, row: Ints) -> None:
    while budget > 0 and len(waiting) > 0 and state.size[0] < limits.max_num_seqs:
        i = waiting[0][3]
        seq = state.seqs[i]
        hits, idle = _match(limits, state, i)
        num_hit_tokens = hits * limits.block_size
        num_new = min(int(seq.num_tokens - num_hit_tokens), cap)
        if num_new > budget and not limits.chunked:
            return
        num_new = min(num_new, budget)
        num_tokens = num_hit_tokens + num_new
        headroom = limits.watermark_blocks if state.size[0] > 0 else 0
        room = state.num_free[0] - idle - headroom + hits
        if _blocks_for(limits, seq.num_tokens if limits.whole else num_tokens) > room:
            return
        heappop(waiting)
        seq.slot = state.free_slots[state.size[0]]
        state.running[state.size[0]] = i
        state.size[0] += 1
        _touch(state, i, hits)
        _fill(limits, state, i, num_tokens)
        seq.num_computed = num_hit_tokens
        seq.num_new = num_new
        budget -= num_new
        row[ADMITTED] += 1
        if limits.caching:
            again = seq.num_preemptions > 0
            row[PREEMPTED_QUERIES if again else QUERIES] += seq.num_tokens
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
def _next_sent_s(due: list[tuple[float, int]], placed: list[tuple[float, int]], free_since_s: Floats) -> float:
    """When the client sends again; nan if it does not, before something ends."""
    next_s = np.nan
    if len(due) > 0 and len(free_since_s) > 0:
        next_s = max(due[0][0], free_since_s[0])
    if len(placed) > 0 and not placed[0][0] > next_s:
        next_s = placed[0][0]
    return next_s


@_compiled
def _send(
    seqs: Records,
    request_times: Floats,
    due: list[tuple[float, int]],
    placed: list[tuple[float, int]],
    free_since_s: Floats,
    taken: int,
    freed: int,
    under_way: Ints,
    through_s: Floats,
    sent: int,
    busy_until_s: float,
    request_s: float,
    prompt_token_s: float,
    now_s: float,
) -> tuple[int, int, float]:
    while True:
        sent_s = _next_sent_s(due, placed, free_since_s[taken:freed])
        if not sent_s <= now_s:
            return taken, sent, busy_until_s
        if len(placed) > 0 and placed[0][0] == sent_s:
            i = heappop(placed)[1]
        else:
            i = heappop(due)[1]
            taken += 1
        seqs[i].arrival_s = request_times[i, 0] = sent_s
        spent_s = request_s + prompt_token_s * seqs[i].prompt_tokens
        busy_until_s = max(busy_until_s, sent_s) + spent_s
        through_s[sent] = busy_until_s
        under_way[sent] = i
        sent += 1


@_compiled
def _serve(
    limits: Limits,
    state: State,
    cost: Floats,
    prefill_launch_s: float,
    delay_s: Floats,
    first: Ints,
    turn_start: Ints,
    turns: Ints,
    places: int,
    keeps_place: bool,
    front_end: Floats,
    patience: int,
    depth: int,
) -> Any:
    n = len(delay_s)
    seqs, running = state.seqs, state.running
    step_times = np.zeros((1024, len(STEP_TIMES)))
    step_counts = np.zeros((1024, len(STEP_COUNTS)), np.int64)
    spans = np.zeros((2 * n + 1024, len(SPAN_COUNTS)), np.int64)
    request_times = np.full((n, len(REQUEST_TIMES)), np.nan)
    request_counts = np.zeros((n, len(REQUEST_COUNTS)), np.int64)
    waiting = [(0, 0.0, 0, 0) for _ in range(0)]
    due = [(delay_s[i], i) for i in first]
    placed = [(0.0, 0) for _ in range(0)]
    free_since_s = np.zeros(places + n)  # a queue: free_since_s[taken:freed]
    taken, freed = 0, places
    under_way = np.zeros(n, np.int64)  # a queue of requests: under_way[entered:sent]
    through_s = np.zeros(n)
    request_s, prompt_token_s, output_s, token_s, echo_s = front_end
    # steps that are decided and not ended: step_under_way[:pending], when each is computed, and the sequences that
    # it gives a token
    step_under_way = np.zeros(2, np.int64)
    step_computed_s = np.zeros(2)
    sampled = np.zeros((2, limits.max_num_seqs), np.int64)
    pending = 0
    number = num_spans = sent = entered = fruitless = 0
    now_s = busy_until_s = duration_s = computed_s = ended_s = 0.0
    status = DONE
    while True:
        taken, sent, busy_until_s = _send(
            seqs,
            request_times,
            due,
            placed,
            free_since_s,
            taken,
            freed,
            under_way,
            through_s,
            sent,
            busy_until_s,
            request_s,
            prompt_token_s,
            now_s,
        )
        while entered < sent and through_s[entered] <= now_s:
            i = under_way[entered]
            seqs[i].order = entered
            _push(limits, state, waiting, i)
            entered += 1

        if number == len(step_counts):
            step_times, step_counts = _grown(step_times), _grown(step_counts)
        row = step_counts[number]
        row[:] = 0
        cap = _cap(limits, state.size[0] + len(waiting))
        budget = _continue_running(limits, state, waiting, cap, row)
        continued = state.size[0]
        if row[PREEMPTED] == 0:
            _admit_waiting(limits, state, waiting, cap, budget, row)
        size = state.size[0]

        while num_spans + size > len(spans):
            spans = _grown(spans)
        for k in range(size):
            i = running[k]
            seq = seqs[i]
            num_new = seq.num_new
            if num_new == 0:
                continue
            computed = seq.num_computed
            if k >= continued and seq.num_preemptions == 0:
                request_times[i, 1] = now_s
                request_counts[i, 0] = computed
            seq.num_computed += num_new
            samples = seq.num_computed == seq.num_tokens
            decodes = num_new == 1 and samples and seq.num_tokens > seq.prompt_tokens
            row[SCHEDULED] += 1
            row[WORK + (1 if decodes else 0)] += num_new
            if samples:
                sampled[pending, row[WORK + 2]] = i
                row[WORK + 2] += 1
            row[WORK + 3] += num_new * computed + num_new * (num_new + 1) // 2
            row[WORK + 4] += computed + num_new
            seq.num_new = 0
            span = seq.span
            if decodes and span >= 0 and spans[span, 1] + spans[span, 2] == number:
                spans[span, 2] += 1
            else:
                spans[num_spans] = (i, number, 1, num_new, computed, int(samples))
                if decodes:
                    seq.span = num_spans
                num_spans += 1

        if row[SCHEDULED] > 0 or row[PREEMPTED] > 0:
            row[RUNNING] = size
            row[WAITING] = len(waiting)
            row[FREE_BLOCKS] = state.num_free[0]
            duration_s = 0.0
            if row[SCHEDULED] > 0:
                duration_s = _dot(cost[0], row) + max(_dot(cost[1], row), _dot(cost[2], row))
                if not 0.0 < duration_s < np.inf:
                    status = TIMELESS
                    break
            step_times[number, 0] = now_s
            computed_s = max(computed_s, now_s) + duration_s
            if row[WORK] > 0:
                now_s += prefill_launch_s
            computed_s = max(computed_s, now_s)
            step_computed_s[pending] = computed_s
            if depth > 1:
                for i in sampled[pending, : row[WORK + 2]]:
                    seqs[i].num_tokens += 1
                    seqs[i].num_ahead += 1
            step_under_way[pending] = number
            pending += 1
            number += 1
            if pending < depth:
                continue
        elif pending == 0:
            next_s = _next_sent_s(due, placed, free_since_s[taken:freed])
            if entered < sent:
                next_s = through_s[entered]
            if next_s > now_s:
                now_s = next_s
                continue
            if size > 0 or len(waiting) > 0 or not np.isnan(next_s):
                status = STUCK
            break

        step = step_under_way[0]
        row = step_counts[step]
        start_s = max(ended_s, step_times[step, 0])
        now_s = ended_s = max(now_s, step_computed_s[0])
        duration_s = now_s - start_s
        num_sampled = row[WORK + 2]
        taken, sent, busy_until_s = _send(
            seqs,
            request_times,
            due,
            placed,
            free_since_s,
            taken,
            freed,
            under_way,
            through_s,
            sent,
            busy_until_s,
            request_s,
            prompt_token_s,
            np.nextafter(now_s, 0.0),
        )
        busy_until_s = max(busy_until_s, now_s)
        if num_sampled > 0:
            echoed = 0
            for i in sampled[0, :num_sampled]:
                if np.isnan(request_times[i, 2]):
                    echoed += seqs[i].prompt_tokens
            busy_until_s += output_s + token_s * num_sampled + echo_s * echoed
        delivered_s = busy_until_s
        step_times[step, 1:] = (start_s, duration_s, delivered_s)

        for i in sampled[0, :num_sampled]:
            if depth > 1:
                seqs[i].num_ahead -= 1
            else:
                seqs[i].num_tokens += 1
        fruitless = 0 if num_sampled > 0 else fruitless + 1
        for i in sampled[0, :num_sampled]:
            seq = seqs[i]
            if depth > 1 and seq.num_blocks > 0:
                _register_full(limits, state, i, seq.num_computed - seq.num_ahead)
            if np.isnan(request_times[i, 2]):
                request_times[i, 2] = now_s
        for i in sampled[0, :num_sampled]:
            seq = seqs[i]
            if seq.num_tokens < seq.total_tokens or seq.num_ahead > 0:
                continue
            _finish(state, waiting, i)
            request_times[i, 3] = now_s
            request_counts[i, 1] = seq.num_preemptions
            row[FINISHED] += 1
            if not keeps_place or turn_start[i] == turn_start[i + 1]:
                free_since_s[freed] = delivered_s
                freed += 1
            for t in turns[turn_start[i] : turn_start[i + 1]]:
                heappush(placed if keeps_place else due, (delivered_s + delay_s[t], t))
        pending -= 1
        step_under_way[0] = step_under_way[1]
        step_computed_s[0] = step_computed_s[1]
        sampled[0] = sampled[1]
        if fruitless > patience:
            status = FRUITLESS
            break
    tables = (
        step_times[:number],
        step_counts[:number],
        request_times,
        request_counts,
        spans[:num_spans],
    )
    return status, now_s, duration_s, len(waiting), tables
