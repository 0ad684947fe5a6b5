"""Studies read back from a folder and from MLflow."""

import shutil
import tempfile
from pathlib import Path

import pytest
from mlflow import MlflowClient

from llmexp.analyze.study import Study, from_mlflow, load_study
from llmexp.errors import ResultError
from llmexp.report.command import report
from llmexp.results import CONFIG, WORKLOAD, load_study_record, save_study
from llmexp.run_lock import alone
from llmexp.schema.study import Claim
from tests.analyze.synthetic import make_study


def test_a_study_says_what_it_was_asked(tmp_path: Path) -> None:
    claims = [Claim(measure="ttft_ms_p50", direction="lower", cell={"n": "8"})]
    record = make_study(tmp_path / "s", cells=[{"n": "8"}], trials=2, requests=8, claims=claims)
    assert load_study_record(tmp_path / "s") == record
    study = load_study(tmp_path / "s")
    assert study.record == record
    assert [run.name for run in study.runs] == [plan.name for plan in record.runs]


def test_one_line_a_run(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", cells=[{"n": "8"}], trials=2, requests=8)
    (tmp_path / "s" / record.runs[0].name / "summary.json").write_text("{}")
    study = load_study(tmp_path / "s")
    table = study.to_pandas()
    assert list(table["run"]) == [plan.name for plan in record.runs[1:]]
    assert {"cache", "n", "trial", "used", "ttft_ms_p50", "throughput_req_per_s"} <= set(table.columns)
    assert "not a run summary" in study.missing[record.runs[0].name]


def test_a_study_that_is_still_being_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = make_study(tmp_path / "s", trials=2, requests=8)
    last, before = (tmp_path / "s" / plan.name for plan in record.runs[:-3:-1])
    (last / "summary.json").unlink()
    shutil.rmtree(before)
    with alone(last):
        assert load_study(tmp_path / "s").missing == {before.name: "not run", last.name: "being made at the moment"}
        report([str(tmp_path / "s")])
    assert "This study is still being made: 2 of 4 runs are there." in capsys.readouterr().out
    assert "being made at the moment" in (tmp_path / "s" / "report.md").read_text()
    assert "no summary.json" in load_study(tmp_path / "s").missing[last.name]
    report([str(tmp_path / "s")])
    assert "still being made" not in capsys.readouterr().out


def test_folders_that_hold_no_study(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no such folder"):
        load_study(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultError, match=r"no study.json here; run a study first"):
        load_study(tmp_path / "empty")
    record = make_study(tmp_path / "s", trials=1, requests=8)
    with pytest.raises(ResultError, match="single run; give the folder of its study"):
        load_study(tmp_path / "s" / record.runs[0].name)
    with pytest.raises(ResultError, match=r"the studies below it are .*s"):
        load_study(tmp_path)
    (tmp_path / "s" / "study.json").write_text('{"name": 3}')
    with pytest.raises(ResultError, match="not a study's record"):
        load_study(tmp_path / "s")


def test_a_study_none_of_whose_runs_has_ended(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, requests=8)
    for plan in record.runs:
        shutil.rmtree(tmp_path / "s" / plan.name)
    with pytest.raises(ResultError, match=r"none of the 2 planned runs .* start the study again"):
        load_study(tmp_path / "s")
    with alone(tmp_path / "s" / record.runs[0].name), pytest.raises(ResultError, match="the first is still being made"):
        load_study(tmp_path / "s")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, str]:
    """A study in a folder, and the tracking URI of a store that holds the same with one run repeated."""
    root = tmp_path_factory.mktemp("mlflow")
    record = make_study(root / "mine", trials=3, requests=24)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("llmexp", (root / "artifacts").as_uri())

    def log(name: str, tags: dict[str, str], folder: Path) -> str:
        run_id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            client.log_artifact(run_id, str(file))
        return str(run_id)

    parent = log("mine", {"llmexp.kind": "study"}, root / "mine")
    for plan in [record.runs[0], *record.runs]:
        folder = root / "mine" / plan.name
        (folder / CONFIG).write_text("cache: {}\n")
        (folder / WORKLOAD).write_text("{}")
        log(plan.name, {"llmexp.kind": "run", "mlflow.parentRunId": parent}, folder)
    return load_study(root / "mine"), uri


def test_mlflow_alone_gives_the_same_study(tracked: tuple[Study, str], tmp_path: Path) -> None:
    study, uri = tracked
    found = from_mlflow("llmexp", uri, folder=tmp_path)
    assert found.record == study.record
    assert found.missing == {}
    assert found.compare().rows == study.compare().rows
    assert found.runs[0].trace() == study.runs[0].trace()
    assert found.folder == tmp_path / "mine"


def test_the_report_of_a_study_in_mlflow_leaves_and_names_no_other_folder(
    tracked: tuple[Study, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, uri = tracked
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    report(["--mlflow-experiment", "llmexp", "--tracking-uri", uri, "--compare", "cache"])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["reports", "temporary"]
    assert not list((tmp_path / "temporary").iterdir())
    written = tmp_path / "reports" / "mine" / "by-cache" / "report.md"
    said = capsys.readouterr().out + "".join(file.read_text() for file in written.parent.glob("report.*"))
    assert "Report: reports/mine/by-cache/report.md" in said and "temporary" not in said
    assert f"llmexp report --mlflow-experiment llmexp --study mine --tracking-uri {uri}\n" in written.read_text()

    unreadable = tmp_path / "unreadable"
    unreadable.mkdir()
    (unreadable / "study.json").write_text("{")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("llmexp").experiment_id
    second = client.create_run(experiment, run_name="broken", tags={"llmexp.kind": "study"}).info.run_id
    client.log_artifact(second, str(unreadable / "study.json"))
    with pytest.raises(ResultError, match=r"^MLflow's artifacts/broken/study.json: not a study's record"):
        report(["--mlflow-experiment", "llmexp", "--study", "broken", "--tracking-uri", uri])
    client.delete_run(second)


def test_mlflow_without_the_study(tracked: tuple[Study, str]) -> None:
    study, uri = tracked
    with pytest.raises(ResultError, match=r"no experiment other \(experiments: .*llmexp"):
        from_mlflow("other", uri)
    with pytest.raises(ResultError, match=r"no study yours \(studies: mine\)"):
        from_mlflow("llmexp", uri, study="yours")
    with pytest.raises(ResultError, match="holds no study"):
        from_mlflow("Default", uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("llmexp").experiment_id
    second = client.create_run(experiment, run_name="second", tags={"llmexp.kind": "study"}).info.run_id
    with pytest.raises(ResultError, match=r"2 studies.*\(studies: second, mine\)"):
        from_mlflow("llmexp", uri)
    assert from_mlflow("llmexp", uri, study="mine").record == study.record
    client.delete_run(second)


def test_a_run_that_never_reached_mlflow_is_missing(tracked: tuple[Study, str], tmp_path: Path) -> None:
    study, uri = tracked
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("llmexp").experiment_id
    more = study.record.model_copy(
        update={"runs": (*study.record.runs, study.record.runs[0].model_copy(update={"name": "late", "trial": 3}))}
    )
    save_study(more, tmp_path)
    (parent,) = client.search_runs([experiment], "tags.`llmexp.kind` = 'study'")
    client.log_artifact(parent.info.run_id, str(tmp_path / "study.json"))
    found = from_mlflow("llmexp", uri)
    assert found.missing == {"late": "not run, or not logged to MLflow"}
    assert [one.kind for one in found.excluded] == ["missing"]
