"""What a study of the simulator found: tables of numbers and a figure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Numbers:
    """A table: all its columns go to files, those of ``shown`` (column to heading) are for people."""

    name: str
    title: str
    frame: pd.DataFrame
    shown: Mapping[str, str]


def headline(frame: pd.DataFrame, measure: str, *keys: str) -> dict[str, float]:
    """A column as numbers named by it and the values of other columns, joined with dots."""
    names = frame[list(keys)].astype(str).agg(".".join, axis=1)
    return {f"{measure}.{name}": float(value) for name, value in zip(names, frame[measure], strict=True)}


@dataclass(frozen=True)
class Findings:
    """``setting`` says in a line what was simulated, ``caption`` how to read the figure, ``headline`` has the
    numbers that MLflow lists, by name with unit."""

    title: str
    setting: str
    tables: tuple[Numbers, ...]
    figure: Figure
    caption: str
    headline: Mapping[str, float] = field(default_factory=dict)
