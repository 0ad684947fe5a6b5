"""Figures of a study."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from llmexp.analyze.compare import Comparison, Effect, Level
from llmexp.analyze.pairs import Cell, Pairing, cell_label, place
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
    is_number,
    line,
    marked_axis,
    marker,
    titled,
)
from llmexp.report.table import HEADLINES, LATENCY_NAMES
from llmexp.results import TRACE, RunResult
from llmexp.words import count

MOST_CELLS = 8
MOST_PANELS = 4
MOST_REQUESTS = 128

_T = TypeVar("_T")


def plots(study: Study, comparison: Comparison) -> Iterator[Plot]:
    """Every figure that the study has data for."""
    runs = {run.name: run for run in study.runs}
    traced = [
        (level, [runs[name] for name in level.runs if (runs[name].folder / TRACE).exists()])
        for level in comparison.levels
    ]
    traced = [(level, found) for level, found in traced if found]
    if any(row.measure in HEADLINES for row in comparison.rows):
        yield effect_by_cell(comparison)
    if traced:
        yield latency_distributions(comparison, traced)
    key = numeric_key(study, comparison)
    if key and not study.search and any("throughput_req_per_s" in level.measures for level in comparison.levels):
        yield throughput_curve(study, comparison, key)
    if counted := _counted_hits(study, comparison.factor):
        yield hit_rates(comparison, counted)
    for extra in (pressure_plot(study, comparison), search_plot(study, comparison)):
        if extra is not None:
            yield extra
    if traced:
        yield timeline(comparison, traced)


def effect_by_cell(comparison: Comparison) -> Plot:
    """Ratio to the baseline with its interval, one line per cell and arm, one panel per measure."""
    lines = [pairing for pairing in comparison.pairings if pairing.pairs]
    arms = list(dict.fromkeys(pairing.arm for pairing in lines))
    figure = Figure(figsize=(10, 1.9 + 0.45 * len(lines)), layout="constrained")
    panels = figure.subplots(1, len(HEADLINES), sharey=True, squeeze=False)[0]
    low, high = 1 / (1 + comparison.margin), 1 + comparison.margin
    for panel, (measure, name) in zip(panels, HEADLINES.items(), strict=True):
        found = [(y, comparison.row(measure, pairing.cell, pairing.arm)) for y, pairing in enumerate(lines)]
        rows = [(y, row) for y, row in found if row is not None]
        for y, row in rows:
            _draw_effect(panel, row, y)
        edges = [edge for _, row in rows for edge in (*row.per_trial, row.low, row.high) if edge is not None]
        panel.axvline(1, color="black", linewidth=0.8)
        panel.axvspan(low, high, facecolor="none", edgecolor="0.75", hatch="///", linewidth=0)
        _ratio_axis(panel, min([low, *edges]), max([high, *edges]))
        panel.set_title(name if rows else f"{name}: no data", fontsize=10)
        panel.set_xlabel(f"ratio to {comparison.baseline}")
        panel.grid(axis="x", color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    labels = [f"{_line_label(pairing, len(arms) > 1)} (n={len(pairing.pairs)})" for pairing in lines]
    panels[0].set_yticks(range(len(lines)), labels, fontsize=8)
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    sure = f"{comparison.confidence:.0%}"
    caption = (
        f"Mark: mean effect over n trials, bar: {sure} t interval (none below 3 trials), ticks: single trials. "
        f"Hatched: within {comparison.margin:.0%}, equivalent. Mark by verdict: up improves, down regresses, "
        "square equivalent, open circle inconclusive."
    )
    which = f"={' and '.join(arms)}" if len(arms) < 4 else ""
    title = f"Effect of {comparison.factor}{which} by cell"
    return titled("effect_by_cell", title, caption, comparison, figure)


def _line_label(pairing: Pairing, with_arm: bool) -> str:
    """Arm and cell, as far as there is more than one of each."""
    parts = [*([pairing.arm] if with_arm else []), *([cell_label(pairing.cell)] if pairing.cell else [])]
    return ", ".join(parts) or cell_label(pairing.cell)


def latency_distributions(comparison: Comparison, traced: Sequence[tuple[Level, Sequence[RunResult]]]) -> Plot:
    """Cumulative distributions of TTFT and e2e latency, one row of panels per cell, one line per arm."""
    cells = _cells(level for level, _ in traced)
    shown = list(cells)[:MOST_CELLS]
    arms = _arms(comparison)
    figure = Figure(figsize=(10, 1.4 + 2.3 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), len(LATENCIES), squeeze=False)
    for label, panels in zip(shown, grid, strict=True):
        for panel, measure in zip(panels, LATENCIES, strict=True):
            for level, runs in traced:
                if cell_label(level.cell) != label:
                    continue
                style = arms.index(level.arm)
                samples = [_completed(run, measure) for run in runs]
                for sample in samples if len(samples) > 1 else []:
                    panel.step(*_ecdf(sample), color=colour(style), linewidth=0.5, alpha=0.35, where="post")
                pooled = np.concatenate(samples)
                name = f"{_arm_label(comparison, level.arm)} ({len(pooled)} requests, {count(len(runs), 'trial')})"
                panel.step(
                    *_ecdf(pooled),
                    color=colour(style),
                    linestyle=line(style),
                    where="post",
                    label=name,
                    linewidth=1.6,
                )
            panel.set_xlabel(f"{LATENCY_NAMES[measure]} (ms)")
            panel.set_ylabel("share of requests")
            panel.set_ylim(0, 1.02)
            panel.set_title(label if len(cells) > 1 else LATENCY_NAMES[measure], fontsize=9)
            panel.grid(color="0.92", linewidth=0.6)
            panel.legend(fontsize=7, loc="lower right")
    left_out = f" The first {len(shown)} of {len(cells)} cells." if len(cells) > len(shown) else ""
    caption = (
        "Thick: completed requests of all valid rounds and trials together; thin: single trials, which show how much "
        f"launches differ. Times count from when a request was due.{left_out}"
    )
    return titled("latency_distributions", "TTFT and e2e latency of every request", caption, comparison, figure)


def numeric_key(study: Study, comparison: Comparison) -> str | None:
    """The swept key that a throughput curve can run over: numbers, two or more; of cells rather than arms."""
    swept = study.swept
    keys = [key for key in swept if key != comparison.factor] + ([comparison.factor] if comparison.factor else [])
    return next((key for key in keys if len(swept[key]) > 1 and all(map(is_number, swept[key]))), None)


def throughput_curve(study: Study, comparison: Comparison, key: str) -> Plot:
    """Throughput against a swept number: a curve per arm, a panel per combination of the other swept keys."""
    compare = comparison.factor
    curves: dict[str, dict[str, list[tuple[float, Sequence[float]]]]] = {}
    for level in study.compare(key).levels:
        values = level.measures.get("throughput_req_per_s")
        if values:
            panel = {k: v for k, v in level.cell.items() if k != compare}
            arm = level.cell.get(compare, "") if compare else ""
            curves.setdefault(cell_label(panel), {}).setdefault(arm, []).append((float(level.arm), values))
    shown = list(curves)[:MOST_CELLS]
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(5 * columns if columns > 1 else 6.5, 1.2 + 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    arms = _arms(comparison)
    for panel, label in zip(panels, shown, strict=False):
        for arm, points in curves[label].items():
            style = arms.index(arm) if arm in arms else 0
            points.sort()
            x = [number for number, _ in points]
            mean = np.array([np.mean(values) for _, values in points])
            spread = np.array([[mean[i] - min(v), max(v) - mean[i]] for i, (_, v) in enumerate(points)]).T
            spread = spread.clip(min=0)  # the mean of equal trials may be off by a rounding
            panel.errorbar(
                x,
                mean,
                yerr=spread,
                color=colour(style),
                linestyle=line(style),
                marker=marker(style),
                markerfacecolor="white" if style else colour(style),
                capsize=3,
                label=f"{compare}={arm}",
            )
        marked_axis(panel, [number for points in curves[label].values() for number, _ in points])
        panel.set_ylim(bottom=0)
        panel.set_xlabel(key)
        panel.set_ylabel("throughput (req/s)")
        panel.set_title(label if len(curves) > 1 else "", fontsize=9)
        panel.grid(color="0.92", linewidth=0.6)
        if compare and compare != key:
            panel.legend(fontsize=8)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    trials = max(len(v) for by_arm in curves.values() for points in by_arm.values() for _, v in points)
    caption = (
        f"Mark: mean over up to {trials} valid trials; bar: the range of the trials, not an interval."
        if trials > 1
        else "One trial: not replicated."
    )
    return titled("throughput_curve", f"Throughput against {key}", caption, comparison, figure)


def hit_rates(comparison: Comparison, counted: Mapping[tuple[str, bool], Sequence[tuple[float, float]]]) -> Plot:
    """Prefix-cache hit rate of every round: what the audit of the workload expects, and what the engine
    counted.

    `counted` maps an arm, and whether the contract held, to the rates of its rounds.
    """
    figure = Figure(figsize=(5.6, 5.6), layout="constrained")
    panel = figure.subplots()
    panel.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle=":")
    arms = _arms(comparison)
    for (arm, held), points in sorted(counted.items(), key=lambda item: (arms.index(item[0][0]), not item[0][1])):
        style = arms.index(arm)
        x, y = np.array(points).T
        panel.scatter(
            x,
            y,
            marker=marker(style) if held else "x",
            s=70,
            facecolors="none" if held else colour(style),
            edgecolors=colour(style) if held else None,
            label=f"{_arm_label(comparison, arm)}: {count(len(points), 'round')}{'' if held else ', contract broken'}",
        )
    panel.set_xlim(-0.04, 1.04)
    panel.set_ylim(-0.04, 1.04)
    panel.set_aspect("equal")
    panel.set_xlabel("expected hit rate (audit of the workload)")
    panel.set_ylabel("observed hit rate (counters of the engine)")
    panel.grid(color="0.92", linewidth=0.6)
    panel.legend(fontsize=8, loc="upper left")
    caption = (
        "Share of queried prompt tokens, one mark a round, invalid rounds included. On the dotted line the cache did "
        "what the workload predicts; below it where capacity or order bound the hits."
    )
    return titled("hit_rates", "Prefix-cache hit rate, expected and observed", caption, comparison, figure)


def timeline(comparison: Comparison, traced: Sequence[tuple[Level, Sequence[RunResult]]]) -> Plot:
    """Every request of one round as a bar from due to last token, one panel per arm of the first cell."""
    first = cell_label(traced[0][0].cell)
    chosen = _spread([(level, runs) for level, runs in traced if cell_label(level.cell) == first], MOST_PANELS)
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
    figure = Figure(figsize=(5 * max(len(drawn), 1.4), 1.5 + min(5, 1 + 0.05 * most)), layout="constrained")
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
    panels[0].legend(fontsize=7, loc="upper right")
    cell = f", cell {first}" if len(_cells(level for level, _ in traced)) > 1 else ""
    caption = (
        f"First valid round of trial {trial}{cell}; {count(most, 'completed request')}"
        f"{', the first of the round' if most == MOST_REQUESTS else ''}. Hatched: waiting for the first token."
    )
    return titled("timeline", "Request timeline of a round", caption, comparison, figure)


def _counted_hits(study: Study, factor: str | None) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """Expected and observed hit rate of every round that was counted, by arm and whether the contract
    held."""
    groups: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for run in study.runs:
        arm = place(run, study.record.compare, factor)[1] if factor else ""
        for one in run.rounds:
            expected, observed, queried = (
                one.contract.get(name) for name in ("expected_hit_tokens", "observed_hit_tokens", "queried_tokens")
            )
            if queried and observed is not None and expected is not None:
                groups.setdefault((arm, bool(one.contract.get("held"))), []).append(
                    (expected / queried, observed / queried)
                )
    return groups


def _draw_effect(panel: Axes, row: Effect, y: int) -> None:
    panel.plot(row.per_trial, [y + 0.22] * row.trials, "|", color="0.4", markersize=5)
    if row.low is not None and row.high is not None:
        panel.plot([row.low, row.high], [y, y], color="black", linewidth=1.4)
        for edge in (row.low, row.high):
            panel.plot([edge, edge], [y - 0.1, y + 0.1], color="black", linewidth=1.4)
    verdict = row.verdict or "inconclusive"
    face = "white" if verdict == "inconclusive" else "black"
    panel.plot(row.estimate, y, VERDICT_MARKS[verdict], color="black", markerfacecolor=face, markersize=7)


def _ratio_axis(panel: Axes, low: float, high: float) -> None:
    """A logarithmic axis from `low` to `high` with a handful of plain numbers."""
    room = (high / low) ** 0.08
    panel.set_xscale("log")
    panel.set_xlim(low / room, high * room)
    ticks = [tick for tick in RATIO_TICKS if low / room <= tick <= high * room]
    gap = np.log(high / low * room**2) / 7
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


def _cells(levels: Iterator[Level]) -> Mapping[str, Cell]:
    return {cell_label(level.cell): level.cell for level in levels}


def _arms(comparison: Comparison) -> list[str]:
    """The baseline first, then the others in the design's order: a fixed place means a fixed style."""
    found = list(dict.fromkeys(level.arm for level in comparison.levels))
    return sorted(found, key=lambda arm: arm != comparison.baseline)


def _arm_label(comparison: Comparison, arm: str) -> str:
    return f"{comparison.factor}={arm}" if comparison.factor else "all runs"
