"""Studies on a real vLLM, killed with SIGKILL and started again: nothing is left behind, nothing is there twice."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llmexp import tracking
from llmexp.analyze.study import load_study
from llmexp.engines import devices
from llmexp.schema.config import TrackingConfig
from tests.engines.test_runs import SMALL
from tests.family import alive, descendants, left, running

STUDY = ["arm=a,b", "study.trials=2", "study.name=s", *SMALL, "rounds=3", "engine.stop_timeout_s=2"]
COMMAND = [sys.executable, "-m", "llmexp", "-m", *STUDY]


def kill_once(folder: Path, ripe: Callable[[], bool]) -> None:
    """Starts the study, kills it as soon as it is `ripe`, and waits for the last of its processes."""
    with running(COMMAND, folder) as study:
        study.comes_to(ripe)
        study.process.send_signal(signal.SIGSTOP)  # it comes no further while its family is listed
        family = descendants(study.process.pid)
        study.process.kill()
        study.process.wait()
        assert family
        assert not left(family, within_s=60)


def test_a_study_killed_at_the_start_of_an_engine_and_in_a_round_ends_as_if_undisturbed(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "s"

    def engine_starts() -> bool:
        return any("Initializing a V1" in log.read_text() for log in runs.glob("*/engine.log"))

    def in_second_run() -> bool:
        ended = {path.parent for path in runs.glob("*/summary.json")}
        return len(ended) == 1 and any(part.parent not in ended for part in runs.glob("*/requests-*.parquet"))

    kill_once(tmp_path, engine_starts)
    kill_once(tmp_path, in_second_run)
    with running(COMMAND, tmp_path) as study:
        assert study.process.wait() == 0, study.said
    said = study.said
    assert "0 complete already, 1 broken or cut off, to be made again" in said
    assert "1 complete already, 1 broken or cut off, to be made again" in said
    done = load_study(runs)
    names = [f"arm-{arm}.trial-{trial}" for trial, arm in ((0, "a"), (0, "b"), (1, "b"), (1, "a"))]
    assert [run.name for run in done.runs] == names
    assert all(run.valid for run in done.runs), done.excluded
    assert [len(run.rounds) for run in done.runs] == [3] * 4
    assert done.runs[2].engine["reused"] is False and done.runs[3].engine["reused"] is True
    client, experiment = tracking.open_store(TrackingConfig(dir=str(tmp_path / "mlruns")))
    shown = client.search_runs([experiment])
    assert sorted(run.info.run_name for run in shown) == sorted([*names, "s"])
    assert {run.info.status for run in shown} == {"FINISHED"}
    (parent,) = (run.info.run_id for run in shown if run.info.run_name == "s")
    assert {run.data.tags.get("mlflow.parentRunId") for run in shown} == {parent, None}


OWNER = """
import os, sys, time
from pathlib import Path
from llmexp.engines import devices, process
devices._LOCKS = Path(sys.argv[1]).parent
deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
with devices.claim("cpu", 1, 0.0) as held:
    process.start([sys.executable, "-c", deaf], os.environ, Path(sys.argv[1]), 2.0, locks=held.locks)
    time.sleep(600)
"""


def test_a_device_is_not_free_before_the_engine_of_a_killed_owner_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_LOCKS", tmp_path)
    log = tmp_path / "log"
    with running([sys.executable, "-c", OWNER, str(log)], tmp_path) as owner:
        owner.comes_to(lambda: log.exists() and log.read_text().endswith("\n"))
        engine = psutil.Process(int(log.read_text()))
        owner.process.kill()
        owner.process.wait()
        with devices.claim("cpu", 1, 60.0):
            assert not alive(engine)
