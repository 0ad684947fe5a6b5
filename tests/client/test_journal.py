"""What a worker keeps survives it: however it was portioned, and wherever a kill cut it off."""

import errno
import os
import re
import resource
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp import liveness
from llmexp.client import journal, spill
from llmexp.client.call import Call
from llmexp.client.gather import gather
from llmexp.client.ledger import Ledger, joined
from llmexp.errors import StorageError
from tests.client.sending import numbered

CALLS = st.lists(
    st.builds(
        Call,
        index=st.integers(0, 1000),
        intended=st.floats(0, 1e6),
        ready=st.floats(0, 1e6),
        sent=st.floats(0, 1e6),
        end=st.floats(0, 1e6),
        chunks=st.lists(st.floats(0, 1e6), max_size=4),
        output_tokens=st.none() | st.integers(0, 100),
        finish_reason=st.none() | st.sampled_from(["stop", "length"]),
        error=st.none() | st.text(max_size=5),
        text=st.none() | st.text(max_size=5),
        engine_times=st.none() | st.tuples(*[st.floats(0, 1e6)] * 4),
    ),
    max_size=12,
)


def kept(path: Path, calls: list[Call], every: int) -> list[int]:
    """Journals calls in portions of `every`; returns the journal's size after each portion."""
    ledger, sizes = Ledger(), []
    with closing(journal.Journal(path)) as made:
        for i, call in enumerate(calls):
            ledger.add(call)
            if (i + 1) % every == 0:
                made.append(ledger.drain())
                sizes.append(path.stat().st_size)
        made.append(ledger.drain())
        sizes.append(path.stat().st_size)
    assert ledger.taken == len(calls)
    return sizes


@settings(deadline=None, max_examples=50)
@given(calls=CALLS, every=st.integers(1, 5))
def test_portions_make_the_same_trace_as_the_whole(
    calls: list[Call], every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal-0"
    kept(path, calls, every)
    whole = Ledger()
    for call in calls:
        whole.add(call)
    found, outcome = journal.read(path)
    assert outcome is None
    assert gather({0: found}, round_index=0, origin=0.0).equals(gather({0: whole.drain()}, round_index=0, origin=0.0))


@settings(deadline=None, max_examples=50)
@given(calls=CALLS, every=st.integers(1, 5), cut=st.floats(0, 1))
def test_a_journal_that_was_cut_off_holds_every_whole_portion(
    calls: list[Call], every: int, cut: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal-0"
    sizes = kept(path, calls, every)
    size = int(cut * sizes[-1])
    os.truncate(path, size)
    found, _ = journal.read(path)
    portions = sum(end <= size for end in sizes)
    assert len(found.rows) == (len(calls) if portions == len(sizes) else portions * every)
    assert found.rows["request"].tolist() == [call.index for call in calls[: len(found.rows)]]


def test_a_journal_that_was_never_begun_is_empty(tmp_path: Path) -> None:
    found, outcome = journal.read(tmp_path / "none")
    assert len(found.rows) == 0 and outcome is None
    assert np.array_equal(joined([]).chunks, np.empty(0))


@settings(deadline=None, max_examples=50)
@given(calls=CALLS, every=st.integers(1, 3), full=st.integers(300, 5000), free_again=st.booleans())
def test_what_a_full_disk_refuses_is_kept_until_it_is_free_or_the_trace_is_made(
    calls: list[Call], every: int, full: int, free_again: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path, spill_to, ledger = folder / "of-round" / "journal-0", folder / "requests-0.parquet", Ledger()
    path.parent.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(journal.Journal(path)) as made:
        made.append(journal.Heading(spill_to, 0, 0, 0.0, ("", "")))
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))  # a write stops there, and then raises
        try:
            for i, call in enumerate(calls):
                ledger.add(call)
                if i % every == 0:
                    made.append(ledger.drain())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if free_again or not made.errno:
            made.append(ledger.drain())
            assert made.settle() == 0
            found = gather({0: journal.read(path)[0]}, round_index=0, origin=0.0)
        else:
            assert made.settle() == errno.EFBIG
            assert not path.parent.exists()
            rest = gather({0: ledger.drain()}, round_index=0, origin=0.0)
            kept = folder / "requests-0.0.parquet"
            found = pa.concat_tables([pq.read_table(kept).cast(rest.schema), rest]) if kept.exists() else rest
    assert sorted(found["request"].to_pylist()) == sorted(call.index for call in calls)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_by(processes: tuple[str, str], spill: Path | None, requests: int = 2) -> Path:
    """The journal of such processes."""
    path = journal.make_folder() / "journal-0"
    ledger = Ledger()
    for index in range(requests):
        ledger.add(Call(index, 0.0, 0.0, sent=1.0, end=2.0))
    with closing(journal.Journal(path)) as made:
        made.append(journal.Heading(spill, 0, 0, 0.5, processes))
        made.append(ledger.drain())
    return path


def test_where_all_processes_were_killed_the_journals_tell_where_they_belong(temporary: Path, tmp_path: Path) -> None:
    alive = liveness.mark()
    dead = alive.rpartition(" ")[0] + " 0"
    spill = tmp_path / "requests-0.parquet"
    path = left_by((dead, dead), spill)
    left_by((alive, dead), spill)
    left_by((dead, alive), spill)
    left_by((dead, dead), None)
    foreign = left_by((dead, dead), spill)
    foreign.parent.chmod(0o755)
    assert [found for found, _ in journal.left_over(temporary)] == [path]
    journal.preserve(path)
    assert not path.parent.exists()
    trace = pq.read_table(tmp_path / "requests-0.0.parquet")
    assert trace["request"].to_pylist() == [0, 1] and trace["end_s"].to_pylist() == [1.5, 1.5]


def test_a_journal_stays_where_no_disk_takes_its_trace(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left_by(("", ""), tmp_path / "requests-0.parquet")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as refusing:
        refusing.setattr(pq, "write_table", full)
        with pytest.raises(OSError, match="No space left"):
            journal.preserve(path)
        journal.tidy(path.parent)
    journal.preserve(path)
    assert len(pq.read_table(tmp_path / "requests-0.0.parquet")) == 2


def test_a_round_has_its_room_before_it_begins_and_gives_it_to_its_trace(tmp_path: Path) -> None:
    workload = numbered(1000, output_tokens=100)
    spill.reserve(tmp_path, workload)
    room = (tmp_path / spill.ROOM).stat()
    assert room.st_blocks * 512 >= 2 * 1000 * 100 * 8, "really taken, not only named"
    trace = gather({0: joined([])}, round_index=0, origin=0.0)
    spill.write(trace, tmp_path / "requests-0.parquet")
    assert pq.read_table(tmp_path / "requests-0.parquet").equals(trace)
    assert [path.name for path in tmp_path.iterdir()] == ["requests-0.parquet"]


def test_a_round_without_room_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        spill.reserve(tmp_path, numbered(3))
    assert not list(tmp_path.iterdir())


def test_a_trace_that_its_folder_refuses_is_kept_elsewhere_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", read_only)
    trace = gather({0: joined([])}, round_index=0, origin=0.0)
    with pytest.raises(StorageError, match=r"requests-0\.parquet is in (\S+) instead\): Read-only") as caught:
        spill.write(trace, tmp_path / "requests-0.parquet")
    saved = re.search(r"is in (\S+) instead", str(caught.value))
    assert saved is not None
    assert pq.read_table(Path(saved[1], "requests-0.parquet")).equals(trace)
    shutil.rmtree(saved[1])
