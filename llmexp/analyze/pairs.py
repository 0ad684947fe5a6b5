"""Runs to pairs: which runs stand side by side, which are left out, and why."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmexp.errors import ConfigError
from llmexp.results import PlannedRun, RunResult, StudyRecord

Cell = Mapping[str, str]
CellKey = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Excluded:
    """A planned run that no comparison uses."""

    run: str
    kind: str  # "failed", "killed", "invalid" or "missing"
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Two valid runs of one cell and trial that sent the same requests to engines of one kind."""

    cell: Cell
    trial: int
    baseline: RunResult
    treatment: RunResult


@dataclass(frozen=True)
class Pairing:
    """The pairs of one arm with the baseline in one cell, out of those planned; `refused` says what bars
    the rest."""

    cell: Cell
    arm: str
    planned: int
    pairs: tuple[Pair, ...]
    refused: tuple[str, ...]


def cell_label(cell: Cell) -> str:
    """`max_num_seqs=128 workload.order=sorted`, or `all` where nothing but the arm was swept."""
    return " ".join(f"{key}={value}" for key, value in cell.items()) or "all"


def near_misses(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the closest known words, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def choose_arms(
    compare: str | None, baseline: str | None, swept: Mapping[str, Sequence[str]]
) -> tuple[str | None, str | None]:
    """The key under comparison and its baseline, from what was asked and what is swept (key to values).

    By default `cache` if it is swept, else the first swept key of two values or more; its baseline is `off`
    if that is an arm, else the first value. Both are None where nothing can be compared.

    Raises ConfigError for a key that is not swept or a baseline that is no arm.
    """
    several = [key for key, values in swept.items() if len(values) > 1]
    if compare is not None:
        if compare not in swept:
            accepted = f"swept keys: {', '.join(swept)}" if swept else "nothing is swept; sweep it as KEY=A,B with -m"
            raise ConfigError(
                f"study.compare={compare}: this key is not swept{near_misses(compare, swept)} ({accepted})"
            )
        key: str | None = compare
    else:
        key = "cache" if "cache" in several else next(iter(several), None)
    if key is None:
        if baseline is not None:
            raise ConfigError(f"study.baseline={baseline}: nothing is swept, so there are no arms to compare")
        return None, None
    arms = swept[key]
    if baseline is not None and baseline not in arms:
        raise ConfigError(
            f"study.baseline={baseline}: no such arm{near_misses(baseline, arms)} (arms of {key}: {', '.join(arms)})"
        )
    return key, baseline or ("off" if "off" in arms else arms[0])


def place(run: RunResult | PlannedRun, compare: str | None, factor: str | None) -> tuple[dict[str, str], str]:
    """Cell and arm of a run when `factor`, rather than the study's own key `compare`, tells the arms
    apart."""
    if factor == compare:
        return dict(run.cell), run.arm
    swept = ({compare: run.arm} if compare else {}) | dict(run.cell)
    arm = swept.pop(factor) if factor else ""
    return swept, arm


def in_design_order(record: StudyRecord) -> list[PlannedRun]:
    """Planned runs by cell, arm and trial, as the study lists them: runs are made in a shuffled order."""
    cells = [dict(cell) for cell in record.cells]
    return sorted(record.runs, key=lambda plan: (cells.index(dict(plan.cell)), record.arms.index(plan.arm), plan.trial))


def exclude(record: StudyRecord, runs: Iterable[RunResult], missing: Mapping[str, str]) -> tuple[Excluded, ...]:
    """Planned runs that failed, are invalid or left no result, in the plan's order."""
    found = {run.name: run for run in runs}
    excluded = []
    for planned in record.runs:
        run = found.get(planned.name)
        if run is None:
            excluded.append(Excluded(planned.name, "missing", (missing.get(planned.name, "not run"),)))
        elif run.status != "complete":
            excluded.append(Excluded(run.name, run.status, (run.error or "no reason recorded",)))
        elif not run.valid or not any(one.valid for one in run.rounds):
            reasons = run.invalid_reasons or tuple(r for one in run.rounds for r in one.invalid_reasons)
            excluded.append(Excluded(run.name, "invalid", reasons or ("no valid round",)))
    return tuple(excluded)


def pair_runs(
    record: StudyRecord, runs: Iterable[RunResult], excluded: Iterable[Excluded], factor: str, baseline: str
) -> tuple[Pairing, ...]:
    """Every other arm of `factor` beside the baseline, cell by cell and trial by trial, in the design's order."""
    barred = {one.run for one in excluded}
    usable = {_key(run, record, factor): run for run in runs if run.name not in barred}
    cells: dict[CellKey, Cell] = {}
    planned: dict[tuple[CellKey, str], set[int]] = {}
    for plan in in_design_order(record):
        key, arm, trial = _key(plan, record, factor)
        cells.setdefault(key, place(plan, record.compare, factor)[0])
        planned.setdefault((key, arm), set()).add(trial)
    order = [arm for arm in dict.fromkeys(arm for _, arm in planned) if arm != baseline]
    pairings = []
    for key, cell in cells.items():
        for arm in order:
            trials = sorted(planned.get((key, arm), set()) & planned.get((key, baseline), set()))
            pairs, refused = [], []
            for trial in trials:
                base, other = usable.get((key, baseline, trial)), usable.get((key, arm, trial))
                if base is None or other is None:
                    absent = [name for name, run in ((baseline, base), (arm, other)) if run is None]
                    refused.append(f"trial {trial}: no valid run of {factor}={' and '.join(absent)}")
                elif reason := _unlike(base, other):
                    refused.append(f"trial {trial}: {reason}")
                else:
                    pairs.append(Pair(cell, trial, base, other))
            if trials:
                pairings.append(Pairing(cell, arm, len(trials), tuple(pairs), tuple(refused)))
    return tuple(pairings)


def measure_values(run: RunResult) -> dict[str, tuple[float, ...]]:
    """Every measure of a run, one value per valid round.

    A percentile that single rounds have too few requests for is the run's own, over all rounds, as one value.
    """
    valid = [
        {**one.measures, **{name: p.value for name, p in one.percentiles.items() if p.value is not None}}
        for one in run.rounds
        if one.valid
    ]
    pooled = {**run.measures, **{name: p.value for name, p in run.percentiles.items() if p.value is not None}}
    values: dict[str, tuple[float, ...]] = {}
    for name in {**pooled, **{name: 0.0 for one in valid for name in one}}:
        per_round = tuple(one[name] for one in valid if name in one and math.isfinite(one[name]))
        if len(per_round) == len(valid) and valid:
            values[name] = per_round
        elif name in pooled and math.isfinite(pooled[name]) and len(valid) == len(run.rounds):
            values[name] = (pooled[name],)
    return values


def _key(run: RunResult | PlannedRun, record: StudyRecord, factor: str) -> tuple[CellKey, str, int]:
    cell, arm = place(run, record.compare, factor)
    return tuple(sorted(cell.items())), arm, run.trial


def _unlike(base: RunResult, other: RunResult) -> str | None:
    if base.workload_sha256 != other.workload_sha256:
        return (
            f"{base.name} sent workload {base.workload_sha256} and "
            f"{other.name} sent {other.workload_sha256}; arms must send the same requests, "
            "so a key that changes them belongs in the cells"
        )
    if base.simulated != other.simulated:
        simulated, measured = (base, other) if base.simulated else (other, base)
        return f"{simulated.name} is simulated and {measured.name} is measured; they cannot be compared"
    return None
