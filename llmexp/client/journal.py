"""What a worker measures, on disk as it goes, so that the death of a process loses nothing that had ended.

A journal is a file of pickles in a folder that only its owner can enter: Records, and at the end an Outcome. Where the
process that would read it is gone, its worker leaves the trace in the run's folder itself.
"""

import contextlib
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmexp.client.ledger import Records, joined


@dataclass(frozen=True)
class Outcome:
    """What a worker knows about itself, once it has done its share."""

    loop_lags_s: NDArray[np.float64]
    in_flight_area_s: float
    max_in_flight: int
    capped: int
    cpu_s: float
    wall_s: float


def append(journal: BinaryIO, value: Records | Outcome) -> None:
    """Puts one value into an unbuffered journal."""
    journal.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def read(path: Path) -> tuple[Records, Outcome | None]:
    """All that was put into a journal; no Outcome if its worker did not come to its end."""
    parts: list[Records] = []
    outcome = None
    with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
        while (value := _next(journal)) is not None:
            if isinstance(value, Records):
                parts.append(value)
            else:
                outcome = value
    return joined(parts), outcome


def _next(journal: BinaryIO) -> Any:
    try:
        return pickle.load(journal)
    except (EOFError, pickle.UnpicklingError):  # the end, or where a killed worker was cut off
        return None


def preserve(path: Path, target: Path, *, round_index: int, worker: int, origin: float) -> None:
    """Makes the trace of a journal that nobody else will read, and abandons it."""
    from llmexp.client.gather import gather
    from llmexp.client.spill import write

    trace = gather({worker: read(path)[0]}, round_index=round_index, origin=origin)
    write(trace, target)
    abandon(path)


def abandon(path: Path) -> None:
    """Removes a journal, and after the last one what the round has left behind."""
    path.unlink()
    if not list(path.parent.glob("journal-*")):
        shutil.rmtree(path.parent, ignore_errors=True)
