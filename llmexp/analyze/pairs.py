"""Runs to pairs: which runs stand side by side, which are left out, and why."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmexp import fingerprint
from llmexp.errors import ConfigError
from llmexp.results import PlannedRun, RunResult, StudyRecord

Cell = Mapping[str, str]
CellKey = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Excluded:
    """A planned run that no comparison uses."""

    run: str
    kind: str  # "failed", "killed", "invalid", "missing", or "refused": too little memory, a result of its own
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
    the rest. `shortage` says so where the arm, the baseline or both never start for lack of memory."""

    cell: Cell
    arm: str
    planned: int
    pairs: tuple[Pair, ...]
    refused: tuple[str, ...]
    shortage: str | None = None

    @property
    def simulated(self) -> bool:
        """Whether its runs were simulated: no pair is of both kinds."""
        return any(pair.baseline.simulated for pair in self.pairs)


def cell_key(cell: Cell) -> CellKey:
    """A cell as a key of a mapping."""
    return tuple(sorted(cell.items()))


def cell_label(cell: Cell) -> str:
    """`max_num_seqs=128 workload.order=sorted`, or `all` where nothing but the arm was swept."""
    return " ".join(f"{key}={value}" for key, value in cell.items()) or "all"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that still tell them apart: `num_requests` for `workload.num_requests`."""
    parts = {key: key.split(".") for key in keys}

    def end(key: str, length: int) -> str:
        return ".".join(parts[key][-length:])

    return {
        key: next(
            end(key, length)
            for length in range(1, len(parts[key]) + 1)
            if length == len(parts[key])
            or all(end(other, length) != end(key, length) for other in parts if other != key)
        )
        for key in parts
    }


def shortage(run: RunResult) -> str:
    """What an engine lacked that did not start: `0.20 of the 0.44 GiB needed`, as far as it told."""
    needed, available = (run.engine.get(f"{name}_bytes") for name in ("needed", "available"))
    if available is None:
        return "how much is not known"
    if available < 0:
        return f"{-available / 2**30:.2f} GiB short of weights and activations alone"
    had = f"{available / 2**30:.2f}"
    return f"{had} GiB for the KV cache" if needed is None else f"{had} of the {needed / 2**30:.2f} GiB needed"


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
    cells = {cell_key(cell): i for i, cell in enumerate(record.cells)}
    return sorted(record.runs, key=lambda plan: (cells[cell_key(plan.cell)], record.arms.index(plan.arm), plan.trial))


def exclude(record: StudyRecord, runs: Iterable[RunResult], missing: Mapping[str, str]) -> tuple[Excluded, ...]:
    """Planned runs that failed, are invalid or left no result, in the plan's order."""
    found = {run.name: run for run in runs}
    excluded = []
    for planned in record.runs:
        run = found.get(planned.name)
        if run is None:
            excluded.append(Excluded(planned.name, "missing", (missing.get(planned.name, "not run"),)))
        elif run.status == "refused":
            excluded.append(Excluded(run.name, run.status, (f"too little memory to start ({shortage(run)})",)))
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
    runs, barred = list(runs), {one.run for one in excluded}
    usable = {_key(run, record, factor): run for run in runs if run.name not in barred}
    unstarted = {_key(run, record, factor): shortage(run) for run in runs if run.status == "refused"}
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
                both = [(key, name, trial) for name in (baseline, arm)]
                absent = [one for one in both if one not in usable]
                if absent:
                    which = f"{factor}={' and '.join(name for _, name, _ in absent)}"
                    memory = all(one in unstarted for one in absent)
                    why = f"{which} did not start for lack of memory" if memory else f"no valid run of {which}"
                    refused.append(f"trial {trial}: {why}")
                elif reason := _unlike(usable[both[0]], usable[both[1]], factor):
                    refused.append(f"trial {trial}: {reason}")
                else:
                    pairs.append(Pair(cell, trial, usable[both[0]], usable[both[1]]))
            if trials:
                never = [name for name in (arm, baseline) if all((key, name, trial) in unstarted for trial in trials)]
                lack = None
                if never:
                    which = f"{factor}={never[0]}" if len(never) == 1 else "the engine"
                    lack = f"{which} does not start for lack of memory ({unstarted[key, never[0], trials[0]]})"
                pairings.append(Pairing(cell, arm, len(trials), tuple(pairs), tuple(refused), lack))
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
    return cell_key(cell), arm, run.trial


def _unlike(base: RunResult, other: RunResult, factor: str) -> str | None:
    """Why two runs are no pair: they differ in more than what `factor` stands for."""
    if base.workload_sha256 != other.workload_sha256:
        return (
            f"{base.name} sent workload {base.workload_sha256} and "
            f"{other.name} sent {other.workload_sha256}; arms must send the same requests, "
            "so a key that changes them belongs in the cells"
        )
    if base.simulated != other.simulated:
        simulated, measured = (base, other) if base.simulated else (other, base)
        return f"{simulated.name} is simulated and {measured.name} is measured; they cannot be compared"
    differences = _conditions_differ(base, other, factor)
    if differences:
        return f"{base.name} and {other.name} were made under other conditions ({'; '.join(differences[:5])})"
    return None


# Factors that change by themselves what a run is made on, and which part of that.
_EXPLAINS = {
    "gpu": ("hardware",),
    "gpu.device": ("hardware",),
    "engine.python": ("versions", "engine"),
    "engine.url": ("engine",),
}


def _conditions_differ(base: RunResult, other: RunResult, factor: str) -> list[str]:
    """Hardware, drivers, versions and variables in which two runs differ, beside what `factor` stands for."""
    before, now = (dict(fingerprint.conditions(run.environment)) for run in (base, other))
    told = [run.engine.get("version") for run in (base, other)]
    if None not in told:
        before["engine"], now["engine"] = ({"version": version} for version in told)
    explained = _EXPLAINS.get(factor, ())
    if factor.startswith("engine.env") or not all("variables" in run.environment for run in (base, other)):
        explained += ("variables",)  # those of an engine that is not ours are not known
    for name in explained:
        before.pop(name, None)
        now.pop(name, None)
    return fingerprint.difference(before, now)
