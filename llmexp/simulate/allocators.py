"""How KV memory is reserved: one contiguous range a request, or blocks of any size.

The question is that of figure 2 of the PagedAttention paper (Kwon et al. 2023): with a queue that is never empty,
what share of the memory holds tokens? Requests are served first come, first served, each gets a token a step, and
a step's time does not matter.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmexp.simulate.errors import RequestNeverFitsError

Reservation = Literal["max", "pow2", "oracle"]


class Usage(NamedTuple):
    """Shares of the memory, averaged over the steps with a queue; they add up to 1.

    ``tokens`` hold KV. ``later`` is reserved and will hold KV before its request is answered. ``internal`` is
    reserved and never used. ``external`` is free, but nothing that the head of the queue can be given.
    """

    tokens: float
    later: float
    internal: float
    external: float


class Allocator(Protocol):
    """Memory for requests that hold ``tokens`` now and ``total`` at last."""

    capacity_tokens: int

    def admit(self, tokens: int, total: int) -> "Grant | None":
        """Memory for a request that enters the batch, or None."""

    def grow(self, grant: "Grant", tokens: int) -> bool:
        """Make room for ``tokens`` in all, or return False."""

    def release(self, grant: "Grant") -> None: ...


@dataclass(slots=True)
class Grant:
    """Memory given to one request: its size in tokens, and, if it is a range, its start."""

    size: int
    start: int = 0


class Contiguous:
    """One range for a request's whole life, from a binary buddy allocator (Knowlton 1965), as in the paper.

    ``max`` reserves ``max_model_len`` tokens, ``pow2`` the prompt and the answer rounded up to a power of two,
    ``oracle`` both exactly. The allocator rounds ranges up to powers of two.
    """

    def __init__(self, capacity_tokens: int, reservation: Reservation, max_model_len: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.reservation = reservation
        self.max_model_len = max_model_len
        self._free: dict[int, set[int]] = {}
        start = 0
        for bit in reversed(range(capacity_tokens.bit_length())):  # aligned ranges, the largest first
            if capacity_tokens >> bit & 1:
                self._free[1 << bit] = {start}
                start += 1 << bit

    def admit(self, tokens: int, total: int) -> Grant | None:
        size = 1 << (self._wanted(tokens, total) - 1).bit_length()
        fitting = [free for free, starts in self._free.items() if free >= size and starts]
        if not fitting:
            return None
        free = min(fitting)
        start = min(self._free[free])
        self._free[free].remove(start)
        while free > size:
            free //= 2
            self._free.setdefault(free, set()).add(start + free)
        return Grant(size, start)

    def grow(self, grant: Grant, tokens: int) -> bool:
        return tokens <= grant.size

    def release(self, grant: Grant) -> None:
        start, size = grant.start, grant.size
        while (buddy := start ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free.setdefault(size, set()).add(start)

    def _wanted(self, tokens: int, total: int) -> int:
        if self.reservation == "max":
            return self.max_model_len
        if self.reservation == "oracle":
            return total
        return min(self.max_model_len, tokens + (1 << (total - tokens - 1).bit_length()))


class Paged:
    """Blocks of ``block_size`` tokens as they are needed, from anywhere."""

    def __init__(self, capacity_tokens: int, block_size: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self._free_blocks = capacity_tokens // block_size

    def admit(self, tokens: int, total: int) -> Grant | None:
        grant = Grant(0)
        return grant if self.grow(grant, tokens) else None

    def grow(self, grant: Grant, tokens: int) -> bool:
        blocks = -(-(tokens - grant.size) // self.block_size)
        if blocks > self._free_blocks:
            return False
        if blocks > 0:
            self._free_blocks -= blocks
            grant.size += blocks * self.block_size
        return True

    def release(self, grant: Grant) -> None:
        self._free_blocks += grant.size // self.block_size


@dataclass(eq=False, slots=True)
class _Request:
    tokens: int
    total: int
    grant: Grant


def memory_usage(prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, allocator: Allocator) -> Usage:
    """Serve all requests, lengths (n,) each, and average how the memory is used while some wait.

    A request whose memory cannot grow is preempted, the last admitted first, and starts over with the tokens
    that it has. Raises ``RequestNeverFitsError`` if one cannot have its memory even alone.
    """
    prompts, outputs = np.asarray(prompt_tokens, np.int64), np.asarray(output_tokens, np.int64)
    waiting = deque((int(p), int(p + o)) for p, o in zip(prompts, outputs, strict=True))
    running: list[_Request] = []
    samples: list[tuple[int, int, int]] = []
    while waiting or running:
        while waiting and (grant := allocator.admit(*waiting[0])):
            running.append(_Request(*waiting.popleft(), grant))
        if not running:
            raise RequestNeverFitsError(
                f"a request of {waiting[0][1]} tokens gets no memory of {allocator.capacity_tokens} tokens"
            )
        if waiting:
            samples.append(_sample(running))
        survivors: list[_Request] = []
        while running:
            request = running.pop(0)
            while not allocator.grow(request.grant, request.tokens + 1):
                victim = running.pop() if running else request
                allocator.release(victim.grant)
                waiting.appendleft((victim.tokens, victim.total))
                if victim is request:
                    if not survivors:
                        raise RequestNeverFitsError(
                            f"a request of {request.total} tokens outgrows {allocator.capacity_tokens} tokens"
                        )
                    break
            else:
                request.tokens += 1
                if request.tokens < request.total:
                    survivors.append(request)
                else:
                    allocator.release(request.grant)
        running = survivors
    if not samples:
        raise ValueError("no request ever waited: give more requests or less memory")
    tokens, later, internal = (np.mean(samples, axis=0) / allocator.capacity_tokens).tolist()
    return Usage(tokens, later, internal, 1.0 - tokens - later - internal)


def _sample(running: list[_Request]) -> tuple[int, int, int]:
    tokens = sum(request.tokens for request in running)
    later = sum(min(request.grant.size, request.total) - request.tokens for request in running)
    return tokens, later, sum(request.grant.size for request in running) - tokens - later


def beam_blocks(prompt_tokens: int, parents: Sequence[Sequence[int]], block_size: int) -> tuple[list[int], list[int]]:
    """Blocks in use after each generated token, with copy-on-write sharing and without.

    ``parents[t][k]`` is the beam of step t - 1 that beam k goes on from at step t; step 0's beams all go on from
    the prompt (beam 0). Parallel samples are beams whose parents are themselves from step 1 on. A beam that
    writes into a block that others hold copies it first (Kwon et al. 2023, section 4.4).
    """
    count = 0

    def fresh() -> int:
        nonlocal count
        count += 1
        return count

    tables = [[fresh() for _ in range(-(-prompt_tokens // block_size))]]
    shared, alone = [], []
    for step, chosen in enumerate(parents):
        tables = [list(tables[parent]) for parent in chosen]
        holders: dict[int, int] = {}
        for table in tables:
            for block in table:
                holders[block] = holders.get(block, 0) + 1
        for table in tables:
            if (prompt_tokens + step) % block_size == 0:
                table.append(fresh())
            elif holders[table[-1]] > 1:
                holders[table[-1]] -= 1
                table[-1] = fresh()
        shared.append(len({block for table in tables for block in table}))
        alone.append(sum(len(table) for table in tables))
    return shared, alone
