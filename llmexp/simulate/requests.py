"""What the simulated engine is asked: requests as objects, or as columns that hold millions of them.

Prompts enter the simulation as *chain ids*: one number for each full block, equal exactly when the block's
tokens and all tokens before it are equal (and salt and LoRA adapter, if any). vLLM chains SHA-256 digests
instead (``vllm.v1.core.kv_cache_utils.hash_block_tokens``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llmexp.errors import WorkloadError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. ``arrival_s`` counts from the simulation's start, or, if ``after`` is the index of another
    request (the turn before), from that request's end.

    ``deadline_s`` counts from when the request is sent; only the deadline policies heed it.

    The answer's ``output_tokens`` tokens are generated without an early stop. Give their ids as
    ``output_token_ids`` if later prompts repeat them: blocks filled by decoding are hittable too.
    """

    prompt_token_ids: Sequence[int]
    output_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    deadline_s: float = math.inf
    after: int | None = None
    output_token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests as columns of equal length n (int64, and float64 seconds).

    ``chain_ids[chain_offsets[i]:chain_offsets[i + 1]]`` are the ids of request i's first full blocks of
    ``block_size`` tokens, 0 <= id < ``num_chain_ids``. Later blocks are the request's own, unshared.
    ``after[i]`` is -1 or the index of the request whose end starts the clock of ``arrival_s[i]``.
    Raises ``WorkloadError`` for columns that do not fit together.
    """

    block_size: int
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    priority: Ints
    deadline_s: Floats
    after: Ints
    chain_offsets: Ints
    chain_ids: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        n = len(self)
        for name in ("arrival_s", "output_tokens", "priority", "deadline_s", "after"):
            if len(getattr(self, name)) != n:
                raise WorkloadError(f"{name} has {len(getattr(self, name))} entries for {n} requests")
        if len(self.chain_offsets) != n + 1:
            raise WorkloadError(f"chain_offsets has {len(self.chain_offsets)} entries for {n} requests, not {n + 1}")
        for name in ("prompt_tokens", "output_tokens"):
            short = np.flatnonzero(getattr(self, name) < 1)
            if short.size:
                i = int(short[0])
                raise WorkloadError(f"request {i}: {name}={getattr(self, name)[i]}, must be at least 1")
        late = np.flatnonzero(~(np.isfinite(self.arrival_s) & (self.arrival_s >= 0)))
        if late.size:
            i = int(late[0])
            raise WorkloadError(f"request {i}: arrival_s={self.arrival_s[i]}, must be finite and not negative")
        order = np.flatnonzero((self.after < -1) | (self.after >= np.arange(n)))
        if order.size:
            i = int(order[0])
            raise WorkloadError(f"request {i}: after={self.after[i]}, must be -1 or an earlier request")
        if self.chain_ids.size and self.chain_ids.min() < 0:
            raise WorkloadError("chain_ids must be at least 0 and below 2**31, counting up from 0")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def num_blocks(self) -> Ints:
        """Full blocks of each request, shape (n,). The last sampled token is never fed back, so in none."""
        return np.asarray((self.prompt_tokens + self.output_tokens - 1) // self.block_size, np.int64)

    @cached_property
    def num_chained(self) -> Ints:
        """How many of each request's full blocks have a chain id that others may share, shape (n,)."""
        return np.minimum(np.diff(self.chain_offsets), self.num_blocks)

    @cached_property
    def num_chain_ids(self) -> int:
        return int(self.chain_ids.max()) + 1 if self.chain_ids.size else 0

    @cached_property
    def own_ids(self) -> Ints:
        """The chain id of each request's first unshared block, shape (n,); the ones after it count up."""
        own = self.num_blocks - self.num_chained
        return np.asarray(self.num_chain_ids + np.cumsum(own) - own, np.int64)

    def chain(self, i: int) -> list[int]:
        """The chain ids of all full blocks of request i."""
        start = self.chain_offsets[i]
        own = int(self.own_ids[i])
        shared: list[int] = self.chain_ids[start : start + self.num_chained[i]].tolist()
        return shared + list(range(own, own + int(self.num_blocks[i] - self.num_chained[i])))

    @classmethod
    def of(cls, requests: Sequence[Request], block_size: int) -> "Requests":
        """Columns of request objects, for an engine with this ``block_size``."""
        chains = ChainIds()
        ids = []
        for i, r in enumerate(requests):
            tokens = list(r.prompt_token_ids)
            if r.output_token_ids is not None:
                if len(r.output_token_ids) != r.output_tokens:
                    raise WorkloadError(
                        f"request {i}: output_tokens={r.output_tokens}, but {len(r.output_token_ids)} ids"
                    )
                tokens += r.output_token_ids[:-1]
            ids.append(chains.of_tokens(tokens, block_size, (r.cache_salt, r.lora_name)))
        return cls.columns(
            block_size=block_size,
            arrival_s=np.array([r.arrival_s for r in requests], np.float64),
            prompt_tokens=np.array([len(r.prompt_token_ids) for r in requests], np.int64),
            output_tokens=np.array([r.output_tokens for r in requests], np.int64),
            priority=np.array([r.priority for r in requests], np.int64),
            deadline_s=np.array([r.deadline_s for r in requests], np.float64),
            after=np.array([-1 if r.after is None else r.after for r in requests], np.int64),
            chain_offsets=_offsets([len(chain) for chain in ids]),
            chain_ids=np.array([chain_id for chain in ids for chain_id in chain]),
        )

    @classmethod
    def of_hash_ids(
        cls,
        hash_ids: Sequence[Sequence[int]],
        hash_tokens: int,
        block_size: int,
        *,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        arrival_s: npt.ArrayLike | None = None,
    ) -> "Requests":
        """Columns of prompts that are known only by ids of ``hash_tokens`` tokens each, where equal ids mean
        equal prefixes (the Mooncake traces' ``hash_ids``, 512 tokens an id; the last may stand for fewer).
        ``hash_tokens`` must be a multiple of ``block_size``."""
        if hash_tokens % block_size:
            raise WorkloadError(f"hash_tokens={hash_tokens} is no multiple of block_size={block_size}")
        ratio = hash_tokens // block_size
        flat = (
            np.concatenate([np.asarray(ids, np.int64) for ids in hash_ids]) if len(hash_ids) else np.zeros(0, np.int64)
        )
        _, dense = np.unique(flat, return_inverse=True)
        blocks = (dense.astype(np.int32)[:, None] * ratio + np.arange(ratio, dtype=np.int32)).ravel()
        offered = np.array([len(ids) for ids in hash_ids], np.int64) * ratio
        full = np.asarray(prompt_tokens, np.int64) // block_size
        short = np.flatnonzero(offered < full)
        if short.size:
            i = int(short[0])
            raise WorkloadError(f"request {i}: {len(hash_ids[i])} hash_ids do not cover {full[i] * block_size} tokens")
        starts = np.cumsum(offered) - offered
        within = np.arange(blocks.size) - np.repeat(starts, offered)
        return cls.columns(
            block_size=block_size,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            arrival_s=arrival_s,
            chain_offsets=_offsets(full),
            chain_ids=blocks[within < np.repeat(full, offered)],
        )

    @classmethod
    def columns(
        cls,
        *,
        block_size: int,
        prompt_tokens: npt.ArrayLike,
        output_tokens: npt.ArrayLike,
        arrival_s: npt.ArrayLike | None = None,
        priority: npt.ArrayLike | None = None,
        deadline_s: npt.ArrayLike | None = None,
        after: npt.ArrayLike | None = None,
        chain_offsets: npt.ArrayLike | None = None,
        chain_ids: npt.ArrayLike | None = None,
    ) -> "Requests":
        """Columns, where what is left out means: all at once, equal priority, independent, unshared."""
        prompts = np.asarray(prompt_tokens, np.int64)
        n = len(prompts)
        no_chains = np.zeros(n + 1, np.int64)
        return cls(
            block_size=block_size,
            prompt_tokens=prompts,
            output_tokens=np.asarray(output_tokens, np.int64),
            arrival_s=np.zeros(n) if arrival_s is None else np.asarray(arrival_s, np.float64),
            priority=np.zeros(n, np.int64) if priority is None else np.asarray(priority, np.int64),
            deadline_s=np.full(n, np.inf) if deadline_s is None else np.asarray(deadline_s, np.float64),
            after=np.full(n, -1, np.int64) if after is None else np.asarray(after, np.int64),
            chain_offsets=no_chains if chain_offsets is None else np.asarray(chain_offsets, np.int64),
            chain_ids=np.asarray([] if chain_ids is None else chain_ids).astype(np.int32),
        )


class ChainIds:
    """Numbers chains of blocks: the same parent and the same tokens give the same id, without collisions."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int | tuple[str | None, str | None], tuple[int, ...]], int] = {}

    def of_tokens(
        self, tokens: Sequence[int], block_size: int, extra: tuple[str | None, str | None] = (None, None)
    ) -> list[int]:
        """Ids of the full blocks of ``tokens``. ``extra`` (cache salt, LoRA name) keys the first block, and
        through the chain all others."""
        chain: list[int] = []
        parent: int | tuple[str | None, str | None] = extra
        for start in range(0, len(tokens) - block_size + 1, block_size):
            key = (parent, tuple(tokens[start : start + block_size]))
            parent = self._ids.setdefault(key, len(self._ids))
            chain.append(parent)
        return chain


def steps_without_token(requests: Requests) -> int:
    """More steps than any engine can need for its next token: the sequence that is never preempted gets at
    least one token of its prompt computed in each."""
    return 2 * int((requests.prompt_tokens + requests.output_tokens).max(initial=0))


def _offsets(lengths: npt.ArrayLike) -> Ints:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64)))).astype(np.int64)
