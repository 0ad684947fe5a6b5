"""Controlled experiments on LLM serving: composable configs, paired runs on vLLM, MLflow tracking."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmexp.analyze.study import Study
    from llmexp.results import RunResult

__all__ = ["load_run", "load_study", "run"]


def run(overrides: Sequence[str] = ()) -> "RunResult":
    """Makes the run that `python -m llmexp OVERRIDES…` makes, and returns what was measured.

    Raises `llmexp.errors.LlmexpError`: ConfigError or WorkloadError before anything starts, EngineError later.
    """
    from llmexp.compose import compose
    from llmexp.execute import run as run_config

    return run_config(compose(overrides))


def load_run(folder: str | Path) -> "RunResult":
    """Reads back the folder of a run. Raises `llmexp.errors.ResultError` if it holds none."""
    from llmexp.results import load_run as load

    return load(folder)


def load_study(folder: str | Path) -> "Study":
    """Reads back the folder of a study. Raises `llmexp.errors.ResultError` if it holds none."""
    from llmexp.analyze.study import load_study as load

    return load(folder)
