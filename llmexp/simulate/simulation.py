"""The library's one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pyarrow as pa

from llmexp.errors import ConfigError
from llmexp.simulate import loop
from llmexp.simulate.arrivals import Arrivals
from llmexp.simulate.cost import NO_FRONT_END, UNIT_COST, FrontEnd, StepCost
from llmexp.simulate.records import (
    REQUEST_COUNTS,
    REQUEST_TIMES,
    SPAN_COUNTS,
    STEP_COUNTS,
    STEP_TIMES,
    Tables,
)
from llmexp.simulate.requests import Floats, Ints, Request, Requests
from llmexp.simulate.scheduler import Scheduler
from llmexp.simulate.settings import Settings


@dataclass(frozen=True)
class Simulation:
    """What happened, as Arrow tables (columns: ``records.py``). Times are seconds from the start.

    ``steps``: one row a step. ``requests``: one row a request, in the order given. ``spans``: who computed
    how many tokens when; consecutive decode steps of a request are one row.
    """

    settings: Settings
    steps: pa.Table
    requests: pa.Table
    spans: pa.Table

    def token_times_s(self, delivered: bool = False) -> tuple[Ints, Floats]:
        """When each output token came from the engine, or was ``delivered`` to its client: offsets (n + 1,) and
        times, so that ``times[offsets[i]:offsets[i + 1]]`` are request i's tokens, first to last."""
        sampled = self.spans["sampled"].to_numpy() > 0
        steps = self.spans["steps"].to_numpy()[sampled]
        number = np.repeat(self.spans["first_step"].to_numpy()[sampled] + steps - np.cumsum(steps), steps)
        number += np.arange(number.size)
        if delivered:
            end_s = self.steps["delivered_s"].to_numpy()
        else:
            end_s = self.steps["start_s"].to_numpy() + self.steps["duration_s"].to_numpy()
        offsets = np.concatenate(([0], np.cumsum(self.requests["output_tokens"].to_numpy())))
        return offsets, end_s[number]


def simulate(
    requests: Requests | Sequence[Request],
    settings: Settings,
    cost: StepCost = UNIT_COST,
    *,
    max_concurrency: int | None = None,
    keeps_place: bool = False,
    front_end: FrontEnd = NO_FRONT_END,
    compiled: bool | None = None,
) -> Simulation:
    """Serve ``requests`` as vLLM 0.32 with these ``settings`` would, each step taking what ``cost`` says.

    Equal input gives equal output. At most ``max_concurrency`` requests are unfinished at once (a closed
    loop); the client holds the others back; with ``keeps_place`` a conversation counts from its first turn to its
    last. ``compiled`` changes nothing but the speed: by default what vLLM can do is compiled if numba is there
    (vLLM brings it), and the rest runs as plain Python.

    Raises ``RequestNeverFitsError`` and ``TokenBudgetTooSmallError`` for requests that could never be served,
    ``TimeStandsStillError`` if a step takes no time or nothing makes progress, ``ConfigError`` if the
    requests' block size is not the engine's.
    """
    if not isinstance(requests, Requests):
        requests = Requests.of(requests, settings.block_size)
    _check(requests, settings, max_concurrency)
    kernel = _kernel()
    if compiled is None:
        compiled = kernel is not None and settings.vllm_can
    elif compiled and not settings.vllm_can:
        raise ConfigError("compiled=True: only what vLLM can do is compiled")
    if compiled:
        assert kernel is not None
        tables = kernel.run(requests, settings, cost, max_concurrency, keeps_place, front_end)
    else:
        arrivals = Arrivals(requests, max_concurrency, keeps_place, front_end)
        tables = loop.run(requests, Scheduler(settings), cost, arrivals)
    return _simulation(requests, settings, tables)


def _kernel() -> ModuleType | None:
    """What is compiled. Numba comes with vLLM; without it the plain loop makes the same records, slowly."""
    try:
        from llmexp.simulate import kernel
    except ImportError:
        return None
    return kernel


def _check(requests: Requests, settings: Settings, max_concurrency: int | None) -> None:
    if requests.block_size != settings.block_size:
        raise ConfigError(
            f"block_size={settings.block_size}, but the requests are cut into blocks of {requests.block_size}"
        )
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency}: must be at least 1")
    settings.require_fit(requests.prompt_tokens, requests.output_tokens)


def _simulation(requests: Requests, settings: Settings, tables: Tables) -> Simulation:
    columns = {
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "priority": requests.priority,
        **dict(zip(REQUEST_TIMES, tables.request_times.T, strict=True)),
        **dict(zip(REQUEST_COUNTS, tables.request_counts.T, strict=True)),
    }
    return Simulation(
        settings=settings,
        steps=pa.table(
            dict(zip(STEP_TIMES, tables.step_times.T, strict=True))
            | dict(zip(STEP_COUNTS, tables.step_counts.T, strict=True))
        ),
        requests=pa.table(columns),
        spans=pa.table(dict(zip(SPAN_COUNTS, tables.spans.T, strict=True))),
    )
