"""What all figures have in common: a title, a caption, and styles that are told apart without colour."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from llmexp.analyze.compare import Comparison
from llmexp.analyze.intervals import MIN_TRIALS, t_interval
from llmexp.report.table import over, simulated

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777")
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
VERDICT_MARKS = {"improves": "^", "regresses": "v", "equivalent": "s", "inconclusive": "o", "deterministic": "D"}
RATIO_TICKS = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05),
    *(1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.5, 3, 4, 5, 7, 10, 20, 50, 100),
)
ROUND_TICKS = (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100)  # kept first where there is no room for all


def colour(place: int) -> str:
    """The colour of an arm by its place; line and marker differ beside it, and where colours come round again."""
    return _COLOURS[place % len(_COLOURS)]


def line(place: int) -> Any:
    """The line style of an arm."""
    return _LINES[(place + place // len(_COLOURS)) % len(_LINES)]


def marker(place: int) -> str:
    """The marker of an arm."""
    return _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)]


@dataclass(frozen=True)
class Plot:
    """A figure with the name of its file, its title and what its marks mean."""

    name: str
    title: str
    caption: str
    figure: Figure


def curve(panel: Axes, points: Sequence[tuple[float, Sequence[float]]], style: int, name: str, sure: float) -> None:
    """A line through means over trials: dashes are single trials, and bars t intervals of confidence `sure` where
    there are enough trials and they differ. Each point is its place and the trials' values."""
    points = sorted(points, key=lambda point: point[0])
    panel.plot(
        [x for x, _ in points],
        [float(np.mean(trials)) for _, trials in points],
        color=colour(style),
        linestyle=line(style),
        marker=marker(style),
        markersize=5,
        markerfacecolor="white" if style else colour(style),
        label=name,
    )
    for x, trials in points:
        if len(trials) > 1:
            panel.plot([x] * len(trials), trials, "_", color=colour(style), markersize=9)
        if len(trials) >= MIN_TRIALS and np.ptp(trials) > 1e-9 * abs(np.mean(trials)):
            low, high = t_interval(np.array(trials), sure)
            panel.plot([x, x], [float(low), float(high)], color=colour(style), linewidth=1.2)


def curve_marks(comparison: Comparison) -> str:
    """What the marks of a `curve` mean, for a caption."""
    sure = f"{comparison.confidence:.0%} t interval{over(comparison)}"
    return f"Mark: mean over trials; dashes: single trials; bar: {sure}, from {MIN_TRIALS} trials on."


def wrapped(text: str, width: int) -> str:
    """A label in lines of at most so many characters."""
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def marked_axis(panel: Axes, values: Sequence[float], first: Sequence[float] = ()) -> None:
    """An axis whose ticks are the values that were tried, logarithmic where they span three doublings or more; where
    there is no room for all, the `first`, then the ends, are kept."""
    ticks = sorted(set(values))
    log = ticks[0] > 0 and ticks[-1] / ticks[0] >= 8
    if log:
        panel.set_xscale("log", base=2)
    place = math.log if log else float
    room = 0.09 * (place(ticks[-1]) - place(ticks[0]))
    kept: list[float] = []
    for tick in dict.fromkeys([*first, ticks[0], ticks[-1], *ticks]):
        if all(abs(place(tick) - place(other)) >= room for other in kept):
            kept.append(tick)
    panel.xaxis.set_major_locator(FixedLocator(kept))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def is_number(text: str) -> bool:
    """Whether a swept value can be a place on an axis."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def titled(
    name: str, title: str, caption: str, comparison: Comparison, figure: Figure, legend_of: Sequence[Axes] = ()
) -> Plot:
    """Puts the title, with the mark of simulated data, above and the caption below the figure; under the title one
    legend for all panels `legend_of`, where what has one name is shown once."""
    marked = f"{simulated(comparison)}{title}"
    width = figure.get_size_inches()[0]
    found = [panel.get_legend_handles_labels() for panel in legend_of]
    marks = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
    if marks:
        columns = min(len(marks), max(1, int(width * 13 / (max(map(len, marks)) + 8))))
        figure.legend(
            list(marks.values()), list(marks), loc="outside upper center", ncols=columns, fontsize=8, frameon=False,
            title=f"{marked} ({comparison.study})", title_fontsize=11,
        )  # fmt: skip
    else:
        figure.suptitle(f"{marked} ({comparison.study})", fontsize=11)
    figure.supxlabel("\n".join(textwrap.wrap(caption, int(width * 15))), fontsize=7.5, x=0.01, ha="left")
    return Plot(name, marked, caption, figure)
