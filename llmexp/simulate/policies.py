"""Who leaves the queue first. vLLM has ``fcfs`` and ``priority``; the others are for comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Any

from llmexp.simulate.cache import Cache
from llmexp.simulate.sequence import Sequence


@dataclass(frozen=True)
class Policy:
    """``key`` orders the queue, least first; ties go by order of arrival.

    ``reorders``: the key depends on what is cached, so it is computed anew in each step. ``skips``: a sequence
    that finds no room lets those behind it pass; otherwise it blocks them.
    """

    key: Callable[[Sequence, Cache], Any]
    reorders: bool = False
    skips: bool = False


def uncached_tokens(seq: Sequence, cache: Cache) -> int:
    return seq.num_tokens - cache.block_size * len(cache.match(seq))


POLICIES = {
    "fcfs": Policy(lambda seq, cache: 0),
    "priority": Policy(lambda seq, cache: (seq.priority, seq.arrival_s, seq.index)),
    "random": Policy(lambda seq, cache: blake2b(seq.index.to_bytes(8, "little"), digest_size=8).digest()),
    # least to compute before the first token
    "shortest_prefill": Policy(uncached_tokens, reorders=True),
    # least KV memory at the start
    "shortest_cache": Policy(lambda seq, cache: seq.num_tokens),
    # least work left in all; knows the answer's length, as no real engine does
    "shortest_service": Policy(lambda seq, cache: seq.prompt_tokens + seq.output_tokens),
    "deadline": Policy(lambda seq, cache: seq.deadline_s),
    "memory_aware_deadline": Policy(lambda seq, cache: seq.deadline_s, skips=True),
    # SGLang's lpm: most cached tokens first
    "longest_prefix": Policy(lambda seq, cache: -len(cache.match(seq)), reorders=True),
    # depth-first through the prompts' prefix tree: chain ids are equal exactly for equal prefixes
    "depth_first": Policy(lambda seq, cache: seq.chain[: seq.prompt_tokens // cache.block_size]),
}


class WaitingQueue:
    """Sequences in order of the policy. A preempted one goes back to its place: under fcfs that is the front,
    since the batch and the queue stay in order of arrival."""

    def __init__(self, policy: Policy, cache: Cache) -> None:
        self._policy = policy
        self._cache = cache
        self._heap: list[tuple[Any, int, Sequence]] = []

    def push(self, seq: Sequence) -> None:
        heappush(self._heap, (self._policy.key(seq, self._cache), seq.order, seq))

    def reorder(self) -> None:
        if self._policy.reorders:
            self._heap = [(self._policy.key(seq, self._cache), order, seq) for _, order, seq in self._heap]
            heapify(self._heap)

    def peek(self) -> Sequence:
        return self._heap[0][-1]

    def pop(self) -> Sequence:
        return heappop(self._heap)[-1]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[-1] is not seq]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
