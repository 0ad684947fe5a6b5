"""A simulation on disk: Parquet for analysis, and a Chrome trace to look at (chrome://tracing, Perfetto)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from llmexp.simulate.simulation import Simulation

ENGINE, REQUESTS = 1, 2  # the trace's two processes
COUNTERS = ("running", "waiting", "free_blocks")


def write_parquet(simulation: Simulation, folder: Path) -> None:
    """Write ``steps.parquet``, ``simulated_requests.parquet`` and ``spans.parquet`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in (
        ("steps", simulation.steps),
        ("simulated_requests", simulation.requests),
        ("spans", simulation.spans),
    ):
        pq.write_table(table, folder / f"{name}.parquet")


def write_chrome_trace(simulation: Simulation, path: Path) -> None:
    """Write the Trace Event Format: the engine's steps with counters of its batch, queue and blocks, and one
    track a request with its wait, prefill and decode spans."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps({"traceEvents": list(_events(simulation)), "displayTimeUnit": "ms"}))


def _events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for process, name in ((ENGINE, "engine (simulated)"), (REQUESTS, "requests (simulated)")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    steps = simulation.steps.to_pylist()
    for number, step in enumerate(steps):
        start_s, duration_s = step.pop("start_s"), step.pop("duration_s")
        yield _span(ENGINE, 0, f"step {number}", start_s, duration_s, step)
        for counter in COUNTERS:
            yield {"ph": "C", "pid": ENGINE, "name": counter, "ts": 1e6 * start_s, "args": {counter: step[counter]}}
    starts = simulation.steps["start_s"].to_numpy()
    ends = starts + simulation.steps["duration_s"].to_numpy()
    for index, request in enumerate(simulation.requests.to_pylist()):
        wait_s = request["admitted_s"] - request["sent_s"]
        yield _span(REQUESTS, index, "wait", request["sent_s"], wait_s, request)
    for span in simulation.spans.to_pylist():
        first, last = span["first_step"], span["first_step"] + span["steps"] - 1
        what = "decode" if span["sampled"] and span["tokens"] == 1 else "prefill"
        start_s = float(starts[first])
        yield _span(REQUESTS, span["request"], what, start_s, float(ends[last]) - start_s, span)


def _span(
    process: int, track: int, name: str, start_s: float, duration_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "ts": 1e6 * start_s,
        "dur": 1e6 * duration_s,
        "args": args,
    }
