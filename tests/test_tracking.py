"""What MLflow holds: one store for many processes, one parent a study, one child a run, nothing twice."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmexp import tracking
from llmexp.client.records import TRACE_SCHEMA
from llmexp.compose import compose
from llmexp.errors import ConfigError, TrackingError
from llmexp.results import RoundResult, RunResult, load_run, save_run
from llmexp.schema.config import Config, TrackingConfig
from tests.test_doctor import mark_of_a_dead_process


def config(folder: Path, *overrides: str) -> Config:
    return compose(["model=tiny_random", "gpu=cpu", f"tracking.dir={folder / 'mlruns'}", *overrides])


def result(folder: Path, settings: Config, **changes: object) -> RunResult:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(TRACE_SCHEMA.empty_table(), folder / "requests.parquet")
    rounds = tuple(
        RoundResult(
            index=index,
            valid=index == 0,
            invalid_reasons=() if index == 0 else ("contract_broken: 1 hit token counted, exactly 0 expected",),
            measures={"throughput_req_per_s": 10.0 + index},
            percentiles={},
            contract={"expected_hit_tokens": 0},
            client={},
        )
        for index in range(2)
    )
    values: dict[str, object] = {
        "study": "s",
        "name": "cache-on.trial-0",
        "folder": folder,
        "status": "complete",
        "valid": False,
        "invalid_reasons": ("round 1: contract_broken: 1 hit token counted, exactly 0 expected",),
        "simulated": False,
        "arm": "on",
        "cell": {},
        "trial": 0,
        "position": 0,
        "seed": 0,
        "fingerprint": "f",
        "workload_sha256": "w",
        "measures": {"throughput_req_per_s": 10.0},
        "percentiles": {
            "ttft_ms_p50": {"value": 12.5, "low": 10, "high": 15, "n": 16},
            "ttft_ms_p99": {"value": None, "low": None, "high": None, "n": 16},
        },
        "rounds": rounds,
        "engine": {},
        "environment": {},
        "timings_s": {"engine_start": 1.5},
        "config": settings.model_dump(mode="json"),
    }
    run = RunResult.model_validate({**values, **changes})
    save_run(run)
    return run


def test_a_study_and_its_run_as_mlflow_shows_them(tmp_path: Path) -> None:
    settings = config(tmp_path, "cache=salted", "max_num_seqs=4", "workload.num_requests=3")
    parent = tracking.start_study(settings.tracking, tmp_path, "s", "id", "cache=on,off")
    child_settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"parent_run_id": parent.run_id})}
    )
    child = tracking.start_run(child_settings, "s", "cache-on.trial-0")
    tracking.finish_run(child, result(tmp_path / "run", settings, environment={"variables": {"OMP_NUM_THREADS": "4"}}))
    study_folder = tmp_path / "study"
    study_folder.mkdir()
    (study_folder / "report.md").write_text("# report")
    (study_folder / "figures").mkdir()
    (study_folder / "figures" / "effect.png").touch()
    tracking.finish_study(parent, "complete", "| a | b |", study_folder, 1.7e9)

    client = parent.client
    shown = client.get_run(child.run_id)
    assert shown.info.status == "FINISHED"
    assert shown.data.tags["mlflow.parentRunId"] == parent.run_id
    assert shown.data.tags["llmexp.valid"] == "false"
    assert "contract_broken" in shown.data.tags["llmexp.invalid_reasons"]
    assert shown.data.tags["env.OMP_NUM_THREADS"] == "4"
    params = shown.data.params
    assert params["cache"] == "salted" and params["max_num_seqs"] == "4" and params["workload.num_requests"] == "3"
    assert not [key for key, value in params.items() if value == "None"]
    assert shown.data.metrics["throughput_req_per_s"] == 10.0
    assert shown.data.metrics["ttft_ms_p50"] == 12.5
    assert "ttft_ms_p99" not in shown.data.metrics, "the sample does not support it"
    history = client.get_metric_history(child.run_id, "round/throughput_req_per_s")
    assert [(point.step, point.value) for point in history] == [(0, 10.0), (1, 11.0)]
    names = {file.path for file in client.list_artifacts(child.run_id)}
    assert {"summary.json", "requests.parquet"} <= names
    fetched = client.download_artifacts(child.run_id, "summary.json", str(tmp_path))
    assert load_run(Path(fetched).parent).arm == "on"
    assert [file.path for file in client.list_artifacts(parent.run_id, "figures")] == ["figures/effect.png"]
    assert client.get_run(parent.run_id).data.tags["mlflow.note.content"] == "| a | b |"
    assert str(tmp_path / "mlruns" / "artifacts") in client.get_run(child.run_id).info.artifact_uri


@pytest.mark.parametrize(("status", "shown"), [("failed", "FAILED"), ("killed", "KILLED")])
def test_a_run_that_did_not_complete_is_closed_as_such(status: str, shown: str, tmp_path: Path) -> None:
    settings = config(tmp_path)
    run = tracking.start_run(settings, "s", "r")
    tracking.finish_run(run, result(tmp_path / "run", settings, status=status, rounds=(), measures={}))
    assert run.client.get_run(run.run_id).info.status == shown


def test_a_resumed_study_keeps_its_parent_and_replaces_its_broken_child(tmp_path: Path) -> None:
    settings = config(tmp_path)
    first = tracking.start_study(settings.tracking, tmp_path, "s", "id", "x")
    child_settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"parent_run_id": first.run_id})}
    )
    killed = tracking.start_run(child_settings, "s", "r")
    again = tracking.start_study(settings.tracking, tmp_path, "s", "id", "x")
    assert again.run_id == first.run_id
    assert tracking.start_study(settings.tracking, tmp_path, "s", "of another user", "x").run_id != first.run_id
    repeated = tracking.start_run(child_settings, "s", "r")
    assert repeated.run_id != killed.run_id
    found = first.client.search_runs([first.client.get_run(first.run_id).info.experiment_id])
    assert {run.info.run_id for run in found} >= {first.run_id, repeated.run_id} and len(found) == 3


def test_a_study_that_is_told_after_all_says_nothing_of_its_earlier_end(tmp_path: Path) -> None:
    """Its process ended while MLflow was away; it was closed as killed, and logged from its folder later."""
    settings = config(tmp_path)
    study = tracking.start_study(settings.tracking, tmp_path, "s", "id", "x")
    tracking.set_tags(study, {"llmexp.process": mark_of_a_dead_process()})
    client, experiment = tracking.open_store(settings.tracking)
    assert [(run.kind, run.folder) for run in tracking.mend(client, experiment)] == [("study", str(tmp_path))]
    closed = client.get_run(study.run_id)
    assert closed.info.status == "KILLED" and "without a word" in closed.data.tags["llmexp.invalid_reasons"]

    told = tracking.start_study(settings.tracking, tmp_path, "s", "id", "x")
    (tmp_path / "study").mkdir()
    tracking.finish_study(told, "complete", "| a | b |", tmp_path / "study", 1.7e9)
    shown = client.get_run(study.run_id)
    assert told.run_id == study.run_id and shown.info.status == "FINISHED"
    assert not {"llmexp.valid", "llmexp.invalid_reasons"} & shown.data.tags.keys()


def test_processes_share_a_fresh_store(tmp_path: Path) -> None:
    script = (
        "import sys; from llmexp import tracking; from llmexp.schema.config import TrackingConfig\n"
        "client, experiment = tracking.open_store(TrackingConfig(dir=sys.argv[1]))\n"
        "client.create_run(experiment); print(experiment)"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {process.communicate()[0] for process in crowd}
    assert [process.returncode for process in crowd] == [0] * 4
    assert len(said) == 1
    client, experiment = tracking.open_store(config(tmp_path).tracking.model_copy(update={"dir": str(tmp_path)}))
    assert len(client.search_runs([experiment])) == 4


def test_two_processes_that_make_an_experiment_at_once_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server, where no lock of ours keeps the other off."""
    from mlflow import MlflowClient

    settings = TrackingConfig(uri=tracking.store_uri(config(tmp_path).tracking), experiment="new")
    tracking.open_store(config(tmp_path).tracking)
    create, made = MlflowClient.create_experiment, []

    def a_moment_late(client: MlflowClient, name: str, *more: object, **options: object) -> str:
        made.append(create(client, name, *more, **options))
        return create(client, name, *more, **options)

    monkeypatch.setattr(MlflowClient, "create_experiment", a_moment_late)
    _, experiment = tracking.open_store(settings)
    assert made == [experiment]


@pytest.mark.parametrize(
    ("version", "taken"), [("2.22.5", False), ("3.9.0", False), ("3.10.0rc1", True), ("4.0", True)]
)
def test_an_mlflow_that_is_too_old_is_refused_before_anything_starts(
    version: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if taken:
        tracking.require_ready(TrackingConfig())
        return
    with pytest.raises(ConfigError, match=f"MLflow {version}; 3.10 or newer is needed"):
        tracking.open_store(TrackingConfig(dir=str(tmp_path / "mlruns")))
    assert not (tmp_path / "mlruns").exists()


def test_a_store_that_cannot_be_written_is_named() -> None:
    settings = compose(["gpu=cpu", "tracking.dir=/proc/nowhere"])
    with pytest.raises(ConfigError, match=r"tracking\.dir: got '/proc/nowhere'"):
        tracking.open_store(settings.tracking)


def test_what_cannot_be_logged_is_told_and_where_it_is_kept(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    with (
        pytest.raises(TrackingError, match=f"{tmp_path} holds all that was measured.*another program locks"),
        tracking.told(tmp_path),
    ):
        raise MlflowException("database is locked")
