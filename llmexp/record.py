"""How a run is kept: the parts that reach the disk as it goes, then its folder and its MLflow run as a whole."""

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmexp import results, tracking
from llmexp.client.records import TRACE_SCHEMA
from llmexp.client.spill import ROOM, write
from llmexp.engines.sampling import Sample
from llmexp.errors import ConfigError, TrackingError
from llmexp.measure.accuracy import accuracy_measures, changed_answers, is_scored, one_round, score, summary
from llmexp.measure.requests import request_measures
from llmexp.prepare import Preparation
from llmexp.results import Percentile, RoundResult, RunResult
from llmexp.workloads import store
from llmexp.workloads.audit import Audit

_PART = "requests-{}.parquet"
_HASHED = (
    results.CONFIG,
    results.WORKLOAD,
    results.TRACE,
    results.COUNTERS,
    results.ANSWERS,
    results.ACCURACY,
    results.STEPS,
    results.SPANS,
    results.TIMELINE,
)
_OTHERS = (results.SUMMARY, results.ENGINE_LOG, results.ENGINE_STEPS)


@dataclass
class SoFar:
    """What a run has come to; it grows as the run goes, so that an interruption loses nothing."""

    audit: Audit | None = None
    rounds: list[RoundResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: list[pa.Table] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    tracked: tracking.TrackedRun | None = None


def part(folder: Path, index: int) -> Path:
    """The file that holds the trace of one round until the run has ended."""
    return folder / _PART.format(index)


def clear(folder: Path) -> None:
    """Makes the run's folder, or empties it of what an earlier attempt left; other files stay.

    Raises ConfigError if it, or its study's, is a link: what is there may be somebody else's.
    """
    for place in (folder.parent, folder):
        if place.is_symlink():
            raise ConfigError(f"{place}: is a link to another place; a study and its runs need folders of their own")
    folder.mkdir(parents=True, exist_ok=True)
    of_trace = folder.glob("requests*")
    for file in [*of_trace, *folder.glob("*.partial"), *(folder / name for name in (*_HASHED, *_OTHERS))]:
        file.unlink(missing_ok=True)


def record(
    plan: Preparation, so_far: SoFar, status: Literal["complete", "failed", "killed", "refused"], error: str | None
) -> RunResult:
    """Puts everything on disk, then in MLflow.

    Raises OSError if the disk refuses, TrackingError if MLflow does and nothing else will tell it.
    """
    began = time.monotonic()
    config, folder = plan.config, plan.folder
    (folder / ROOM).unlink(missing_ok=True)
    trace = _merge_parts(folder)
    if so_far.samples:
        pq.write_table(_columns(so_far.samples), folder / results.COUNTERS)
    if so_far.steps:
        pq.write_table(pa.concat_tables(so_far.steps), folder / results.STEPS)
    if so_far.audit is not None:
        described = store.describe(plan.workload, so_far.audit)
        (folder / results.WORKLOAD).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2))
    good = [item for item in so_far.rounds if item.valid] or so_far.rounds
    measures, percentiles = over_rounds(plan, trace, good)
    simulated = config.engine.kind == "simulator"
    if good and is_scored(plan.workload) and not simulated:
        measures |= _keep_answers(plan, trace, good)
    reasons = tuple(f"round {item.index + 1}: {reason}" for item in so_far.rounds for reason in item.invalid_reasons)
    result = RunResult(
        study=plan.study,
        name=plan.name,
        folder=folder,
        status=status,
        valid=status == "complete" and not reasons,
        invalid_reasons=reasons if status == "complete" else (*reasons, f"{status}: {error}"),
        simulated=simulated,
        arm=config.run.arm or config.cache.name,
        cell=config.run.cell,
        trial=config.run.trial,
        position=config.run.position,
        seed=config.seed,
        fingerprint=plan.fingerprint,
        workload_sha256=plan.workload.sha256,
        measures=measures,
        percentiles=percentiles,
        rounds=tuple(so_far.rounds),
        engine=so_far.engine,
        environment=plan.environment,
        timings_s={**so_far.timings_s, "record": time.monotonic() - began},
        config=config.model_dump(mode="json"),
        files=_hashes(folder),
        error=error,
        mlflow_run=so_far.tracked.run_id if so_far.tracked is not None else None,
    )
    results.save_run(result)
    result = results.load_run(folder)  # as everybody else will see it
    if so_far.tracked is not None:
        try:
            tracking.finish_run(so_far.tracked, result)
        except TrackingError as failure:
            said = f"{folder} holds all that was measured, but {failure}"
            if config.run.parent_run_id is None and status == "complete":
                raise TrackingError(f"{said}\n{tracking.TOLD_LATER}") from None
            print(f"{plan.name}: {said}; it is told later", file=sys.stderr)
    return result


def over_rounds(
    plan: Preparation, trace: pa.Table, rounds: Sequence[RoundResult]
) -> tuple[dict[str, float], Mapping[str, Percentile]]:
    """Measures over several rounds: of requests, from all their requests together; of the engine, the mean."""
    if not rounds:
        return {}, {}
    chosen = trace.filter(pc.is_in(trace.column("round"), pa.array([item.index for item in rounds], pa.int32())))
    pooled, percentiles = request_measures(chosen, plan.config.slo)
    by_round = {name for item in rounds for name in item.measures} - pooled.keys() - percentiles.keys()
    means = {name: fmean(item.measures[name] for item in rounds if name in item.measures) for name in by_round}
    return {**pooled, **means}, percentiles


def _keep_answers(plan: Preparation, trace: pa.Table, rounds: Sequence[RoundResult]) -> dict[str, float]:
    """Writes every answer, and the first round's accuracy by subject. Measures: the first round's accuracy, and
    how many answers changed from one round to another."""
    answers = score(plan.workload, trace)
    pq.write_table(answers, plan.folder / results.ANSWERS)
    first = one_round(answers, rounds[0].index)
    if not len(first):
        return {}
    (plan.folder / results.ACCURACY).write_bytes(orjson.dumps(summary(first), option=orjson.OPT_INDENT_2))
    compared = answers.filter(pc.is_in(answers["round"], pa.array([item.index for item in rounds], pa.int32())))
    changed = {"changed_answers": float(changed_answers(compared))} if len(rounds) > 1 else {}
    return accuracy_measures(first) | changed


def _merge_parts(folder: Path) -> pa.Table:
    """Joins the rounds' traces into one file, which stands before the parts go."""
    parts = list(takewhile(Path.exists, (part(folder, index) for index in count())))
    tables = [pq.read_table(path).cast(TRACE_SCHEMA) for path in parts]
    trace = pa.concat_tables(tables) if tables else TRACE_SCHEMA.empty_table()
    write(trace, folder / results.TRACE)
    for path in parts:
        path.unlink()
    return trace


def _columns(samples: Sequence[Sample]) -> pa.Table:
    """Samples of engine and GPUs as rows in the order of their times, null where one has no such value."""
    names = dict.fromkeys(name for sample in samples for name in sample if name != "monotonic_s")
    rows = sorted(samples, key=lambda sample: (sample["round"] or 0, sample["time_s"] or 0.0))
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def _hashes(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in _HASHED if (folder / name).exists()
    }
