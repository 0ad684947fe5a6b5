"""What a study simulates: the config's workload, on an engine as the config describes it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from llmexp import models
from llmexp.client.arrivals import arrivals
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.load import ClosedLoop
from llmexp.schema.simulation import PagedMemory
from llmexp.simulate.cost import StepCost
from llmexp.simulate.engine import roofline_of, settings_of
from llmexp.simulate.requests import Requests
from llmexp.simulate.settings import Settings
from llmexp.simulate.workload import opens, requests_of
from llmexp.workloads.build import build
from llmexp.workloads.multi_turn import as_recorded
from llmexp.workloads.workload import Workload


@dataclass(frozen=True)
class Setting:
    """A config with its model found and its workload built."""

    config: Config
    model: Model
    workload: Workload

    @property
    def block_size(self) -> int:
        return self._settings.block_size

    @property
    def max_concurrency(self) -> int | None:
        """Requests in flight, where the load is a closed loop."""
        load = self.config.load
        return load.concurrency if isinstance(load, ClosedLoop) else None

    def requests(self, block_size: int | None = None, due_s: npt.ArrayLike | None = None) -> Requests:
        """The workload, arriving as `load` says unless `due_s` does."""
        if due_s is None and self.max_concurrency is None:
            first = opens(self.workload)
            offsets_s = None if self.workload.arrivals_s is None else self.workload.arrivals_s[first]
            due_s = arrivals(self.config.load, int(first.sum()), seed=self.config.seed, offsets_s=offsets_s)
        return requests_of(self.workload, block_size or self.block_size, due_s)

    def engine(self, **changes: Any) -> Settings:
        """The engine of the config, with other settings. `capacity_tokens` sets the KV cache's size in tokens."""
        block_size = changes.get("block_size", self.block_size)
        capacity_tokens = changes.pop("capacity_tokens", self.capacity_tokens)
        changes = {"num_gpu_blocks": capacity_tokens // block_size + 1, **changes}  # block 0 is the pool's own
        return replace(self._settings, **changes)

    @property
    def capacity_tokens(self) -> int:
        """What the KV cache holds."""
        return (self._settings.num_gpu_blocks - 1) * self._settings.block_size

    @cached_property
    def _settings(self) -> Settings:
        return replace(settings_of(self.config, self.model), async_scheduling=False)  # all engines alike

    def cost(self) -> StepCost:
        """How long steps take: the model's roofline on the GPU, at the study's efficiencies."""
        study = self.config.simulation
        assert study is not None and not isinstance(study, PagedMemory)
        return roofline_of(
            self.config,
            self.model,
            overhead_s=study.step_overhead_ms / 1000,
            compute_efficiency=study.compute_efficiency,
            memory_efficiency=study.memory_efficiency,
        )

    def described(self) -> str:
        """The workload, and what serves it, in a line."""
        tokens = (
            f"{self.workload.prompt_tokens.mean():,.0f} prompt and {self.workload.output_tokens.mean():,.0f} output"
        )
        return f"{len(self.workload):,} requests of {self.workload.name}, {tokens} tokens on average"

    def engine_described(self) -> str:
        """The model and device whose steps are reckoned."""
        gpu = self.config.gpu
        devices = f"{gpu.tensor_parallel_size} × " if gpu.tensor_parallel_size > 1 else ""
        return f"{self.model.name} on {devices}{gpu.name}"


def setting(config: Config) -> Setting:
    """Finds the model and builds the workload. Where it has conversations, the simulated engine gives the
    answers that the prompts hold. Raises ConfigError or WorkloadError, also where it is not known what steps take."""
    model = models.locate(config.model)
    workload = build(config.workload, model)
    if "turn" in workload.columns:
        workload = as_recorded(workload)
    made = Setting(config, model, workload)
    if not isinstance(config.simulation, PagedMemory):  # which takes no time
        made.cost()
    return made


def poisson(setting: Setting, rate_per_s: float) -> npt.NDArray[np.float64]:
    """Arrivals at another rate: the same gaps, drawn together or apart."""
    rng = np.random.default_rng(setting.config.seed)
    gaps = rng.exponential(1.0, int(opens(setting.workload).sum()))
    times: npt.NDArray[np.float64] = np.cumsum(gaps) / rate_per_s
    return times
