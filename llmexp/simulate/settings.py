"""The engine's settings, under vLLM's names."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from llmexp.errors import ConfigError
from llmexp.simulate.errors import RequestNeverFitsError, TokenBudgetTooSmallError

Policy = Literal[
    "fcfs",
    "priority",
    "random",
    "shortest_prefill",
    "shortest_cache",
    "shortest_service",
    "deadline",
    "memory_aware_deadline",
    "longest_prefix",
    "depth_first",
]
Batching = Literal["continuous", "static"]
PrefixCache = Literal["blocks", "radix", "radix_trimmed"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Scheduler and KV cache settings; names, meaning and defaults are vLLM 0.32's (``vllm.config``).

    ``num_gpu_blocks`` counts block 0, which the pool keeps for itself, so ``num_gpu_blocks - 1`` hold tokens.
    ``max_num_seqs`` and ``max_num_batched_tokens`` default to the class's values; a server chooses larger
    ones by GPU memory. Raises ``ConfigError`` for values that the engine would refuse.
    """

    num_gpu_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: Policy = "fcfs"
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    batching: Batching = "continuous"
    prefix_cache: PrefixCache = "blocks"
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("num_gpu_blocks", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", self.max_num_seqs),
            ("long_prefill_token_threshold", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark}: must be in [0, 1)")
        for name, accepted in (("policy", Policy), ("batching", Batching), ("prefix_cache", PrefixCache)):
            if getattr(self, name) not in get_args(accepted):
                values = ", ".join(get_args(accepted))
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {values}")
        if self.prefix_cache != "blocks" and not self.enable_prefix_caching:
            raise ConfigError(f"prefix_cache={self.prefix_cache!r} needs enable_prefix_caching=True")
        if self.async_scheduling and not self.vllm_can:
            raise ConfigError("async_scheduling=True: only what vLLM can do is scheduled ahead")

    @property
    def vllm_can(self) -> bool:
        """Whether vLLM has an engine with these settings."""
        return self.policy in ("fcfs", "priority") and self.batching == "continuous" and self.prefix_cache == "blocks"

    def require_fit(self, prompt_tokens: npt.NDArray[np.integer], output_tokens: npt.NDArray[np.integer]) -> None:
        """Raises ``RequestNeverFitsError`` and ``TokenBudgetTooSmallError`` if one of these requests, shape (n,), could
        never be served."""
        longest = prompt_tokens.astype(np.int64) + output_tokens - 1  # the last token is not fed back
        blocks = -(-longest // self.block_size)
        for i in np.flatnonzero(blocks > self.num_gpu_blocks - 1)[:1]:
            raise RequestNeverFitsError(
                f"request {i}: {longest[i]} tokens need {blocks[i]} blocks of {self.block_size}, but "
                f"num_gpu_blocks={self.num_gpu_blocks} gives {self.num_gpu_blocks - 1}"
            )
        if not self.enable_chunked_prefill:
            for i in np.flatnonzero(longest > self.max_num_batched_tokens)[:1]:
                raise TokenBudgetTooSmallError(
                    f"request {i}: up to {longest[i]} tokens must be computed in one step with "
                    f"enable_chunked_prefill=False, but max_num_batched_tokens={self.max_num_batched_tokens}"
                )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that must stay free when a request is admitted beside running ones."""
        return int(self.watermark * self.num_gpu_blocks)
