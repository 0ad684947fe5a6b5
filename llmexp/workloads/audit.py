"""What prefix caching can do for a workload, known before anything is sent."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmexp.errors import WorkloadError
from llmexp.workloads.blocks import Blocks, blocks_of, shared_blocks_between
from llmexp.workloads.workload import Workload

__all__ = [
    "Audit",
    "audit",
    "audit_of",
    "distances_of",
    "lru_hit_rate",
    "pressure",
    "require_disjoint",
    "require_no_reuse",
    "reuse_by_position",
    "reuse_distances",
    "shared_blocks_between",
]


@dataclass(frozen=True)
class Lengths:
    """Token counts over the requests."""

    total: int
    mean: float
    min: int
    p50: float
    p90: float
    p95: float
    p99: float
    max: int

    @classmethod
    def of(cls, counts: ArrayLike) -> "Lengths":
        """The summary of `counts`, shape `(n,)`."""
        values = np.asarray(counts, np.int64)
        p50, p90, p95, p99 = (float(q) for q in np.percentile(values, [50, 90, 95, 99]))
        ends = int(values.min()), int(values.max())
        return cls(int(values.sum()), float(values.mean()), ends[0], p50, p90, p95, p99, ends[1])


@dataclass(frozen=True)
class Audit:
    """The block-exact account of a workload, for one block size.

    `reusable_tokens` is the number of prompt tokens that the cache serves when it starts empty, never evicts
    and requests are admitted in workload order: vLLM serves full blocks, from the prompt's start without a
    gap, and at most `prompt_tokens - 1` of a prompt. Where `order_independent`, it is the same for any order in
    which conversations keep theirs. Where the workload knows the generated answers, it rests on the engine to
    give them again; `reusable_generated_tokens` is what would be lost if it gave none of them.
    """

    block_size: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    exact_duplicates: int  # prompts equal to an earlier one
    blocks: int  # full blocks of all prompts
    distinct_blocks: int
    shared_blocks: int  # distinct blocks that more than one request holds
    reusable_tokens: int
    reusable_generated_tokens: int  # of these, those in blocks that decode filled
    ideal_hit_rate: float  # reusable_tokens / prompt_tokens
    ideal_block_hit_rate: float  # blocks seen before / blocks, a partial last block included, as traces count
    order_independent: bool
    blocks_to_hold: int  # KV blocks with which nothing is ever evicted, generated tokens included
    reusable_by_request: NDArray[np.int64]  # shape (n,), in tokens

    def to_json(self) -> dict[str, Any]:
        """Everything but the per-request array, as plain values."""
        values = asdict(self)
        del values["reusable_by_request"]
        return values


def audit(workload: Workload, block_size: int) -> Audit:
    """Counts what every request could reuse of those before it, one prompt in memory at a time.

    Raises WorkloadError if the workload is empty or a prompt's length is not the declared one.
    """
    if not len(workload):
        raise WorkloadError(f"workload {workload.name}: no requests")
    return audit_of(workload, blocks_of(workload, block_size))


def audit_of(workload: Workload, blocks: Blocks) -> Audit:
    """The audit of a workload whose blocks are known."""
    block_size = blocks.size
    distinct, holders, seen = _uses(blocks)
    reusable = _reusable(blocks, seen)
    alone = _without_answers(workload, blocks)
    distinct_alone, _, seen_alone = (distinct, holders, seen) if alone is blocks else _uses(alone)
    repeats = len(workload) - len(np.unique(blocks.whole))
    partial_repeats = _repeats_with_a_partial_block(blocks)
    all_blocks = int((-(-blocks.prompt_tokens // block_size)).sum())
    prompt_total = int(blocks.prompt_tokens.sum())
    return Audit(
        block_size=block_size,
        requests=len(workload),
        prompt_tokens=prompt_total,
        output_tokens=int(workload.output_tokens.sum()),
        prompt_lengths=Lengths.of(workload.prompt_tokens),
        output_lengths=Lengths.of(workload.output_tokens),
        exact_duplicates=repeats,
        blocks=int(blocks.in_prompt.sum()),
        distinct_blocks=len(distinct),
        shared_blocks=int((holders > 1).sum()),
        reusable_tokens=int(reusable.sum()),
        reusable_generated_tokens=int((reusable - _reusable(blocks, seen_alone)).sum()),
        ideal_hit_rate=float(reusable.sum() / prompt_total),
        ideal_block_hit_rate=float((seen.sum() + partial_repeats) / all_blocks),
        order_independent=_order_independent(workload, blocks, distinct, holders),
        blocks_to_hold=len(distinct_alone) + _blocks_beside_prompts(workload, alone, seen_alone),
        reusable_by_request=reusable,
    )


def _uses(blocks: Blocks) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct blocks in ascending order, how many requests hold each, and `_seen`."""
    distinct, first, holders = np.unique(blocks.keys, return_index=True, return_counts=True)
    return distinct, holders, _seen(blocks, first)


def _seen(blocks: Blocks, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many blocks of each prompt an earlier request has left behind, shape `(n,)`.

    A key stands for the whole prefix, so the seen blocks of a prompt come before all unseen ones: counting is
    enough. Blocks beyond the prompt (known answers) are the request's own work and are left out.
    """
    is_new = np.zeros(len(blocks.keys) + 1, np.int64)
    is_new[first] = 1
    before = np.concatenate([[0], np.cumsum(is_new[:-1])])
    start = blocks.starts[:-1]
    end = start + blocks.in_prompt
    new: NDArray[np.int64] = before[end] - before[start]
    return blocks.in_prompt - new


def _reusable(blocks: Blocks, seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each prompt that its `seen` blocks serve, shape `(n,)`."""
    return np.asarray(np.minimum(seen, (blocks.prompt_tokens - 1) // blocks.size) * blocks.size)


def _without_answers(workload: Workload, blocks: Blocks) -> Blocks:
    """The blocks of the prompts alone, as if the engine gave none of the answers that the workload knows."""
    answer_in = workload.columns.get("answer_in")
    if answer_in is None or (answer_in < 0).all():
        return blocks
    columns = {name: values for name, values in workload.columns.items() if name != "answer_in"}
    return blocks_of(replace(workload, columns=columns), blocks.size)


def _blocks_beside_prompts(workload: Workload, blocks: Blocks, seen: NDArray[np.int64]) -> int:
    """Decode adds blocks that no prompt holds in full; a repeated prompt of whole blocks recomputes its last."""
    end = blocks.prompt_tokens + workload.output_tokens - 1
    of_decode = -(-end // blocks.size) - blocks.in_prompt
    recomputed = int((seen * blocks.size == blocks.prompt_tokens).sum())
    null_block = 1
    return int(of_decode.sum()) + recomputed + null_block


def _repeats_with_a_partial_block(blocks: Blocks) -> int:
    partial = blocks.whole[blocks.prompt_tokens % blocks.size > 0]
    return len(partial) - len(np.unique(partial))


def _order_independent(
    workload: Workload, blocks: Blocks, distinct: NDArray[np.uint64], holders: NDArray[np.int64]
) -> bool:
    """Whether the reusable tokens are the same in any order of the requests that keeps each conversation's.

    Hits are uses minus first uses in any order, but for prompts that end with a full block: such a prompt
    recomputes it, unless it is the first to bring it. That depends on the order only if some holders of the
    block end there and others go on, and not all of them are turns of one conversation.
    """
    ends = blocks.whole[(blocks.prompt_tokens % blocks.size == 0) & (blocks.in_prompt > 0)]
    keys, enders = np.unique(ends, return_counts=True)
    open_keys = keys[holders[np.searchsorted(distinct, keys)] != enders]
    if not len(open_keys) or "conversation" not in workload.columns:
        return not len(open_keys)
    conversation = np.repeat(workload.columns["conversation"], np.diff(blocks.starts))
    held = np.isin(blocks.keys, open_keys)
    by_conversation = {*zip(blocks.keys[held].tolist(), conversation[held].tolist(), strict=True)}
    return len(by_conversation) == len(open_keys) and all(number >= 0 for _, number in by_conversation)


def reuse_distances(workload: Workload, block_size: int) -> NDArray[np.int64]:
    """The LRU stack distance of every reusable block, in order of use, shape `(reusable blocks,)`.

    That is the number of distinct blocks used since its last use, requests served one after the other and a
    prompt's tail released before its head, as vLLM does; the block is still there if the distance is below
    the capacity (Mattson et al., 1970). Prompt blocks and known answers count, other generated tokens do not.
    """
    return distances_of(blocks_of(workload, block_size))


def distances_of(blocks: Blocks) -> NDArray[np.int64]:
    """`reuse_distances` of known blocks."""
    distinct, ids = np.unique(blocks.keys, return_inverse=True)
    last_user = np.full(len(distinct), -1, np.int64)
    live = np.zeros(len(blocks.in_prompt), np.int64)  # blocks that request i was the last to use
    cap = (blocks.prompt_tokens - 1) // blocks.size
    distances: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for i, start in enumerate(blocks.starts[:-1]):
        mine = ids[start : blocks.starts[i + 1]]
        users = last_user[mine]
        hits = min(int((users[: blocks.in_prompt[i]] >= 0).sum()), int(cap[i]))
        # Towards the tail the last use lies further back, in runs of equal users. More recent than a block
        # are those of later users and its run up to it.
        for run in np.split(users[:hits], np.flatnonzero(np.diff(users[:hits])) + 1):
            newer = int(live[run[0] + 1 : i].sum()) if len(run) else 0
            distances.append(newer + np.arange(len(run)))
        np.subtract.at(live, users[users >= 0], 1)
        live[i] = len(mine)
        last_user[mine] = i
    return np.concatenate(distances)


def lru_hit_rate(workload: Workload, block_size: int, capacity_blocks: int) -> float:
    """Share of prompt tokens served by an LRU cache of so many blocks, requests one after the other."""
    hits = int((reuse_distances(workload, block_size) < capacity_blocks).sum())
    return hits * block_size / int(workload.prompt_tokens.sum(dtype=np.int64))


def reuse_by_position(workload: Workload, account: Audit) -> NDArray[np.float64]:
    """Of the prompts long enough to have a full block k, the share in which it can be a hit; index k."""
    prompt_blocks = workload.prompt_tokens // account.block_size
    reusable_blocks = account.reusable_by_request // account.block_size
    longest = int(prompt_blocks.max())

    def reaching(counts: NDArray[Any]) -> NDArray[np.int64]:
        return np.cumsum(np.bincount(counts, minlength=longest + 1)[::-1])[::-1][1:]

    return reaching(reusable_blocks) / reaching(prompt_blocks)


@dataclass(frozen=True)
class Pressure:
    """KV blocks that requests need at once, sharing left out, against a capacity."""

    capacity_blocks: int
    concurrency: int
    mean_blocks: float  # of `concurrency` consecutive requests, each at its full length
    peak_blocks: int
    mean_share: float  # of the capacity; above 1 the engine must queue or preempt unless prompts share
    peak_share: float


def pressure(workload: Workload, block_size: int, capacity_blocks: int, concurrency: int) -> Pressure:
    """What `concurrency` requests in flight ask of a KV cache of `capacity_blocks`.

    Turns of a conversation come one after the other, so that no more can be in flight than there are conversations.
    """
    held = -(-(workload.prompt_tokens.astype(np.int64) + workload.output_tokens - 1) // block_size)
    together = min(concurrency, _most_at_once(workload))
    sums = np.concatenate([[0], np.cumsum(held)])
    windows = sums[together:] - sums[:-together]
    mean, peak = float(windows.mean()), int(windows.max())
    return Pressure(capacity_blocks, concurrency, mean, peak, mean / capacity_blocks, peak / capacity_blocks)


def _most_at_once(workload: Workload) -> int:
    """How many requests wait for no other: those that stand alone, and one of each conversation."""
    conversation = workload.columns.get("conversation", np.full(len(workload), -1))
    return int((conversation < 0).sum()) + len(np.unique(conversation[conversation >= 0]))


def require_no_reuse(workload: Workload, account: Audit) -> None:
    """Raises WorkloadError if prompts of a control share a block or are equal."""
    if account.shared_blocks or account.exact_duplicates:
        raise WorkloadError(
            f"workload {workload.name} is a control without reuse, but {account.shared_blocks} blocks of "
            f"{account.block_size} tokens are shared and {account.exact_duplicates} prompts are duplicates"
        )


def require_disjoint(a: Workload, b: Workload, block_size: int) -> None:
    """Raises WorkloadError if the two workloads share a block."""
    if shared := shared_blocks_between(a, b, block_size):
        raise WorkloadError(f"{a.name} and {b.name} share {shared} blocks of {block_size} tokens; they must share none")
