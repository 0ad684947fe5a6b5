"""Hydra's launchers: what each needs so that a study's runs measure the same through it as in this process."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from llmexp.engines.lease import EngineLease
from llmexp.errors import ConfigError
from llmexp.schema.config import Config
from llmexp.schema.engine import OwnVllm
from llmexp.task import Worker

_IN_PROCESS, _JOBLIB, _SUBMITIT_LOCAL = "BasicLauncher", "JoblibLauncher", "LocalLauncher"
# Where a scheduler that deals out GPUs is told how many a job needs, and other ways to tell it.
_GPUS = {"RayLauncher": "ray.remote.num_gpus", "SlurmLauncher": "gpus_per_node"}
_OTHER_GPUS = ("gpus_per_task", "gres")
# What joblib and Ray set in their workers to share the cores out; engines are not to take it over.
_SHARES = ("OMP", "MKL", "OPENBLAS", "BLIS", "VECLIB", "NUMBA", "NUMEXPR")
_SET_IN_WORKERS = (*(f"{library}_NUM_THREADS" for library in _SHARES), "ENABLE_IPC")


def name_of(base: DictConfig) -> str:
    """The class of the launcher that a config names."""
    return str(base.hydra.launcher._target_).rpartition(".")[2]


def in_process(launcher: str) -> bool:
    """Whether jobs run one after the other in this process, so that they can share an engine."""
    return launcher == _IN_PROCESS


def on_this_host(launcher: str) -> bool:
    """Whether all jobs run on this machine, as processes that end with the study."""
    return launcher in (_IN_PROCESS, _JOBLIB)


def check(launcher: str, composed: DictConfig) -> None:
    """Refuses what other hosts could not take part in. Raises ConfigError."""
    if on_this_host(launcher):
        return
    elsewhere = f"{launcher} may run jobs on other hosts"
    if OmegaConf.select(composed, "gpu.device") == "auto":
        raise ConfigError(f"gpu: got auto; {elsewhere}, so name their device, as in gpu=h100")
    uri = composed.tracking.uri
    if composed.tracking.enabled and (uri is None or str(uri).startswith(("sqlite:", "file:", "/", "."))):
        raise ConfigError(
            f"tracking.uri: got {uri or 'null'}; {elsewhere}, which cannot share a SQLite store: "
            "start `mlflow server` and give its URL, as in tracking.uri=http://HOST:5000"
        )


def launch(
    jobs: Sequence[Sequence[str]],
    configs: Sequence[Config],
    base: DictConfig,
    context: HydraContext,
    task: TaskFunction,
    lease: EngineLease,
) -> tuple[dict[int, str], str | None]:
    """Runs the jobs, given as overrides; `configs` are what they will compose.

    In this process they run on the engine of `lease`, elsewhere each on its own. Returns what went wrong by the job's
    number, and why the launcher itself gave up, if it did.
    """
    launcher = name_of(base)
    if in_process(launcher):
        function: Any = partial(task, lease=lease)  # type: ignore[call-arg]
    else:
        function = partial(task, worker=worker_of(launcher))  # type: ignore[call-arg]
        base = with_gpus(base, max(map(_gpus_needed, configs)))
    instance = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=function, config=base)
    try:
        made = instance.launch(jobs, initial_job_idx=0)
    except Exception as error:  # a scheduler's, or that of a worker's death
        return {}, f"{launcher} gave up: {type(error).__name__}: {error}"
    return {i: str(one._return_value) for i, one in enumerate(made) if one.status != JobStatus.COMPLETED}, None


def worker_of(launcher: str) -> Worker:
    """What a job in a process of its own is to take over from this one."""
    # submitit's local executor hides the GPUs, but here jobs choose their own by locks.
    names = [*_SET_IN_WORKERS, *(["CUDA_VISIBLE_DEVICES"] if launcher == _SUBMITIT_LOCAL else [])]
    owner = os.getpid() if on_this_host(launcher) else None  # a scheduler's jobs outlive who has submitted them
    return Worker({name: os.environ.get(name) for name in names}, owner)


def with_gpus(base: DictConfig, count: int) -> DictConfig:
    """The config with `count` GPUs a job, where its launcher deals them out and was not told how many."""
    key = _GPUS.get(name_of(base))
    asked = [OmegaConf.select(base.hydra.launcher, name) for name in (key, *_OTHER_GPUS) if name]
    if count == 0 or key is None or any(value is not None for value in asked):
        return base
    base = base.copy()
    OmegaConf.update(base.hydra.launcher, key, count, force_add=True)
    return base


def _gpus_needed(config: Config) -> int:
    own = isinstance(config.engine, OwnVllm) and config.gpu.device == "cuda"
    return config.gpu.tensor_parallel_size if own else 0
