"""Pairs to effects with intervals, and effects to verdicts under one false discovery rate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from llmexp.analyze import intervals, power
from llmexp.analyze.intervals import MIN_TRIALS, Array, Scale
from llmexp.analyze.pairs import (
    Cell,
    CellKey,
    Excluded,
    Pairing,
    cell_key,
    cell_label,
    in_design_order,
    measure_values,
    place,
    short_names,
)
from llmexp.measure.catalog import MEASURES
from llmexp.results import PlannedRun, RunResult, StudyRecord

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["improves", "regresses", "equivalent", "inconclusive", "deterministic"]

_AT_ONCE = 256  # rows that are computed together: 2,000 replicates of each are in memory

RATIO_MEASURES = ("throughput_", "ttft_", "tpot_", "itl_", "e2e_", "duration_", "kv_capacity_")


@dataclass(frozen=True)
class Effect:
    """What one arm did to one measure in one cell, against the baseline.

    `estimate`, its interval, `noise_floor` and `detectable` are ratios (1: no effect) or, for `scale`
    difference, differences in the measure's unit (0: no effect). `low` and `high` bound the t interval over
    trials and are None below 3 trials; the bootstrap of trials, then rounds, stands beside it and decides
    nothing. p and q values are None where no test was made. `verdict` is None for measures of which neither
    direction is better.

    A simulation's trials differ in nothing but what they send: its intervals are over workloads, and an effect that
    is the same in all of them is `deterministic`. It has no interval and no test, since repeating it shows nothing.
    """

    cell: Cell
    arm: str
    measure: str
    scale: Scale
    estimate: float
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    per_trial: tuple[float, ...]
    trials: int
    planned_trials: int
    simulated: bool
    baseline_mean: float
    treatment_mean: float
    verdict: Verdict | None
    p: float | None = None  # no effect, two-sided
    q: float | None = None
    p_equivalent: float | None = None  # an effect beyond the margin: twice the larger of two one-sided p values
    q_equivalent: float | None = None
    noise_floor: float | None = None
    detectable: float | None = None
    trials_for_margin: int | None = None

    @property
    def replicated(self) -> bool:
        """Whether there are enough trials for an interval."""
        return self.low is not None

    @property
    def varies(self) -> bool:
        """Whether trials differ. Counted effects may be the same in all (hits, failures), to rounding."""
        return bool(np.ptp(self.per_trial) > 1e-9 * max(1.0, abs(self.estimate)))

    @property
    def deterministic(self) -> bool:
        """Whether a simulation gave the same in every one of several trials."""
        return self.simulated and self.trials > 1 and not self.varies

    def effects(self) -> Array:
        """Per-trial effects on the scale of the tests: log ratios or differences, shape `(trials,)`."""
        values = np.array(self.per_trial)
        return np.log(values) if self.scale == "ratio" else values


@dataclass(frozen=True)
class Level:
    """The measures of one arm in one cell: for each, the mean of every valid run, in the order of trials.

    `runs` names the valid runs, of `planned`; `refused` those whose engine had too little memory to start.
    """

    cell: Cell
    arm: str
    planned: int
    runs: tuple[str, ...]
    refused: tuple[str, ...]
    measures: Mapping[str, tuple[float, ...]]

    def mean(self, measure: str) -> float | None:
        """Mean over trials; None where no valid run has the measure."""
        values = self.measures.get(measure)
        return float(np.mean(values)) if values else None


@dataclass(frozen=True)
class Comparison:
    """Every arm of a factor against its baseline: one row per cell, arm and measure.

    Where nothing is compared, `factor` and `baseline` are None and there are no rows; `levels` still say
    what each run measured. `tested` counts the comparisons among which the false discovery rate is held.
    """

    study: str
    factor: str | None
    baseline: str | None
    trials: int
    confidence: float
    margin: float
    kinds: frozenset[str]  # of "simulated" and "measured"
    rows: tuple[Effect, ...]
    levels: tuple[Level, ...]
    pairings: tuple[Pairing, ...]
    excluded: tuple[Excluded, ...]
    throttled: tuple[str, ...]  # runs during which heat or a fault slowed a GPU
    tested: int

    def row(self, measure: str, cell: Cell, arm: str) -> Effect | None:
        """The effect of `arm` on `measure` in `cell`, if any pair has the measure."""
        return self._rows.get((measure, cell_key(cell), arm))

    def level(self, cell: Cell, arm: str | None) -> Level | None:
        """What `arm` measured in `cell`."""
        return self._levels.get((cell_key(cell), arm or ""))

    @cached_property
    def _rows(self) -> Mapping[tuple[str, CellKey, str], Effect]:
        return {(row.measure, cell_key(row.cell), row.arm): row for row in self.rows}

    @cached_property
    def _levels(self) -> Mapping[tuple[CellKey, str], Level]:
        return {(cell_key(level.cell), level.arm): level for level in self.levels}

    @cached_property
    def common(self) -> Cell:
        """The keys that have the same value in every cell, with it."""
        cells = [level.cell for level in self.levels]
        return {key: value for key, value in cells[0].items() if all(cell.get(key) == value for cell in cells)}

    @cached_property
    def implied(self) -> Mapping[str, str]:
        """The keys that an earlier key of the cells settles, with that key: each of its values has one of theirs."""
        kept: list[str] = []
        found: dict[str, str] = {}
        cells = [level.cell for level in self.levels]
        for key in dict.fromkeys(key for cell in cells for key in cell):
            if key in self.common:
                continue
            settles = (
                one
                for one in kept
                if len({(c.get(one), c.get(key)) for c in cells}) == len({c.get(one) for c in cells})
            )
            if (one := next(settles, None)) is not None:
                found[key] = one
            else:
                kept.append(key)
        return found

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The shortest name of every swept key."""
        return short_names([*([self.factor] if self.factor else []), *(key for one in self.levels for key in one.cell)])

    def label(self, cell: Cell) -> str:
        """A cell by what tells it from the others, under the shortest names: `num_requests=64 order=sorted`."""
        said = {*self.common, *self.implied}
        telling = {self.names[key]: value for key, value in cell.items() if key not in said}
        return cell_label(telling or (cell if self._several else {}))

    @cached_property
    def _several(self) -> bool:
        return any(level.cell != self.common for level in self.levels)

    def to_pandas(self) -> "pd.DataFrame":
        """One line a row, the cell's keys as columns in front."""
        import pandas as pd

        lines = []
        for row in self.rows:
            values = asdict(row)
            cell, per_trial = values.pop("cell"), values.pop("per_trial")
            unit = MEASURES[row.measure].unit if row.measure in MEASURES else ""
            lines.append(
                {**cell, "baseline": self.baseline, **values, "unit": unit}
                | {"per_trial": " ".join(f"{value:.6g}" for value in per_trial)}
            )
        return pd.DataFrame(lines)


def levels_of(
    record: StudyRecord, runs: Sequence[RunResult], excluded: Sequence[Excluded], factor: str | None
) -> tuple[Level, ...]:
    """What every arm measured in every cell, in the design's order."""
    barred = {one.run: one.kind for one in excluded}
    usable = {run.name: run for run in runs if run.name not in barred}
    groups: dict[tuple[CellKey, str], list[PlannedRun]] = {}
    for plan in in_design_order(record):
        cell, arm = place(plan, record.compare, factor)
        groups.setdefault((cell_key(cell), arm), []).append(plan)
    levels = []
    for (_, arm), plans in groups.items():
        valid = [usable[plan.name] for plan in plans if plan.name in usable]
        values = [measure_values(run) for run in valid]
        names = dict.fromkeys(name for one in values for name in one)
        measures = {name: tuple(float(np.mean(one[name])) for one in values if name in one) for name in names}
        cell, _ = place(plans[0], record.compare, factor)
        refused = tuple(plan.name for plan in plans if barred.get(plan.name) == "refused")
        levels.append(Level(cell, arm, len(plans), tuple(run.name for run in valid), refused, measures))
    return tuple(levels)


def scale_of(measure: str) -> Scale:
    """Ratio for what is always positive (throughputs, latencies, capacity), difference for what may be 0.

    A hit rate is 0 with the cache off, and preemptions, failures, goodput and queueing may be 0: no ratio
    to a baseline of 0 exists, so these are differences in the measure's own unit.
    """
    return "ratio" if measure.startswith(RATIO_MEASURES) else "difference"


def equivalence_margin(scale: Scale, margin: float, baseline_mean: float) -> float:
    """The margin on the scale of the tests: `log(1 + margin)` for a ratio, so that a change and its inverse
    match.

    For a difference, `margin` of the baseline's mean or, for a mean below 1, of one unit: a hit rate within
    0.05.
    """
    return float(np.log1p(margin)) if scale == "ratio" else margin * max(abs(baseline_mean), 1.0)


def compare_pairs(pairings: Sequence[Pairing], *, confidence: float, margin: float) -> tuple[tuple[Effect, ...], int]:
    """Effects of every pairing and measure with their verdicts, and how many comparisons were tested."""
    compared = [one for pairing in pairings for one in _compared(pairing)]
    alike: dict[object, list[int]] = {}
    for i, one in enumerate(compared):
        alike.setdefault(one.shape, []).append(i)
    rows: dict[int, Effect] = {}
    for same in alike.values():
        for start in range(0, len(same), _AT_ONCE):
            some = same[start : start + _AT_ONCE]
            rows.update(zip(some, _rows([compared[i] for i in some], confidence, margin), strict=True))
    return _judge([rows[i] for i in range(len(compared))], level=1 - confidence)


@dataclass(frozen=True)
class _Compared:
    """A measure of a pairing: its values in the rounds of both arms, a pair of tuples for each trial."""

    pairing: Pairing
    measure: str
    both: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]

    @property
    def shape(self) -> object:
        """Scale, trials and rounds: what is alike in these is computed together."""
        return scale_of(self.measure), tuple((len(base), len(other)) for base, other in self.both)


def _compared(pairing: Pairing) -> Iterator[_Compared]:
    """Every measure that any pair has in both arms, in the catalog's order, then others."""
    values = [(measure_values(pair.baseline), measure_values(pair.treatment)) for pair in pairing.pairs]
    found = {name for base, other in values for name in base.keys() & other.keys()}
    for name in [name for name in MEASURES if name in found] + sorted(found - MEASURES.keys()):
        both = [(base[name], other[name]) for base, other in values if name in base and name in other]
        if scale_of(name) == "ratio":
            both = [(base, other) for base, other in both if min(*base, *other) > 0]
        if both:
            yield _Compared(pairing, name, both)


def _rows(alike: Sequence[_Compared], confidence: float, margin: float) -> Iterator[Effect]:
    """The rows of what is of one shape."""
    scale, n = scale_of(alike[0].measure), len(alike[0].both)
    arms = [[np.array([one.both[trial][arm] for one in alike]) for trial in range(n)] for arm in (0, 1)]
    base_means, other_means = (np.stack([values.mean(-1) for values in arm], axis=-1) for arm in arms)
    effects = intervals.effect(base_means, other_means, scale)
    evidence = _evidence(arms[0], arms[1], base_means, effects, scale, confidence, margin)
    for i, one in enumerate(alike):
        known = MEASURES.get(one.measure)
        row = Effect(
            cell=one.pairing.cell,
            arm=one.pairing.arm,
            measure=one.measure,
            scale=scale,
            estimate=_shown(effects[i].mean(), scale),
            low=None,
            high=None,
            bootstrap_low=None,
            bootstrap_high=None,
            per_trial=tuple(_shown(value, scale) for value in effects[i]),
            trials=n,
            planned_trials=one.pairing.planned,
            simulated=one.pairing.simulated,
            baseline_mean=float(base_means[i].mean()),
            treatment_mean=float(other_means[i].mean()),
            verdict="inconclusive" if known and known.better else None,
        )
        if row.deterministic:
            yield replace(row, verdict="deterministic" if row.verdict else None)
        else:
            yield replace(row, **{name: values[i] for name, values in evidence.items()})


def _evidence(
    baseline: Sequence[Array],
    treatment: Sequence[Array],
    base_means: Array,
    effects: Array,
    scale: Scale,
    confidence: float,
    margin: float,
) -> dict[str, list[Any]]:
    """Intervals, p values and sizes of several rows, as far as their trials suffice for them.

    The arms have an array of shape `(rows, rounds)` a trial; `base_means` and `effects` are `(rows, trials)`.
    """
    n = effects.shape[-1]
    shown: dict[str, Array] = {}
    plain: dict[str, list[Any]] = {}
    if n >= 2:
        bootstrap = intervals.hierarchical_bootstrap(baseline, treatment, scale, confidence)
        shown["bootstrap_low"], shown["bootstrap_high"] = bootstrap
    if n >= MIN_TRIALS:
        bounds = np.array([equivalence_margin(scale, margin, float(mean)) for mean in base_means.mean(-1)])
        deviations = effects.std(axis=-1, ddof=1)
        shown["low"], shown["high"] = intervals.t_interval(effects, confidence)
        shown["noise_floor"] = power.noise_floor(np.log(base_means) if scale == "ratio" else base_means, confidence)
        shown["detectable"] = power.detectable(deviations, n, confidence)
        plain["p"] = intervals.p_different(effects).tolist()
        plain["p_equivalent"] = np.minimum(1.0, 2 * intervals.p_within(effects, bounds)).tolist()
        plain["trials_for_margin"] = [int(m) or None for m in power.trials_needed(bounds, deviations, confidence)]
    return plain | {name: [_shown(value, scale) for value in values] for name, values in shown.items()}


def decide(
    p: Array, p_equivalent: Array, better: NDArray[np.bool_], level: float
) -> tuple[NDArray[np.str_], Array, Array]:
    """Verdicts, and the q values behind them, at false discovery rate `level` (Benjamini & Hochberg 1995).

    Shapes `(..., comparisons)`; leading axes are independent studies. `better` says whether the effect points
    the better way. Differences and equivalences are two families over the same comparisons. An effect within
    the margin is `equivalent` even where it differs from none: it is too small to matter.
    """
    q = stats.false_discovery_control(p, axis=-1)
    q_equivalent = stats.false_discovery_control(p_equivalent, axis=-1)
    different = np.where(q <= level, np.where(better, "improves", "regresses"), "inconclusive")
    return np.where(q_equivalent <= level, "equivalent", different), q, q_equivalent


def _judge(rows: list[Effect], *, level: float) -> tuple[tuple[Effect, ...], int]:
    """Gives replicated rows with a better direction their verdicts; says how many were tested together.

    Effects that are the same in every trial are counted, not estimated (hits, failures): each is a family
    of its own, since among the others they would loosen the control of what is uncertain.
    """
    judged = list(rows)
    replicated = [i for i, row in enumerate(rows) if row.verdict and row.p is not None]
    tested = [i for i in replicated if rows[i].varies]
    for family in [tested] * bool(tested) + [[i] for i in replicated if not rows[i].varies]:
        verdicts, q, q_equivalent = decide(
            np.array([rows[i].p for i in family]),
            np.array([rows[i].p_equivalent for i in family]),
            np.array([_points_better(rows[i]) for i in family]),
            level,
        )
        for k, i in enumerate(family):
            verdict = cast(Verdict, str(verdicts[k]))
            judged[i] = replace(rows[i], verdict=verdict, q=float(q[k]), q_equivalent=float(q_equivalent[k]))
    return tuple(judged), len(tested)


def _points_better(row: Effect) -> bool:
    rises = row.estimate > (1 if row.scale == "ratio" else 0)
    return rises == (MEASURES[row.measure].better == "higher")


def _shown(value: float | Array, scale: Scale) -> float:
    return float(np.exp(value)) if scale == "ratio" else float(value)
