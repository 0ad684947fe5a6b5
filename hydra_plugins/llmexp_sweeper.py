"""Makes Hydra's multirun a study: the sweeper that `hydra/sweeper: llmexp` names. The work is in llmexp.study."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LlmexpSweeperConf:
    """`params` are sweeps as an experiment's file states them: key to `a,b,c`."""

    _target_: str = "hydra_plugins.llmexp_sweeper.LlmexpSweeper"
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="llmexp", node=LlmexpSweeperConf, provider="llmexp")


class LlmexpSweeper(Sweeper):
    """Hands the sweep to `llmexp.study.sweep`."""

    def __init__(self, params: dict[str, Any]) -> None:
        self._params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        from llmexp.study import sweep

        stated = [f"{key}={value}" for key, value in self._params.items()]
        return sweep([*stated, *arguments], self._config, self._context, self._task)
