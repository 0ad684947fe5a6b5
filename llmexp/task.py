"""Hydra's task: one composed config, made into a run. In a module of its own, so that launchers can pickle it."""

import functools
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llmexp import interrupt
from llmexp.compose import resolve
from llmexp.errors import NOT_VALID, ConfigError, EngineError, LlmexpError, storage_error

if TYPE_CHECKING:
    from llmexp.engines.lease import EngineLease
    from llmexp.schema.config import Config


def make_run(composed: DictConfig, lease: "EngineLease | None" = None, worker: "Worker | None" = None) -> str:
    """Makes the run of a composed config and returns its folder.

    In a study an error is raised, so that the study goes on with its other runs; a single run ends the process.
    """
    if worker is not None:
        worker.set_up()
    in_study = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        config = resolve(composed)
        if config.study.plan_only:
            raise ConfigError("study.plan_only: got true, but there is a plan only of a sweep; add -m")
        if config.simulation is not None:
            return make_simulation(config)
        return _of_study(config, lease) if in_study else _single(config)
    except LlmexpError as error:
        if in_study:
            raise
        end_with(error)
    except Exception as error:
        if isinstance(error, OSError) and (refusal := storage_error(error)):
            if in_study:
                raise refusal from None
            end_with(refusal)
        if not in_study:
            raise
        # A bug; its like may not survive the way back from another process.
        traceback.print_exc()
        raise LlmexpError(f"unexpected {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Worker:
    """What a process that a launcher has started must know of the study's.

    `environment`: variables that the engine is to inherit as they are there; None unsets one. `owner`: the study's
    process, if this one is not to outlive it.
    """

    environment: Mapping[str, str | None]
    owner: int | None

    def set_up(self) -> None:
        """Makes it so, in this process, and lets signals end it in good order."""
        interrupt.install()
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.owner is not None:
            _die_with(self.owner)


@functools.cache  # once a process, which may make many runs
def _die_with(owner: int) -> None:
    def watch() -> None:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(owner)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)  # its engine follows

    threading.Thread(target=watch, daemon=True).start()


def _single(config: "Config") -> str:
    """Makes the run and shows what it measured; a run that is not valid ends the process with a code of its own."""
    from llmexp.prepare import prepare
    from llmexp.tracking import require_ready, ui_command

    plan = prepare(config)
    require_ready(config.tracking)  # before the rest is imported, which takes longer: wrong input is not to wait for it

    from rich.console import Console

    from llmexp.engines.lease import EngineLease
    from llmexp.execute import make
    from llmexp.report.run_table import run_table, verdict
    from llmexp.resume import interrupted, is_complete
    from llmexp.run_lock import alone

    with alone(plan.folder):
        if is_complete(plan.folder):
            raise ConfigError(f"study.name: got {plan.study}, which has a complete run {plan.name}; give another name")
        try:
            made = make(plan, EngineLease(keep=False))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(interrupted([plan.folder])) from None
    if made.status == "refused":
        raise EngineError(made.error)
    console = Console()
    console.print(run_table(made))
    console.print(verdict(made), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Folder: {made.folder}", highlight=False, soft_wrap=True)
    if config.tracking.enabled:
        console.print(f"MLflow: {ui_command(config.tracking)}", highlight=False, soft_wrap=True)
    if not made.valid:
        sys.exit(NOT_VALID)
    return str(made.folder)


def make_simulation(config: "Config") -> str:
    """Makes the study of the simulator that the config describes, and returns its folder."""
    from llmexp.simulate.studies.setting import setting

    found = setting(config)  # before all that draws is imported, as above

    from llmexp.simulate.studies.make import make

    return str(make(found))


def _of_study(config: "Config", lease: "EngineLease | None") -> str:
    """Makes what was planned, unless another process has made it by now."""
    from llmexp.engines.lease import EngineLease
    from llmexp.execute import make
    from llmexp.prepare import prepare
    from llmexp.resume import is_done
    from llmexp.run_lock import alone

    lease = lease or EngineLease(keep=False)
    plan = prepare(config)
    if config.run.planned not in (None, plan.asked):
        raise ConfigError(
            f"{plan.name}: its config or workload is not the planned one any more: a file that it is made of has "
            "changed since the study began; start the study again"
        )
    with alone(plan.folder, before_waiting=lease.close):
        if not is_done(plan):
            make(plan, lease)
    return str(plan.folder)


def end_with(error: LlmexpError) -> NoReturn:
    """Ends the process with the error's message and code."""
    print(f"llmexp: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
