"""The simulated engine: vLLM's scheduler and KV cache, steps that cost what a calibration or a roofline says, and its
own client, in simulated time.

What simulates is imported where it is used: other engines do without it, and it brings a compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmexp import models
from llmexp.engines.engine import EngineFacts
from llmexp.errors import ConfigError
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.engine import Simulator as SimulatorConfig
from llmexp.workloads.workload import Workload

if TYPE_CHECKING:
    from llmexp.simulate.engine import SimulatedEngine

VERSION = "simulated vLLM 0.32"


@dataclass(frozen=True)
class Simulator:
    """An engine that needs no client. Its cache is empty at the start of each round."""

    simulated: "SimulatedEngine"
    facts: EngineFacts
    launch_s: float = 0.0
    log: Path | None = None
    alive: bool = True

    def stop(self) -> None:
        """Nothing of it runs."""


def check(config: Config, here: bool = True) -> None:
    """Refuses what a simulation cannot do, and an engine whose cost or KV cache cannot be known. Raises ConfigError."""
    if not config.reset_cache:
        raise ConfigError("reset_cache: got false; accepted with engine=simulator is true: each round begins empty")
    if config.warm_up.prompts == "workload":
        raise ConfigError("warm_up.prompts: got 'workload'; accepted with engine=simulator is 'neutral'")
    _engine(config, models.locate(config.model))


def require_fit(config: Config, model: Model, workload: Workload) -> None:
    """Refuses a workload that the engine of a config could never serve. Raises ConfigError."""
    from llmexp.simulate.errors import RequestNeverFitsError, TokenBudgetTooSmallError

    try:
        _engine(config, model).settings.require_fit(workload.prompt_tokens, workload.output_tokens)
    except RequestNeverFitsError as error:
        asked = f"kv.num_blocks: got {config.kv.num_blocks or 'null'}"
        raise ConfigError(f"{asked}; {error}: give more, or ask for shorter requests") from None
    except TokenBudgetTooSmallError as error:
        asked = f"scheduler.max_num_batched_tokens: got {config.scheduler.max_num_batched_tokens or 'null'}"
        raise ConfigError(f"{asked}; {error}: give more, or ask for shorter requests") from None


def arguments(config: Config, model: Model) -> list[str]:
    """All that determines it, so that runs share one where they may."""
    parts = (config.gpu, config.kv, config.cache, config.scheduler, config.max_num_seqs)
    return [str(model.path), *(repr(part) for part in parts)]


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None]) -> Simulator:
    """Makes the engine of a config."""
    from llmexp.simulate.engine import weight_bytes

    while_starting()
    made = _engine(config, model)
    settings = made.settings
    return Simulator(
        made,
        EngineFacts(
            version=VERSION,
            block_size=settings.block_size,
            num_gpu_blocks=settings.num_gpu_blocks,
            kv_capacity_tokens=settings.num_gpu_blocks * settings.block_size,
            prefix_caching=settings.enable_prefix_caching,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            model_memory_bytes=weight_bytes(config, model),
            unknown=("the client's lag and load: a simulation has neither",),
        ),
    )


def _engine(config: Config, model: Model) -> "SimulatedEngine":
    from llmexp.simulate.calibration import load
    from llmexp.simulate.engine import engine_of

    assert isinstance(config.engine, SimulatorConfig)
    path = config.engine.calibration
    return engine_of(config, model, None if path is None else load(path))
