"""A single run from the command line: what it shows, how it ends, and that it destroys nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llmexp
from llmexp.__main__ import main
from llmexp.errors import ConfigError
from llmexp.report.command import report
from tests.analyze.synthetic import make_study
from tests.engines.test_endpoint import SMALL
from tests.family import running
from tests.golden.server import golden_server
from tests.waiting import PATIENCE_S


def command(folder: Path, url: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    fixed = ["engine=endpoint", f"engine.url={url}", "model=tiny_random", "gpu=cpu", "kv.block_size=16", "tracking=off"]
    run = [*fixed, *SMALL, "workload=unique_prefix", "rounds=1", "max_num_seqs=4", "client.lag_limit_ms=10000"]
    return subprocess.run(
        [sys.executable, "-m", "llmexp", *run, "study.name=s", *overrides], cwd=folder, capture_output=True, text=True
    )


def test_a_valid_run_shows_its_measures_and_is_not_overwritten(tmp_path: Path) -> None:
    with golden_server(cached_tokens=0, ttft_s=0.1, itl_s=0.02) as server:
        done = command(tmp_path, server.url)
        assert done.returncode == 0, done.stdout + done.stderr
        again = command(tmp_path, server.url)
    (folder,) = (tmp_path / "runs" / "s").glob("cache-on*")
    assert "throughput_req_per_s" in done.stdout
    assert "valid: every rule" in done.stdout
    assert str(folder) in done.stdout
    assert max(map(len, done.stdout.splitlines()[:18])) <= 100
    assert again.returncode == 2
    assert "has a complete run" in again.stderr
    assert llmexp.load_run(folder).valid, "the first run is as it was"


def test_a_run_that_is_not_valid_says_why_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    with golden_server(cached_tokens=16, ttft_s=0.1, itl_s=0.02) as server:
        done = command(tmp_path, server.url)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "NOT VALID:" in done.stdout
    assert "contract_broken" in done.stdout
    (folder,) = (tmp_path / "runs" / "s").glob("cache-on*")
    shown = subprocess.run(
        [sys.executable, "-m", "llmexp", "report", str(folder)], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "contract_broken" in shown.stdout


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_before_anything_was_measured_says_so(how: signal.Signals, code: int, tmp_path: Path) -> None:
    overrides = ["engine=endpoint", "model=tiny_random", "gpu=cpu", "kv.block_size=16", "tracking=off", *SMALL]
    with golden_server(ttft_s=60.0) as server:
        command = [sys.executable, "-m", "llmexp", f"engine.url={server.url}", *overrides, "study.name=s"]
        with running(command, tmp_path) as run:
            run.comes_to(lambda: bool(server.seen))  # of the warm-up, or the question whether it streams
            run.process.send_signal(how)
            assert run.process.wait(PATIENCE_S) == code
    assert run.said.splitlines()[-1] == "llmexp: interrupted before anything was measured"
    assert "requests.parquet" not in run.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["audit"], "interrupted"), (["cache=on"], "interrupted before anything was measured")],
)
def test_an_interruption_of_what_measures_nothing_leaves_no_traceback(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmexp.auditing.compose", interrupted)
    monkeypatch.setattr("hydra.main", lambda **_: lambda task: interrupted)
    monkeypatch.setattr(sys, "argv", ["llmexp", *arguments])
    monkeypatch.setattr("llmexp.interrupt.install", lambda: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"llmexp: {said}\n"


def test_a_plan_of_a_single_run_and_a_report_without_a_place_are_refused(tmp_path: Path) -> None:
    planned = command(tmp_path, "http://127.0.0.1:1", "study.plan_only=true")
    assert planned.returncode == 2
    assert planned.stderr.splitlines()[-1].startswith("llmexp: study.plan_only: got true")
    assert not (tmp_path / "runs").exists()


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    make_study(tmp_path / "study", trials=1, requests=4)
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(ConfigError, match=r"--out: got .* which is no folder to write to"):
        report([str(tmp_path / "study"), "--out", str(place / "below")])
