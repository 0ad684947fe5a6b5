"""The look of the studies' figures: lines that differ without colour, panels that name their units."""

from collections.abc import Sequence
from typing import Literal

import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from llmexp.report import style

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")


def panels(columns: int, rows: int = 1, height: float = 3.6, width: float = 10.0) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def curves(frame: pd.DataFrame, key: str) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column, in the order in which they come."""
    return [(str(value), rows) for value, rows in frame.groupby(key, sort=False)]


def line(panel: Axes, place: int, x: npt.ArrayLike, y: npt.ArrayLike, label: str) -> None:
    """A curve with marks; `place` numbers its look."""
    panel.plot(
        x,
        y,
        color=style.colour(place),
        linestyle=style.line(place),
        marker=style.marker(place),
        markersize=5,
        markerfacecolor="white" if place else style.colour(0),
        linewidth=1.4,
        label=label,
    )


def labelled(panel: Axes, title: str, x: str, y: str) -> None:
    """Title, units and a quiet grid."""
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(color="0.92", linewidth=0.6)
    panel.set_axisbelow(True)


def tried(panel: Axes, values: Sequence[float]) -> None:
    """An x axis whose ticks are the values themselves, logarithmic where they span a decade."""
    ticks = sorted(set(values))
    if ticks[-1] >= 8 * ticks[0]:
        panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def logarithmic(panel: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5."""
    panel.set(**{f"{which}scale": "log"})
    axis = panel.xaxis if which == "x" else panel.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """1024 as it is, 15700 as 15.7k, 131072 as 131k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= (size if size > 1e3 else 1e4):
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
