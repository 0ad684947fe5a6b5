"""What a smaller KV cache does: hits, throughput and preemptions against the pressure on it."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmexp.analyze.compare import Comparison, Effect
from llmexp.analyze.pairs import Cell, shortage
from llmexp.analyze.study import Study
from llmexp.report.evidence import KV_BUDGETS, Place, by_capacity, places
from llmexp.report.style import Plot, colour, curve, curve_marks, line, marker, titled


def pressure_plot(study: Study, comparison: Comparison) -> Plot | None:
    """Hit rate with its bound, effect on throughput and preemptions over the prompt pressure, one mark a KV budget;
    budgets that did not start stand in a band of their own. None where no budget is swept or none is known."""
    key = next((key for key in study.swept if key in KV_BUDGETS and key != comparison.factor), None)
    found = by_capacity(places(study, comparison.levels))
    known = [place for place in found if place.level.mean("prompt_pressure")]
    if key is None or not known:
        return None
    arms = sorted({place.level.arm: None for place in found}, key=lambda arm: arm != comparison.baseline)
    compared = comparison.factor is not None
    figure = Figure(figsize=(9, 9.2 if compared else 6.4), layout="constrained")
    panels = list(figure.subplots(3 if compared else 2, 1, sharex=True))
    hits, preemptions = panels[0], panels[-1]
    for style, arm in enumerate(arms):
        name = f"{comparison.factor}={arm}" if compared else "all runs"
        of_arm = [place for place in known if place.level.arm == arm]
        _levels(hits, of_arm, "cache_hit_rate", style, name, comparison)
        _levels(preemptions, of_arm, "preemptions", style, name, comparison)
        bounds = [(_pressure(place), place.bound) for place in of_arm if place.bound]
        if bounds:
            hits.plot(*zip(*bounds, strict=True), "_", color=colour(style), markersize=18, label=f"{name}: possible")
        rows = [
            (_pressure(place), row)
            for place in known
            if place.level.arm == comparison.baseline
            and (row := comparison.row("throughput_req_per_s", place.level.cell, arm)) is not None
        ]
        if rows:
            _ratios(panels[1], rows, style, f"{name}, ratio to {comparison.baseline}", comparison)
    hits.set_ylabel("hit rate")
    hits.set_ylim(-0.04, 1.08)
    preemptions.set_ylabel("preemptions a round")
    preemptions.set_ylim(0, max(preemptions.get_ylim()[1], 1.0))
    if compared:
        panels[1].axhline(1, color="black", linewidth=0.8)
        panels[1].set_ylabel("throughput, ratio")
        panels[1].set_ylim(bottom=0)
    refused = {place.level.cell[key]: place for place in found if place.refused and not place.runs}
    _place(panels, known, refused, key)
    for panel in panels:
        panel.grid(color="0.92", linewidth=0.6)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, loc="best")
    panels[-1].set_xlabel("prompt pressure: most prompt tokens in flight, over the tokens that the KV cache holds")
    caption = (
        f"One mark a budget, named on top ({key}). {curve_marks(comparison)} "
        "Right of the dotted line the prompts in flight fit only as far as they share blocks."
    )
    if refused:
        caption += " Grey: budgets with which the engine does not start, and what memory there was for the KV cache."
    return titled("pressure", "Pressure on the KV cache", caption, comparison, figure)


def _levels(panel: Axes, found: Sequence[Place], measure: str, style: int, name: str, comparison: Comparison) -> None:
    """A line over the pressure for each combination of the swept keys that are no budget."""
    lines: dict[str, list[Place]] = {}
    for place in found:
        if measure in place.level.measures:
            lines.setdefault(_rest(place.level.cell, comparison), []).append(place)
    for rest, of_line in lines.items():
        points = [(_pressure(place), place.level.measures[measure]) for place in of_line]
        curve(panel, points, style, f"{name} {rest}".strip(), comparison.confidence)


def _ratios(panel: Axes, rows: Sequence[tuple[float, Effect]], style: int, name: str, comparison: Comparison) -> None:
    rows = sorted(rows, key=lambda each: each[0])
    panel.plot(
        [x for x, _ in rows],
        [row.estimate for _, row in rows],
        color=colour(style),
        linestyle="none" if len({_rest(row.cell, comparison) for _, row in rows}) > 1 else line(style),
        marker=marker(style),
        label=name,
    )
    for x, row in rows:
        if row.low is not None and row.high is not None:
            panel.plot([x, x], [row.low, row.high], color=colour(style), linewidth=1.2)


def _place(panels: Sequence[Axes], known: Sequence[Place], refused: dict[str, Place], key: str) -> None:
    """A logarithmic axis, the budgets' values on top of it, and beyond it the budgets that do not start."""
    pressures = [_pressure(place) for place in known]
    low, high = min(*pressures, 1.0), max(*pressures, 1.0)
    span = max(high / low, 2.0)
    ends = [high * span ** (0.07 * (i + 1.6)) for i in range(len(refused))]
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xlim(low / span**0.06, (ends[-1] if ends else high) * span**0.06)
        panel.axvline(1, color="0.4", linestyle=":", linewidth=1)
        if ends:
            panel.axvspan(high * span**0.06, panel.get_xlim()[1], color="0.94", zorder=0)
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for x, place in zip(ends, refused.values(), strict=True):
        text = f"does not start:\n{shortage(place.refused[0])}"
        panels[0].text(x, 0.52, text, rotation=90, ha="center", va="center", fontsize=7)
    top = panels[0].secondary_xaxis("top")
    budgets = {place.level.cell[key]: _pressure(place) for place in known}
    top.set_xticks([*budgets.values(), *ends], [*budgets, *refused], fontsize=8)
    top.minorticks_off()
    top.set_xlabel(key, fontsize=8)


def _pressure(place: Place) -> float:
    return place.level.mean("prompt_pressure") or 0.0


def _rest(cell: Cell, comparison: Comparison) -> str:
    """The cell without its KV budget, where there is more to it."""
    rest = {key: value for key, value in cell.items() if key not in KV_BUDGETS and key not in comparison.common}
    return comparison.label(rest) if rest else ""
