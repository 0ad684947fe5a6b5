"""What a worker measures, on disk as it goes, so that the death of processes loses nothing that had ended.

A journal is a file of pickles in a folder that only its owner can enter: where its trace belongs, then Records, and at
the end an Outcome. It stays until the trace is on disk. Where the process that would read it is gone, its worker makes
the trace itself; where that is gone too, `llmexp doctor` does.
"""

import contextlib
import errno
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmexp.client.ledger import Records, joined
from llmexp.errors import EngineError, LlmexpError, StorageError, storage_error
from llmexp.liveness import is_gone

_FOLDER = "llmexp-client-"


@dataclass(frozen=True)
class Heading:
    """Whose records follow: a worker's of a round that began at `origin` (CLOCK_MONOTONIC).

    Their trace belongs beside the Parquet file `spill`, unless that is there and holds it; None where nobody wants it.
    `processes` (marks of `llmexp.liveness`) would bring it home: the worker, and who gathers from all.
    """

    spill: Path | None
    round_index: int
    worker: int
    origin: float
    processes: tuple[str, str]


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


class Journal:
    """A journal under way. What the disk refuses waits in memory, and goes with what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errno = 0  # why the disk refused the last of it, 0 if it holds everything
        self._file = path.open("wb", buffering=0)
        self._waiting = b""

    def append(self, value: Heading | Records | Outcome) -> None:
        """Puts one value into it."""
        self._waiting += pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self.errno = 0
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as refusal:
            self.errno = refusal.errno or errno.EIO

    def settle(self) -> int:
        """Makes the trace, where not all of it could reach the disk; returns `errno`."""
        if self.errno:
            preserve(self.path, self._waiting)
        return self.errno

    def close(self) -> None:
        self._file.close()


def refused(number: int) -> LlmexpError:
    """The error of a disk that did not take a journal."""
    place = f"{tempfile.gettempdir()} (the temporary files, which TMPDIR puts elsewhere)"
    return storage_error(OSError(number, ""), place) or EngineError(f"{place}: {os.strerror(number)}")


def read(path: Path, rest: bytes = b"") -> tuple[Records, Outcome | None]:
    """All that was put into a journal; no Outcome if its worker did not come to its end.

    `rest`: what did not reach the disk.
    """
    parts: list[Records] = []
    outcome = None
    for value in _values(path, rest):
        if isinstance(value, Records):
            parts.append(value)
        elif isinstance(value, Outcome):
            outcome = value
    return joined(parts), outcome


def _values(path: Path, rest: bytes = b"") -> Iterator[Any]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        journal = io.BytesIO(file.read() + rest) if rest else file
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


def preserve(path: Path, rest: bytes = b"") -> None:
    """Makes the trace of a journal that nobody else will read, where it is owed, and abandons it.

    Raises StorageError if the trace had to go elsewhere, OSError if it could go nowhere; then the journal stays.
    """
    from llmexp.client.gather import gather
    from llmexp.client.spill import write

    records, _ = read(path, rest)
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
    with contextlib.suppress(FileNotFoundError):  # another one was at it first
        if not any(map(is_owed, folder.glob("journal-*"))):
            shutil.rmtree(folder, ignore_errors=True)


def left_over(temporary: Path) -> Iterator[tuple[Path, Heading]]:
    """The journals among temporary files whose records nobody is left to bring home."""
    for folder in sorted(temporary.glob(f"{_FOLDER}*")):
        with contextlib.suppress(OSError):  # of a round that ends meanwhile, it may be gone at any moment
            place = folder.lstat()
            ours = place.st_uid == os.getuid() and not place.st_mode & 0o077  # a pickle of others could do anything
            for path in sorted(folder.glob("journal-*")) if ours else ():
                if (heading := is_owed(path)) and all(map(is_gone, heading.processes)):
                    yield path, heading
