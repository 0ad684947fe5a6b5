"""Figures of a study."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from llmexp.analyze.compare import Comparison, Effect, Level
from llmexp.analyze.pairs import Pairing, place
from llmexp.analyze.requests import LATENCIES, latencies
from llmexp.analyze.study import Study
from llmexp.report.pressure import pressure_plot
from llmexp.report.search import search_plot
from llmexp.report.style import (
    RATIO_TICKS,
    ROUND_TICKS,
    VERDICT_MARKS,
    Plot,
    colour,
    curve,
    curve_marks,
    is_number,
    line,
    marked_axis,
    marker,
    titled,
    wrapped,
)
from llmexp.report.table import HEADLINES, LATENCY_NAMES, over
from llmexp.report.tensor_parallel import KEY, RATIOS, floor_plot
from llmexp.results import TRACE, RunResult
from llmexp.words import count

MOST_CELLS = 8
MOST_PANELS = 4
MOST_REQUESTS = 128
MOST_ROWS = 40
_LABEL = 44  # characters of a row's label in a line

_T = TypeVar("_T")


def plots(study: Study, comparison: Comparison) -> Iterator[Plot]:
    """Every figure that the study has data for."""
    runs = {run.name: run for run in study.runs}
    traced = [
        (level, [runs[name] for name in level.runs if (runs[name].folder / TRACE).exists()])
        for level in comparison.levels
    ]
    traced = [(level, found) for level, found in traced if found]
    measures = RATIOS if comparison.factor == KEY else HEADLINES
    measures = {name: title for name, title in measures.items() if any(row.measure == name for row in comparison.rows)}
    if measures:
        yield effect_by_cell(comparison, measures)
    if traced:
        yield latency_distributions(comparison, traced)
    key = numeric_key(study, comparison)
    if key and not study.search and any("throughput_req_per_s" in level.measures for level in comparison.levels):
        yield throughput_curve(comparison, key)
    if counted := _counted_hits(study, comparison):
        yield hit_rates(comparison, counted)
    for extra in (pressure_plot(study, comparison), search_plot(study, comparison), floor_plot(study, comparison)):
        if extra is not None:
            yield extra
    if traced:
        yield timeline(comparison, traced)


def effect_by_cell(comparison: Comparison, measures: Mapping[str, str]) -> Plot:
    """Ratio to the baseline with its interval, one line per cell and arm, one panel per measure (name to title)."""
    lines = [pairing for pairing in comparison.pairings if pairing.pairs]
    arms = list(dict.fromkeys(pairing.arm for pairing in lines))
    labels = [_line_label(comparison, pairing, len(arms) > 1) for pairing in lines]
    columns = min(len(measures), 4)
    rows = -(-len(measures) // columns)
    tall = 0.75 + 0.16 * sum(1.6 + label.count("\n") for label in labels)
    figure = Figure(figsize=(12 if columns > 3 else 10, 1.1 + rows * tall), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    low, high = 1 / (1 + comparison.margin), 1 + comparison.margin
    longest = max(len(part) for label in labels for part in label.splitlines())
    room = max(3, int((figure.get_size_inches()[0] - 0.075 * longest) / columns / 0.42))
    for panel, (measure, name) in zip(panels, measures.items(), strict=False):
        found = [(y, comparison.row(measure, pairing.cell, pairing.arm)) for y, pairing in enumerate(lines)]
        drawn = [(y, row) for y, row in found if row is not None]
        edges = [edge for _, row in drawn for edge in (*row.per_trial, row.low, row.high) if edge is not None]
        _ratio_axis(panel, min([low, *edges]), max([high, *edges]), room)
        for y, row in found:
            if row is not None:
                _draw_effect(panel, row, y)
            else:
                panel.text(
                    0.5, y, "too few requests", transform=panel.get_yaxis_transform(), ha="center", va="center",
                    fontsize=7, color="0.4",
                )  # fmt: skip
        panel.axvline(1, color="black", linewidth=0.8)
        panel.axvspan(low, high, facecolor="none", edgecolor="0.75", hatch="///", linewidth=0)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel(f"ratio to {comparison.baseline}", fontsize=9)
        panel.tick_params(axis="x", labelsize=8)
        panel.grid(axis="x", color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    for panel in panels[len(measures) :]:
        panel.set_visible(False)
    panels[0].set_yticks(range(len(lines)), labels)
    for panel in panels[::columns]:
        panel.tick_params(axis="y", labelsize=8)
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    shown = {row.verdict for row in comparison.rows if row.measure in measures}
    uncertain = any(row.replicated for row in comparison.rows)
    bar = f"bar: {comparison.confidence:.0%} t interval{over(comparison)} (from 3 trials on), " if uncertain else ""
    meanings = {
        "improves": "up improves",
        "regresses": "down regresses",
        "equivalent": "square equivalent",
        "inconclusive": "open circle inconclusive",
        "deterministic": "diamond deterministic: simulated, the same in every trial",
    }
    caption = (
        f"Mark: mean effect over n trials, {bar}ticks: single trials. Hatched: within "
        f"{comparison.margin:.0%}, equivalent. Mark by verdict: "
        f"{', '.join(text for verdict, text in meanings.items() if verdict in shown)}."
    )
    which = f"={' and '.join(arms)}" if len(arms) < 4 else ""
    title = f"Effect of {comparison.factor}{which} by cell"
    return titled("effect_by_cell", title, caption, comparison, figure)


def _line_label(comparison: Comparison, pairing: Pairing, with_arm: bool) -> str:
    """Arm and cell, as far as there is more than one of each, with the number of pairs."""
    label = comparison.label(pairing.cell)
    parts = [*([pairing.arm] if with_arm else []), *([label] if label != "all" or not with_arm else [])]
    return wrapped(f"{', '.join(parts)} (n={len(pairing.pairs)})", _LABEL)


def latency_distributions(comparison: Comparison, traced: Sequence[tuple[Level, Sequence[RunResult]]]) -> Plot:
    """Cumulative distributions of TTFT and e2e latency, one row of panels per cell, one line per arm."""
    cells = _cells(comparison, [level for level, _ in traced])
    shown = cells[:MOST_CELLS]
    arms = _arms(comparison)
    figure = Figure(figsize=(10, 1.8 + 2.2 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), len(LATENCIES), squeeze=False)
    totals: dict[str, int] = {}
    for label, panels in zip(shown, grid, strict=True):
        of_cell = [(level, runs) for level, runs in traced if comparison.label(level.cell) == label]
        for panel, measure in zip(panels, LATENCIES, strict=True):
            for level, runs in of_cell:
                style = arms.index(level.arm)
                samples = [_completed(run, measure) for run in runs]
                for sample in samples if len(samples) > 1 else []:
                    panel.step(*_ecdf(sample), color=colour(style), linewidth=0.5, alpha=0.35, where="post")
                pooled = np.concatenate(samples)
                totals[level.arm] = totals.get(level.arm, 0) + (len(pooled) if measure == next(iter(LATENCIES)) else 0)
                panel.step(
                    *_ecdf(pooled),
                    color=colour(style),
                    linestyle=line(style),
                    where="post",
                    label=_arm_label(comparison, level.arm),
                    linewidth=1.6,
                )
            panel.set_xlabel(f"{LATENCY_NAMES[measure]} (ms)", fontsize=9)
            panel.set_ylabel("share of requests", fontsize=9)
            panel.set_ylim(0, 1.02)
            panel.tick_params(labelsize=8)
            if len(cells) > 1:
                panel.set_title(wrapped(label, 60), fontsize=8)
            panel.grid(color="0.92", linewidth=0.6)
    left_out = f" The first {len(shown)} of {len(cells)} cells." if len(cells) > len(shown) else ""
    numbers = sorted({*totals.values()})
    counted = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    caption = (
        f"Thick: completed requests of all valid rounds and trials together, {counted} an arm; thin: single trials, "
        f"which show how much {'workloads' if over(comparison) else 'launches'} differ. Times count from when a "
        f"request was due.{left_out}"
    )
    return titled(
        "latency_distributions",
        "TTFT and e2e latency of every request",
        caption,
        comparison,
        figure,
        list(grid.ravel()),
    )


def numeric_key(study: Study, comparison: Comparison) -> str | None:
    """The swept key that a throughput curve can run over: numbers, two or more of them wherever the other keys are
    alike; of cells rather than arms."""
    keys = [key for key in study.swept if key != comparison.factor]
    for key in [*keys, *([comparison.factor] if comparison.factor else [])]:
        if all(map(is_number, study.swept[key])):
            curves: dict[tuple[tuple[str, str], ...], set[str]] = {}
            for level in comparison.levels:
                values = _values(comparison, level)
                curves.setdefault(tuple(item for item in values.items() if item[0] != key), set()).add(values[key])
            if all(len(of_curve) > 1 for of_curve in curves.values()):
                return key
    return None


def _values(comparison: Comparison, level: Level) -> dict[str, str]:
    """Every swept key of a level with its value."""
    return {**level.cell, **({comparison.factor: level.arm} if comparison.factor else {})}


def throughput_curve(comparison: Comparison, key: str) -> Plot:
    """Throughput against a swept number: a curve per arm, a panel per combination of the other swept keys."""
    curves: dict[str, dict[str, list[tuple[float, Sequence[float]]]]] = {}
    for level in comparison.levels:
        if values := level.measures.get("throughput_req_per_s"):
            label = comparison.label({name: value for name, value in level.cell.items() if name != key})
            arm = level.arm if key != comparison.factor else ""
            x = float(_values(comparison, level)[key])
            curves.setdefault(label, {}).setdefault(arm, []).append((x, values))
    shown = list(curves)[:MOST_CELLS]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(5 * columns if columns > 1 else 6.5, 1.6 + 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    arms = _arms(comparison)
    for panel, label in zip(panels, shown, strict=False):
        for arm, points in curves[label].items():
            name = f"{comparison.factor}={arm}" if arm else "_"  # which no legend shows
            curve(panel, points, arms.index(arm) if arm in arms else 0, name, comparison.confidence)
        marked_axis(panel, [x for points in curves[label].values() for x, _ in points])
        panel.set_xlabel(key, fontsize=9)
        panel.set_ylabel("throughput (req/s)", fontsize=9)
        panel.tick_params(labelsize=8)
        if len(curves) > 1:
            panel.set_title(wrapped(label, 60), fontsize=8)
        panel.grid(color="0.92", linewidth=0.6)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    panels[0].set_ylim(0, panels[0].get_ylim()[1])  # shared: once all is drawn
    left_out = f" The first {len(shown)} of {len(curves)}." if len(curves) > len(shown) else ""
    replicated = any(
        len(values) > 1 for by_arm in curves.values() for points in by_arm.values() for _, values in points
    )
    caption = f"{curve_marks(comparison) if replicated else 'One trial: not replicated.'}{left_out}"
    return titled("throughput_curve", f"Throughput against {key}", caption, comparison, figure, list(panels))


def hit_rates(comparison: Comparison, counted: Mapping[tuple[str, str], Sequence[tuple[float, float, bool]]]) -> Plot:
    """Prefix-cache hit rate of every round: what the audit of the workload expects, and what the engine counted.

    `counted` maps cell and arm to expected rate, observed rate and whether the contract held, a round each.
    """
    arms = _arms(comparison)
    rows = list(counted.items())[:MOST_ROWS]
    several = len({label for label, _ in counted}) > 1
    names = [
        wrapped(", ".join([_arm_label(comparison, arm), *([label] if several else [])]), _LABEL)
        for (label, arm), _ in rows
    ]
    tall = 0.16 * sum(1.5 + name.count("\n") for name in names)
    figure = Figure(figsize=(9, 2.3 + tall), layout="constrained")
    panel = figure.subplots()
    for y, ((_, arm), rounds) in enumerate(rows):
        style = arms.index(arm)
        panel.plot(
            [expected for expected, *_ in rounds],
            [y] * len(rounds),
            "|",
            color="black",
            markersize=15,
            label="expected",
        )
        for held, name in ((True, "counted"), (False, "counted, contract broken")):
            found = [observed for _, observed, kept in rounds if kept == held]
            if found:
                shape = marker(style) if held else "x"
                panel.plot(
                    found,
                    [y] * len(found),
                    shape,
                    color=colour(style),
                    markersize=7,
                    markerfacecolor="none",
                    label=name,
                )
    panel.set_yticks(range(len(rows)), names, fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(-0.03, 1.03)
    panel.set_xlabel("hit rate (hit tokens over queried prompt tokens)", fontsize=9)
    panel.grid(axis="x", color="0.92", linewidth=0.6)
    left_out = f" The first {len(rows)} of {len(counted)} lines." if len(counted) > len(rows) else ""
    caption = (
        "One mark a round, invalid rounds included. Expected: by the audit of the workload; counted: by the engine's "
        f"own counters. Where capacity or order bound the hits, fewer than expected are right.{left_out}"
    )
    return titled("hit_rates", "Prefix-cache hit rate, expected and counted", caption, comparison, figure, [panel])


def timeline(comparison: Comparison, traced: Sequence[tuple[Level, Sequence[RunResult]]]) -> Plot:
    """Every request of one round as a bar from due to last token, one panel per arm of the first cell."""
    first = comparison.label(traced[0][0].cell)
    of_first = [(level, runs) for level, runs in traced if comparison.label(level.cell) == first]
    chosen = _spread(of_first, MOST_PANELS)
    common = set.intersection(*({run.trial for run in runs} for _, runs in chosen)) or {chosen[0][1][0].trial}
    trial = min(common)
    drawn = [
        (level, run)
        for level, runs in chosen
        for run in runs
        if run.trial == trial and any(one.valid for one in run.rounds)
    ]
    bars = [_bars(run) for _, run in drawn]
    most = max(len(starts) for starts, *_ in bars)
    wide = min(5.0, 14 / len(drawn))
    figure = Figure(figsize=(wide * max(len(drawn), 1.4), 2 + min(4.5, 1.4 + 0.05 * most)), layout="constrained")
    panels = figure.subplots(1, len(drawn), sharex=True, sharey=True, squeeze=False)[0]
    for panel, (level, run), (due, token, last) in zip(panels, drawn, bars, strict=True):
        y = np.arange(len(due))
        panel.barh(
            y, token - due, left=due, height=0.8, facecolor="white", edgecolor="0.35", hatch="////", linewidth=0.3,
            label="due to first token (queue, prefill)",
        )  # fmt: skip
        panel.barh(
            y, last - token, left=token, height=0.8, color="black", linewidth=0, label="first to last token (decode)"
        )
        panel.set_xlabel("time in the round (s)")
        panel.set_title(f"{_arm_label(comparison, level.arm)}, trial {run.trial}", fontsize=9)
        panel.grid(axis="x", color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("request, in the order they were due")
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylim(most - 0.5, -0.5)
    cell = f", cell {first}" if len(_cells(comparison, [level for level, _ in traced])) > 1 else ""
    caption = (
        f"First valid round of trial {trial}{cell}; {count(most, 'completed request')}"
        f"{', the first of the round' if most == MOST_REQUESTS else ''}. Hatched: waiting for the first token."
    )
    return titled("timeline", "Request timeline of a round", caption, comparison, figure, list(panels))


def _counted_hits(study: Study, comparison: Comparison) -> dict[tuple[str, str], list[tuple[float, float, bool]]]:
    """Expected and observed hit rate of every round that was counted, and whether the contract held, by cell and arm,
    in the design's order."""
    groups: dict[tuple[str, str], list[tuple[float, float, bool]]] = {
        (comparison.label(level.cell), level.arm): [] for level in comparison.levels
    }
    for run in study.runs:
        cell, arm = place(run, study.record.compare, comparison.factor)
        for one in run.rounds:
            expected, observed, queried = (
                one.contract.get(name) for name in ("expected_hit_tokens", "observed_hit_tokens", "queried_tokens")
            )
            if queried and observed is not None and expected is not None:
                held = bool(one.contract.get("held"))
                groups[comparison.label(cell), arm].append((expected / queried, observed / queried, held))
    return {where: rounds for where, rounds in groups.items() if rounds}


def _draw_effect(panel: Axes, row: Effect, y: int) -> None:
    panel.plot(row.per_trial, [y + 0.22] * row.trials, "|", color="0.4", markersize=5)
    if row.low is not None and row.high is not None:
        panel.plot([row.low, row.high], [y, y], color="black", linewidth=1.4)
        for edge in (row.low, row.high):
            panel.plot([edge, edge], [y - 0.1, y + 0.1], color="black", linewidth=1.4)
    verdict = row.verdict or "inconclusive"
    face = "white" if verdict == "inconclusive" else "black"
    panel.plot(row.estimate, y, VERDICT_MARKS[verdict], color="black", markerfacecolor=face, markersize=7)


def _ratio_axis(panel: Axes, low: float, high: float, most: int) -> None:
    """A logarithmic axis from `low` to `high` with at most so many plain numbers."""
    room = (high / low) ** 0.08
    panel.set_xscale("log")
    panel.set_xlim(low / room, high * room)
    ticks = [tick for tick in RATIO_TICKS if low / room <= tick <= high * room]
    gap = np.log(high / low * room**2) / most
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda tick: (tick not in ROUND_TICKS, abs(np.log(tick)))):
        if all(abs(np.log(tick / other)) >= gap for other in kept):
            kept.append(tick)
    panel.xaxis.set_major_locator(FixedLocator(sorted(kept)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _bars(run: RunResult) -> tuple[Any, Any, Any]:
    """Due, first-token and last-token times of the completed requests of a run's first valid round, by due
    time."""
    index = next(one.index for one in run.rounds if one.valid)
    trace = run.trace()
    trace = trace.filter(pc.and_(pc.equal(trace["round"], index), pc.is_null(trace["error"])))
    trace = trace.sort_by([("intended_s", "ascending"), ("request", "ascending")]).slice(0, MOST_REQUESTS)
    due, first, last = (trace[name].to_numpy() for name in ("intended_s", "first_token_s", "last_token_s"))
    return due - due[:1], first - due[:1], last - due[:1]


def _completed(run: RunResult, measure: str) -> Any:
    table = latencies(run, measure).ravel()
    return table[np.isfinite(table)]


def _ecdf(sample: Any) -> tuple[Any, Any]:
    """Values and the shares at or below them, at 1000 of them where there are more."""
    values = np.sort(sample)
    share = np.arange(1, len(values) + 1) / len(values)
    kept = np.unique(np.linspace(0, len(values) - 1, 1000).astype(int))
    return np.concatenate([values[:1], values[kept]]), np.concatenate([[0], share[kept]])


def _spread(items: Sequence[_T], most: int) -> Sequence[_T]:
    """At most so many of the items, from the first to the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _cells(comparison: Comparison, levels: Sequence[Level]) -> list[str]:
    return list(dict.fromkeys(comparison.label(level.cell) for level in levels))


def _arms(comparison: Comparison) -> list[str]:
    """The baseline first, then the others in the design's order: a fixed place means a fixed style."""
    found = list(dict.fromkeys(level.arm for level in comparison.levels))
    return sorted(found, key=lambda arm: arm != comparison.baseline)


def _arm_label(comparison: Comparison, arm: str) -> str:
    return f"{comparison.factor}={arm}" if comparison.factor else "all runs"
