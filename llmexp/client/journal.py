"""What a worker measures, on disk as it goes, so that the death of processes loses nothing that had ended.

A journal is a file of pickles in a folder that only its owner can enter: where its trace belongs, then Records, and at
the end an Outcome. It stays until the trace is on disk. Where the process that would read it is gone, its worker makes
the trace itself; where that is gone too, `llmexp doctor` does.
"""

import contextlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmexp.client.ledger import Records, joined

_FOLDER = "llmexp-client-"
_LAST_WORDS_S = 30.0  # a worker that has lost its parent is gone by then


@dataclass(frozen=True)
class Heading:
    """Whose records follow: a worker's of a round that began at `origin` (CLOCK_MONOTONIC).

    Their trace belongs beside the Parquet file `spill`, into which the process `parent` (a mark of `llmexp.liveness`)
    gathers those of all workers; None where nobody wants it.
    """

    spill: Path | None
    round_index: int
    worker: int
    origin: float
    parent: str


@dataclass(frozen=True)
class Outcome:
    """What a worker knows about itself, once it has done its share."""

    loop_lags_s: NDArray[np.float64]
    in_flight_area_s: float
    max_in_flight: int
    capped: int
    cpu_s: float
    wall_s: float


def make_folder() -> Path:
    """A new place for the journals of a round, and for what its workers share."""
    return Path(tempfile.mkdtemp(prefix=_FOLDER))


def append(journal: BinaryIO, value: Heading | Records | Outcome) -> None:
    """Puts one value into an unbuffered journal."""
    journal.write(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def read(path: Path) -> tuple[Records, Outcome | None]:
    """All that was put into a journal; no Outcome if its worker did not come to its end."""
    parts: list[Records] = []
    outcome = None
    for value in _values(path):
        if isinstance(value, Records):
            parts.append(value)
        elif isinstance(value, Outcome):
            outcome = value
    return joined(parts), outcome


def _values(path: Path) -> Iterator[Any]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
        while True:
            try:
                yield pickle.load(journal)
            except (EOFError, pickle.UnpicklingError):  # the end, or where a killed worker was cut off
                return


def is_owed(path: Path) -> Heading | None:
    """The heading of a journal whose records are in no trace yet."""
    heading = next(_values(path), None)
    if not isinstance(heading, Heading) or heading.spill is None or heading.spill.exists():
        return None
    return heading


def preserve(path: Path) -> None:
    """Makes the trace of a journal that nobody else will read, where it is owed, and abandons it.

    Raises StorageError if the trace had to go elsewhere, OSError if it could go nowhere; then the journal stays.
    """
    from llmexp.client.gather import gather
    from llmexp.client.spill import write
    from llmexp.errors import StorageError

    records, _ = read(path)
    if (heading := is_owed(path)) and heading.spill is not None and len(records.rows):
        trace = gather({heading.worker: records}, round_index=heading.round_index, origin=heading.origin)
        try:
            write(trace, heading.spill.with_suffix(f".{heading.worker}{heading.spill.suffix}"))
        except StorageError:
            abandon(path)
            raise
    abandon(path)


def abandon(path: Path) -> None:
    """Removes a journal, and after the last one what the round has left behind."""
    path.unlink(missing_ok=True)
    tidy(path.parent)


def tidy(folder: Path) -> None:
    """Removes a round's folder, unless a journal in it holds what no trace does."""
    if not any(map(is_owed, folder.glob("journal-*"))):
        shutil.rmtree(folder, ignore_errors=True)


def left_over() -> Iterator[tuple[Path, Heading]]:
    """The journals among the temporary files whose records nobody is left to bring home."""
    from llmexp import liveness

    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/journal-*")):
        with contextlib.suppress(OSError):
            place = path.parent.lstat()
            ours = place.st_uid == os.getuid() and not place.st_mode & 0o077  # a pickle of others could do anything
            settled = ours and path.stat().st_mtime < time.time() - _LAST_WORDS_S
            if settled and (heading := is_owed(path)) and liveness.is_gone(heading.parent):
                yield path, heading
