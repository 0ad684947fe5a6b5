"""What `llmexp doctor` finds, how it says it, and that it closes what dead processes have left open."""

import errno
import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp import doctor, liveness, tracking
from llmexp.client import journal, spill
from llmexp.client.call import Call
from llmexp.client.gather import gather
from llmexp.client.ledger import Ledger
from llmexp.compose import compose
from llmexp.doctor import Finding
from llmexp.errors import StorageError
from llmexp.schema.config import Config


def config(folder: Path, *overrides: str) -> Config:
    places = [f"runs_dir={folder / 'runs'}", f"tracking.dir={folder / 'mlruns'}"]
    return compose(["model=tiny_random", "gpu=cpu", *places, *overrides])


def found(settings: Config, mend: bool = False) -> dict[str, Finding]:
    return {finding.what: finding for finding in doctor.findings(settings, mend)}


def mark_of_a_dead_process() -> str:
    script = "from llmexp.liveness import mark; print(mark())"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_a_machine_without_a_gpu_is_told_in_a_table_that_fits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "doctor", "model=tiny_random", f"runs_dir={tmp_path / 'runs'}"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told.returncode in (0, 1), told.stderr
    assert max(map(len, told.stdout.splitlines())) <= 100
    for what in ("GPU", "vLLM", "model tiny_random", "loopback", "runs_dir", "MLflow store", "engines left over"):
        assert what in told.stdout
    assert told.returncode == int(any(line.startswith("fail") for line in told.stdout.splitlines()))
    assert not (tmp_path / "runs").exists() and not (tmp_path / "mlruns").exists(), "it only looks"


def test_a_dead_process_is_told_from_a_living_one_and_from_one_elsewhere() -> None:
    own = liveness.mark()
    assert liveness.is_gone(own) is False
    assert liveness.is_gone(mark_of_a_dead_process()) is True
    host, boot, namespace, pid, began = own.split()
    assert liveness.is_gone(f"{host} {boot} {namespace} {pid} {int(began) - 1}") is True, "its PID is another's by now"
    assert liveness.is_gone(f"{host} another-boot {namespace} {pid} {began}") is True
    assert liveness.is_gone(f"elsewhere {boot} {namespace} {pid} {began}") is None
    assert liveness.is_gone(f"{host} {boot} pid:[1] {pid} {began}") is None
    assert liveness.is_gone("") is None


def test_what_clients_had_measured_that_were_killed_with_their_parents_is_brought_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, settings = mark_of_a_dead_process(), config(tmp_path)
    for name in ("cut-off", "begun-again"):
        run = tmp_path / "runs" / "s" / name
        run.mkdir(parents=True)
        path = journal.make_folder() / "journal-0"
        ledger = Ledger()
        ledger.add(Call(0, 0.0, 0.0, sent=1.0, end=2.0))
        with closing(journal.Journal(path)) as kept:
            kept.append(journal.Heading(run / "requests-0.parquet", 0, 0, 0.0, (dead, dead)))
            kept.append(ledger.drain())
        (run / "config.yaml").write_text("")
        os.utime(run / "config.yaml", (path.stat().st_mtime + (1 if name == "begun-again" else -1),) * 2)
    told = [finding for finding in doctor.findings(settings) if finding.what == "requests left over"]
    assert [finding.state for finding in told] == ["warn"] and told[0].found.startswith("1 request of ")
    told = [finding for finding in doctor.findings(settings, mend=True) if finding.what == "requests left over"]
    assert [finding.state for finding in told] == ["ok"]
    assert [path.parent.name for path in (tmp_path / "runs").rglob("*.parquet")] == ["cut-off"]
    assert not list(tmp_path.glob("llmexp-client-*"))


def test_a_trace_that_a_full_disk_refused_is_brought_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings, run = config(tmp_path), tmp_path / "runs" / "s" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    os.utime(run / "config.yaml", (0, 0))
    ledger = Ledger()
    ledger.add(Call(0, 0.0, 0.0, sent=1.0, end=2.0))
    trace = gather({0: ledger.drain()}, round_index=0, origin=0.0)
    put = spill._put

    def refuse(trace: pa.Table, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def told(mend: bool = False) -> list[Finding]:
        return [finding for finding in doctor.findings(settings, mend) if finding.what == "requests left over"]

    def refused() -> None:
        monkeypatch.setattr(spill, "_put", refuse)
        with pytest.raises(StorageError):
            spill.write(trace, run / "requests.parquet")

    refused()
    assert [finding.state for finding in told()] == ["warn"]
    (failed,) = told(mend=True)
    assert failed.state == "fail" and "No space left on device" in failed.found
    monkeypatch.setattr(spill, "_put", put)
    (brought,) = told(mend=True)
    assert brought.state == "ok" and brought.found.startswith(f"1 request of {run}, in ")
    assert pq.read_table(run / "requests.parquet").equals(trace)
    refused()
    os.utime(run / "config.yaml", (2**31, 2**31))  # the run is begun again
    assert not told() and not told(mend=True)
    assert not list(tmp_path.glob("llmexp-saved-*"))


def test_runs_of_dead_processes_are_listed_and_closed_others_left_alone(tmp_path: Path) -> None:
    settings = config(tmp_path)
    runs = {}
    for name in ("dead", "alive", "elsewhere"):
        runs[name] = tracking.start_run(settings, "s", name)
    tracking.set_tags(runs["dead"], {"llmexp.process": mark_of_a_dead_process()})
    tracking.set_tags(runs["elsewhere"], {"llmexp.process": "elsewhere b n 1 2"})
    listed = [finding for finding in doctor.findings(settings) if finding.what == "MLflow runs"]
    assert [(finding.state, finding.found) for finding in listed] == [
        ("warn", "1 shown as running, of a process that has ended: s/dead"),
        ("warn", "1 shown as running, of a process of another machine or container: s/elsewhere"),
        ("ok", "1 under way"),
    ]
    assert "--mend" in listed[0].mend
    found(settings, mend=True)
    states = {name: run.client.get_run(run.run_id) for name, run in runs.items()}
    assert {name: run.info.status for name, run in states.items()} == {
        "dead": "KILLED",
        "alive": "RUNNING",
        "elsewhere": "RUNNING",
    }
    assert "its process ended without a word" in states["dead"].data.tags["llmexp.invalid_reasons"]
    assert states["dead"].data.tags["llmexp.valid"] == "false"


def test_a_study_that_was_closed_is_named_with_how_to_tell_the_rest(tmp_path: Path) -> None:
    settings = config(tmp_path)
    names = ("there", "gone")
    for study in [tracking.start_study(settings.tracking, tmp_path / name, name, name, "x") for name in names]:
        tracking.set_tags(study, {"llmexp.process": mark_of_a_dead_process()})
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "study.json").touch()
    closed = next(finding for finding in doctor.findings(settings, mend=True) if finding.what == "MLflow runs")
    assert closed.found == "2 of processes that have ended: closed"
    assert closed.mend == f"llmexp log {tmp_path / 'there'} tells what it lacks"


def test_a_locked_store_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    settings = config(tmp_path)
    tracking.open_store(settings.tracking)
    other = sqlite3.connect(tmp_path / "mlruns" / "mlflow.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        store = found(settings)["MLflow store"]
    finally:
        other.close()
    assert store.state == "fail" and "locked" in store.found and "fuser" in store.mend


def test_a_server_that_is_not_there_is_a_failure_and_what_to_do_stands_beside_it(tmp_path: Path) -> None:
    store = found(config(tmp_path, "tracking.uri=http://127.0.0.1:9"))["MLflow store"]
    assert store.state == "fail"
    assert store.found == "tracking.uri: got http://127.0.0.1:9, where no server answers (Connection refused)"
    assert store.mend.startswith("start it, name another")


def test_what_cannot_be_written_or_had_fails_with_its_mend(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    looked = found(config(tmp_path, f"runs_dir={file}", "tracking=off", "engine.python=/no/such/python"))
    assert looked["runs_dir"].state == "fail" and "runs_dir=" in looked["runs_dir"].mend
    assert looked["vLLM"].state == "fail" and "/no/such/python" in looked["vLLM"].found
    assert "MLflow store" not in looked


def test_an_engine_whose_keeper_is_gone_is_shown_with_how_to_end_it() -> None:
    """A group without its leader, as the kill of a keeper leaves it."""
    leader = (
        "import subprocess, sys; "
        "engine = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', 'EngineCore']); "
        "print(engine.pid, flush=True)"
    )
    keeper = subprocess.Popen([sys.executable, "-c", leader], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert keeper.stdout is not None
    engine = int(keeper.stdout.readline())
    keeper.wait()
    try:
        (shown,) = [one for one in doctor._left_over() if f" {engine}," in one.found]
        assert shown.mend == f"kill -KILL -- -{keeper.pid}"
    finally:
        os.kill(engine, 9)


def test_a_wrong_override_is_refused_as_for_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "doctor", "modle=tiny_random"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "did you mean model" in refused.stderr
