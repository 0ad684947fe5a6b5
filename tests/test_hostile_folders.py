"""Run folders, studies and stores from elsewhere: refused with a name, and nothing outside is touched."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import llmexp
from llmexp import results
from llmexp.analyze.requests import latencies
from llmexp.analyze.study import from_mlflow
from llmexp.errors import ConfigError, ResultError, TrackingError
from llmexp.record import clear
from llmexp.report.command import report
from tests.analyze.synthetic import make_study


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    make_study(tmp_path / "s", trials=1, rounds=1)
    return next(path.parent for path in sorted((tmp_path / "s").glob("*/summary.json")))


def test_a_linked_run_folder_is_refused_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "engine.log").write_text("theirs")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "run").symlink_to(theirs)
    (tmp_path / "linked").symlink_to(tmp_path / "study")
    for folder in (tmp_path / "study" / "run", tmp_path / "linked" / "other"):
        with pytest.raises(ConfigError, match="is a link to another place"):
            clear(folder)
    assert [path.name for path in theirs.iterdir()] == ["engine.log"]


def test_files_that_are_links_are_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    folder = tmp_path / "study" / "run"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "summary.json", "summary.partial", "engine.log", "requests.parquet"):
        (folder / name).symlink_to(victim)
    clear(folder)
    assert list(folder.iterdir()) == [] and victim.read_text() == "theirs"


@pytest.mark.parametrize("content", ["", "{}", "[]", "\x00", '{"study": "s"}', "[" * 100_000])
def test_a_summary_that_is_none_is_named(content: str, run_folder: Path) -> None:
    (run_folder / "summary.json").write_text(content)
    with pytest.raises(ResultError, match=r"summary\.json: not a run summary"):
        llmexp.load_run(run_folder)
    with pytest.raises(ResultError):
        report([str(run_folder)])


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("summary.json", {"trial": "two"}, "trial: got 'two'; accepted is an integer"),
        ("summary.json", {"status": "done"}, "status: got 'done'; accepted is complete, failed, killed or refused"),
        ("summary.json", {"folder": 5}, "folder: got 5; accepted is a path"),
        ("summary.json", {"colour": "red"}, "colour: no such key"),
        ("summary.json", None, "study: it needs to be set; accepted is text"),
        ("summary.json", b'{"study": ', "not JSON (Expecting value: line 1 column 11 (char 10))"),
        ("study.json", {"trials": None}, "trials: got null; accepted is an integer"),
        (
            "study.json",
            {"cells": {}},
            "cells: got {}; accepted is a list, each a mapping, NAME: VALUE, each value text",
        ),
        ("search.json", {"kind": "roof"}, "kind: got 'roof'; accepted is floor or saturation"),
    ],
)
def test_what_is_wrong_with_a_record_is_told_as_of_a_config(
    file: str, change: dict[str, object] | bytes | None, told: str, run_folder: Path
) -> None:
    """In one line: the file, the key, what it got and what it accepts."""
    results.save_search(results.SearchRecord(kind="floor", key="k", found="f"), run_folder.parent)
    path = (run_folder if file == "summary.json" else run_folder.parent) / file
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(json.dumps({} if change is None else {**json.loads(path.read_text()), **change}))
    with pytest.raises(ResultError) as refusal:
        report([str(path.parent)])
    text = str(refusal.value)
    assert text.startswith(f"{path}: not ") and text.endswith(told) and "\n" not in text


def test_a_summary_without_hashes_is_not_intact(run_folder: Path) -> None:
    assert not results.is_intact(llmexp.load_run(run_folder).model_copy(update={"files": {}}))


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": [1]}),
        pa.table({"round": ["x"], "request": ["y"]}),
        None,
    ],
)
def test_a_trace_of_another_schema_is_named(table: pa.Table | None, run_folder: Path) -> None:
    if table is None:
        (run_folder / "requests.parquet").write_bytes(b"PAR1 no")
    else:
        pq.write_table(table, run_folder / "requests.parquet")
    with pytest.raises(ResultError, match=r"requests\.parquet: not the trace of a run"):
        latencies(llmexp.load_run(run_folder), "ttft_ms")
    with pytest.raises(ResultError, match=r"requests\.parquet"):
        report([str(run_folder.parent)])


def test_a_trace_whose_request_numbers_would_take_all_memory_is_refused(run_folder: Path) -> None:
    trace = pq.read_table(run_folder / "requests.parquet")
    far = pa.array([2**31 - 1] * len(trace), pa.int32())
    pq.write_table(trace.set_column(1, "request", far), run_folder / "requests.parquet")
    with pytest.raises(ResultError, match="requests number"):
        latencies(llmexp.load_run(run_folder), "ttft_ms")


def test_a_study_does_not_lead_out_of_its_folder(run_folder: Path) -> None:
    study = run_folder.parent / "study.json"
    record = json.loads(study.read_text())
    record["runs"][0]["name"] = "../../elsewhere"
    study.write_text(json.dumps(record))
    told = (
        r"study\.json: not a study's record; runs\[0\]\.name: got '\.\./\.\./elsewhere'; accepted is the name of a fold"
    )
    with pytest.raises(ResultError, match=told):
        llmexp.load_study(run_folder.parent)


@pytest.mark.parametrize("uri", ["garbage", "/tmp/x", "file:/tmp/x", "http:", "sqlite:///a b", "ftp://host"])
def test_what_is_no_store_is_refused_before_anything_is_made(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--tracking-uri"):
        report(["--mlflow-experiment", "x", "--tracking-uri", uri])
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no such database"):
        from_mlflow("x", f"sqlite:///{tmp_path}/none.db")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "junk.db").write_bytes(b"junk" * 999)
    with pytest.raises(TrackingError, match="MLflow cannot be asked"):
        from_mlflow("x", f"sqlite:///{tmp_path}/junk.db")
    assert [path.name for path in tmp_path.iterdir()] == ["junk.db"]


def test_a_server_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "report", "--mlflow-experiment", "x"]
    done = subprocess.run(
        [*command, "--tracking-uri", "http://me:CANARY-pw@127.0.0.1:9"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, "nothing is wrong with what was asked"
    assert (
        "--tracking-uri: got http://<secret>@127.0.0.1:9, where no server answers (Connection refused)" in done.stderr
    )
    assert "Traceback" not in done.stderr and "CANARY" not in done.stderr + done.stdout
