"""Everything about a run that is settled before an engine starts: what is sent, to what, and where it is kept."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from llmexp import fingerprint, hardware, models
from llmexp.client.replay import require_arrivals, require_written
from llmexp.engines import devices, simulator
from llmexp.engines.kinds import kind_of
from llmexp.errors import ConfigError
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.engine import OwnVllm
from llmexp.schema.engine import Simulator as SimulatorConfig
from llmexp.workloads.audit import Audit, audit, require_no_reuse
from llmexp.workloads.build import build
from llmexp.workloads.workload import Workload

_DEFAULT_BLOCK_SIZE = 16  # vLLM's on a GPU
_CONTROL = "unique_prefix"  # the kind of workload that must share nothing


@dataclass(frozen=True)
class Preparation:
    """A run that can start. `fingerprint` hashes all that can change its numbers, `asked` what of that does not
    depend on the machine. `here`: it would be made on this machine."""

    config: Config
    study: str
    name: str
    folder: Path
    model: Model
    workload: Workload
    here: bool
    environment: Mapping[str, Any]
    asked: str
    fingerprint: str
    duration_s: float


def prepare(config: Config, here: bool = True) -> Preparation:
    """Checks a config against engine, disk and model, and builds what is sent.

    `here`: the run is to be made on this machine, so that its devices are checked too; one that is only planned, or
    was made already, may be for a machine with others.
    Raises ConfigError or WorkloadError.
    """
    started = time.monotonic()
    kind_of(config).check(config, here)
    require_writable(Path(config.runs_dir))
    study = config.study.name or timestamp()
    name = config.run.name or f"cache-{config.cache.name}.max_num_seqs-{config.max_num_seqs}"
    model = models.locate(config.model)
    workload = build(config.workload, model)
    require_written(workload, config.client)
    require_arrivals(workload, config.load)
    if config.workload.kind == _CONTROL:
        account(config, workload, None)
    if isinstance(config.engine, SimulatorConfig):
        simulator.require_fit(config, model, workload)
    environment = hardware.environment(config.engine.python if isinstance(config.engine, OwnVllm) else None)
    if isinstance(config.engine, OwnVllm):
        environment["variables"] = fingerprint.inherited(os.environ, config.engine.env)
    asked = fingerprint.asked(config.model_dump(mode="json"), model, workload.sha256)
    return Preparation(
        config=config,
        study=study,
        name=name,
        folder=Path(config.runs_dir).absolute() / study / name,
        model=model,
        workload=workload,
        here=here,
        environment=environment,
        asked=fingerprint.of(asked),
        fingerprint=fingerprint.of(asked | fingerprint.conditions(environment)),
        duration_s=time.monotonic() - started,
    )


def lacking(config: Config) -> str | None:
    """What this machine lacks of the devices that an engine of our own would need; None if nothing."""
    if not isinstance(config.engine, OwnVllm):
        return None
    return devices.lacking(config.gpu.device, config.gpu.tensor_parallel_size)


def account(config: Config, workload: Workload, block_size: int | None) -> Audit:
    """The audit of what a run sends, in the engine's blocks, or in those expected of it while it has not told.

    Raises WorkloadError if the workload is a control without reuse and shares a block after all.
    """
    found = audit(workload, block_size or config.kv.block_size or _DEFAULT_BLOCK_SIZE)
    if config.workload.kind == _CONTROL:
        require_no_reuse(workload, found)
    return found


def timestamp() -> str:
    """The name of a study that was given none."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def require_writable(folder: Path) -> None:
    """Refuses a folder for results that cannot be written, or made where there is none yet. Raises ConfigError."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"runs_dir: got {str(folder)!r}, which cannot be written ({error.strerror})") from None
