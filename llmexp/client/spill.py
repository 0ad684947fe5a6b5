"""The trace of a round on its way to the disk, which has room for it before anything is sent."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmexp.errors import storage_error
from llmexp.workloads.workload import Workload

ROOM = ".room"  # a file in the run's folder that holds the place
_ASIDE, _HOME = "llmexp-saved-", b"llmexp.home"
_BYTES_PER_REQUEST, _BYTES_PER_TOKEN = 256, 9
_COPIES = 2  # the round's own file, and the run's, into which the rounds are joined
_REST_BYTES = 2 << 20  # summary, counters, the engine's log


def reserve(folder: Path, workload: Workload) -> None:
    """Takes the room that a round's trace will need. Raises OSError where there is not so much."""
    per_token = _BYTES_PER_TOKEN * (2 if workload.keep_text else 1)
    trace_bytes = _BYTES_PER_REQUEST * len(workload) + per_token * int(workload.output_tokens.sum())
    file = os.open(folder / ROOM, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, _COPIES * trace_bytes + _REST_BYTES)
    except OSError:
        (folder / ROOM).unlink()
        raise
    finally:
        os.close(file)


def write(trace: pa.Table, path: Path) -> None:
    """Writes a trace whole or not at all, into the room that was kept for it.

    Raises StorageError where the folder refuses it all the same; the trace is among the temporary files then.
    """
    try:
        (path.parent / ROOM).unlink(missing_ok=True)
        _put(trace, path)
    except OSError as error:
        saved = Path(tempfile.mkdtemp(prefix=_ASIDE)) / path.name
        pq.write_table(trace.replace_schema_metadata({_HOME: str(path.absolute())}), saved)
        if refusal := storage_error(error, f"{path.parent} ({path.name} is in {saved.parent} instead)"):
            raise refusal from None
        raise


def aside(temporary: Path) -> Iterator[tuple[Path, Path]]:
    """The traces among temporary files that their folders had refused, each with the place where it is owed."""
    for folder in sorted(temporary.glob(f"{_ASIDE}*")):
        with suppress(OSError, pa.ArrowException):  # another doctor may be at it
            for path in sorted(folder.glob("*.parquet")) if folder.lstat().st_uid == os.getuid() else ():
                if (home := (pq.read_schema(path).metadata or {}).get(_HOME)) is not None:
                    yield path, Path(os.fsdecode(home))


def bring_home(saved: Path, home: Path) -> None:
    """Moves a trace from the temporary files to where it is owed. Raises OSError; then it stays where it is."""
    _put(pq.read_table(saved), home)
    drop(saved)


def drop(saved: Path) -> None:
    """Removes a trace from the temporary files."""
    shutil.rmtree(saved.parent)


def _put(trace: pa.Table, path: Path) -> None:
    partial = path.with_suffix(".partial")
    try:
        pq.write_table(trace, partial)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
