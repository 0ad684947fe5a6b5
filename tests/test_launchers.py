"""The same study through launchers that give each job a process of its own, and what is refused there."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from llmexp import interrupt, launchers
from llmexp.analyze.study import from_mlflow, load_study
from llmexp.task import Worker
from tests.family import Command, descendants, left, running
from tests.golden.server import golden_server
from tests.test_study import FEW, in_mlflow, llmexp
from tests.waiting import PATIENCE_S


def base(launcher: str, **settings: object) -> DictConfig:
    return OmegaConf.create({"hydra": {"launcher": {"_target_": f"some.package.{launcher}", **settings}}})


def test_joblib_makes_the_same_study_and_leaves_nothing_behind_when_killed(tmp_path: Path) -> None:
    arguments = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "arm=a,b", "rounds=8", "study.name=s"]
    with golden_server(ttft_s=0.2) as server:
        command = [sys.executable, "-m", "llmexp", "-m", *FEW, f"engine.url={server.url}", *arguments]
        with running(command, tmp_path) as killed:
            killed.comes_to(lambda: any(tmp_path.glob("runs/s/*/requests-1.parquet")))
            family = descendants(killed.process.pid)
        assert family and not left(family, PATIENCE_S)
        done = llmexp(tmp_path, server, *arguments)
    assert done.returncode == 0, done.stderr
    assert "2 runs on 2 engine launches" in done.stderr and "0 complete already" in done.stderr
    study = load_study(tmp_path / "runs" / "s")
    assert [(run.name, run.status, len(run.rounds)) for run in study.runs] == [
        ("arm-a.trial-0", "complete", 8),
        ("arm-b.trial-0", "complete", 8),
    ]
    assert in_mlflow(tmp_path) == [("arm-a.trial-0", "FINISHED"), ("arm-b.trial-0", "FINISHED"), ("s", "FINISHED")]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow_server")
    with socket.socket() as held:  # from others, not from a server that may reuse an address on which none listens
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        place = ["--host", "127.0.0.1", "--port", str(held.getsockname()[1]), "--workers", "1"]
        stores = [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder / 'files'}"]
        command = [sys.executable, "-m", "mlflow", "server", *place, *stores]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            Command(server, folder / "log").comes_to(lambda: "startup complete" in (folder / "log").read_text())
            yield f"http://127.0.0.1:{place[3]}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(PATIENCE_S)


def test_jobs_of_a_scheduler_meet_on_a_tracking_server(mlflow_server: str, tmp_path: Path) -> None:
    arguments = ["hydra/launcher=submitit_local", "arm=a,b", "engine.model=golden,gilded", "study.name=s"]
    with golden_server(ttft_s=0.05) as server:
        done = llmexp(tmp_path, server, *arguments, f"tracking.uri={mlflow_server}")
    assert done.returncode == 1
    assert "failed: arm-b.engine_model-gilded.trial-0: engine.model: got 'gilded'" in done.stderr
    assert "2 of 4 runs failed" in done.stderr
    assert not list(tmp_path.glob(".submitit")) and not (tmp_path / "mlruns").exists()
    here = load_study(tmp_path / "runs" / "s")
    there = from_mlflow("llmexp", mlflow_server, folder=tmp_path / "fetched")
    assert there.record == here.record
    assert there.compare().rows == here.compare().rows
    assert len(here.compare().pairings) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arm=a,b"], "tracking.uri: got null; LocalLauncher may run jobs on other hosts"),
        (["arm=a,b", "tracking.uri=sqlite:///x.db"], "cannot share a SQLite store: start `mlflow server`"),
        (["arm=a,b", "gpu=auto", "tracking=off"], "gpu: got auto; LocalLauncher may run jobs on other hosts"),
    ],
)
def test_what_other_hosts_cannot_take_part_in_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    with golden_server() as server:
        refused = llmexp(tmp_path, server, "hydra/launcher=submitit_local", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_job_has_the_studys_variables_not_its_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(interrupt, "install", lambda: None)  # not in the tests' own process
    worker = launchers.worker_of("LocalLauncher")
    assert worker.owner is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    worker.set_up()
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["MKL_NUM_THREADS"] == "7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in launchers.worker_of("RayLauncher").environment
    assert launchers.worker_of("JoblibLauncher").owner == os.getpid()
    Worker({"OMP_NUM_THREADS": "4"}, None).set_up()
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_a_scheduler_is_asked_for_the_gpus_that_the_runs_need() -> None:
    assert launchers.with_gpus(base("RayLauncher", ray={"remote": {}}), 2).hydra.launcher.ray.remote.num_gpus == 2
    assert launchers.with_gpus(base("SlurmLauncher", gpus_per_node=None), 2).hydra.launcher.gpus_per_node == 2


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (base("SlurmLauncher", gpus_per_node=8), 2),
        (base("SlurmLauncher", gpus_per_node=None, gres="gpu:1"), 2),
        (base("SlurmLauncher", gpus_per_node=None), 0),
        (base("RayLauncher", ray={"remote": {"num_gpus": 1}}), 2),
        (base("JoblibLauncher", n_jobs=2), 2),
    ],
)
def test_what_a_launcher_was_told_of_gpus_stands(config: DictConfig, count: int) -> None:
    assert launchers.with_gpus(config, count) == config
