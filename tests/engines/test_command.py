"""The command on a real vLLM with a tiny random model: a study, its repetition, and Ctrl-C."""

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import llmexp
from llmexp import tracking
from llmexp.schema.config import TrackingConfig
from tests.engines.test_runs import SMALL
from tests.family import descendants, left, running


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The README's study, reduced."""
    folder = tmp_path_factory.mktemp("study")
    command = [sys.executable, "-m", "llmexp", "-m", "cache=on,off", *SMALL, "workload.order=grouped,shuffled"]
    return folder, subprocess.run([*command, "study.name=s"], cwd=folder, capture_output=True, text=True)


def test_a_study_pairs_its_arms_and_prints_them(study: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = study
    assert done.returncode == 0, done.stderr
    assert "4 runs on 2 engine launches" in done.stderr
    assert max(len(line) for line in done.stderr.splitlines() if "→" in line) <= 100
    assert "not replicated" in done.stderr
    assert "mlflow ui" in done.stderr
    (effect,) = [
        row
        for row in llmexp.load_study(folder / "runs" / "s").compare().rows
        if row.measure == "observed_hit_tokens" and row.cell["workload.order"] == "shuffled"
    ]
    assert effect.estimate == 896
    assert len(list((folder / "runs" / "s").glob("*/summary.json"))) == 4


def test_a_complete_study_is_not_repeated_and_another_engine_is_not_mixed_in(
    study: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = study
    command = [sys.executable, "-m", "llmexp", "-m", "cache=on,off", *SMALL, "workload.order=grouped,shuffled"]
    again = subprocess.run([*command, "study.name=s"], cwd=folder, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "4 complete already" in again.stderr
    assert "engine vllm_server" not in again.stderr
    changed = subprocess.run([*command, "study.name=s", "rounds=3"], cwd=folder, capture_output=True, text=True)
    assert changed.returncode == 2
    assert "config.rounds: 2 -> 3" in changed.stderr


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130)])
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(how: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", *SMALL, "rounds=1000"]
    with running(command, tmp_path) as study:
        study.comes_to(lambda: "round 3 of" in study.said)
        family = descendants(study.process.pid)
        assert family
        study.process.send_signal(how)
        assert study.process.wait() == code
        assert not left(family, within_s=0)
    assert "llmexp: interrupted; what was measured is kept: " in study.said
    (folder,) = (tmp_path / "runs").glob("*/cache-*")
    killed = llmexp.load_run(folder)
    assert killed.status == "killed"
    assert len(killed.rounds) >= 2
    assert pq.read_metadata(folder / "requests.parquet").num_rows >= 8 * len(killed.rounds)
    client, experiment = tracking.open_store(TrackingConfig(dir=str(tmp_path / "mlruns")))
    assert [item.info.status for item in client.search_runs([experiment])] == ["KILLED"]
