"""The engine's settings, under vLLM's names."""

from dataclasses import dataclass
from typing import Literal, get_args

from llmexp.errors import ConfigError

Policy = Literal["fcfs", "priority"]


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
        if self.policy not in get_args(Policy):
            raise ConfigError(f"policy={self.policy!r}: must be one of {', '.join(get_args(Policy))}")

    @property
    def watermark_blocks(self) -> int:
        """Blocks that must stay free when a request is admitted beside running ones."""
        return int(self.watermark * self.num_gpu_blocks)
