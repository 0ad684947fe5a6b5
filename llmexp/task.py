"""Hydra's task: one composed config, made into a run. In a module of its own, so that launchers can pickle it."""

import sys
from typing import TYPE_CHECKING, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llmexp.compose import resolve
from llmexp.errors import ConfigError, EngineError, LlmexpError, WorkloadError

if TYPE_CHECKING:
    from llmexp.engines.lease import EngineLease

WRONG_INPUT, FAILED = 2, 1


def make_run(composed: DictConfig, lease: "EngineLease | None" = None) -> str:
    """Makes the run of a composed config and returns its folder.

    In a study an error is raised, so that the study goes on with its other runs; a single run ends the process.
    """
    from llmexp.run import run

    in_study = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        made = run(resolve(composed), lease)
        if made.status == "refused" and not in_study:
            raise EngineError(made.error)
    except LlmexpError as error:
        if in_study:
            raise
        end_with(error)
    return str(made.folder)


def end_with(error: LlmexpError) -> NoReturn:
    """Ends the process with the error's message: code 2 for wrong input, 1 for a failure."""
    print(f"llmexp: {error}", file=sys.stderr)
    sys.exit(WRONG_INPUT if isinstance(error, ConfigError | WorkloadError) else FAILED)
