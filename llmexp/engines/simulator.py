"""The simulated engine: vLLM's scheduler and KV cache, steps that cost what a calibration or a roofline says, and its
own client, in simulated time.

What simulates is imported where it is used: other engines do without it, and it brings a compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmexp.engines.engine import EngineFacts
from llmexp.errors import ConfigError
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.engine import Simulator as SimulatorConfig

if TYPE_CHECKING:
    from llmexp.simulate.calibration import CalibrationFile
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
    """Refuses what a simulation cannot do, and a calibration that cannot be read. Raises ConfigError."""
    if not config.reset_cache:
        raise ConfigError("reset_cache: got false; accepted with engine=simulator is true: each round begins empty")
    if config.warm_up.prompts == "workload":
        raise ConfigError("warm_up.prompts: got 'workload'; accepted with engine=simulator is 'neutral'")
    if _calibration(config) is None and (config.gpu.flops_per_s is None or config.gpu.bandwidth_bytes_per_s is None):
        raise ConfigError(
            f"engine=simulator: the datasheet of gpu={config.gpu.name} is not known; set engine.calibration to a file "
            "of `llmexp calibrate`, or gpu to one with rates, such as gpu=h200"
        )


def arguments(config: Config, model: Model) -> list[str]:
    """All that determines it, so that runs share one where they may."""
    parts = (config.gpu, config.kv, config.cache, config.scheduler, config.max_num_seqs)
    return [str(model.path), *(repr(part) for part in parts)]


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None]) -> Simulator:
    """Makes the engine of a config. Raises ConfigError where its cost or its KV cache cannot be known."""
    from llmexp.simulate.engine import engine_of, weight_bytes

    while_starting()
    made = engine_of(config, model, _calibration(config))
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


def _calibration(config: Config) -> "CalibrationFile | None":
    from llmexp.simulate.calibration import load

    assert isinstance(config.engine, SimulatorConfig)
    return None if config.engine.calibration is None else load(config.engine.calibration)
