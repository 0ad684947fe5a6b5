"""A search as a study: it grows by the values that the search asks for, and goes on where it stopped."""

import json
import subprocess
import sys
from pathlib import Path

from llmexp.analyze.study import load_study
from tests.golden.server import golden_server


def search(folder: Path, url: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "llmexp", "-m",
        "engine=endpoint", f"engine.url={url}", "model=tiny_random", "gpu=cpu", "tracking=off", "rounds=1",
        "kv.block_size=16", "client.lag_limit_ms=10000", f"runs_dir={folder}", "study.name=found",
        "workload=unique_prefix", "workload.num_requests=12", "workload.prefix_tokens=64",
        "workload.suffix_tokens=16", "workload.output_tokens=3",
        "study.search=saturation", "study.search_key=load.concurrency", "study.search_low=1", "study.search_high=4",
        "study.search_resolution=0.5", *more,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_search_is_a_study_that_is_resumed_without_asking_again(tmp_path: Path) -> None:
    # The server takes 140 ms whatever its load, so that throughput rises in proportion to what is in flight.
    with golden_server(ttft_s=0.1, itl_s=0.02) as server:
        first = search(tmp_path, server.url)
        assert first.returncode == 0, first.stderr
        assert "1 engine launch took" in first.stderr  # the values of a search share an engine where they can
        sent = len(server.seen)
        again = search(tmp_path, server.url)
        assert again.returncode == 0, again.stderr
        assert len(server.seen) == sent  # nothing is measured twice
    assert "throughput still rises at load.concurrency=4" in first.stderr
    found = json.loads((tmp_path / "found" / "search.json").read_text())
    assert (found["knee"], found["best"], found["falls"], found["slo_limit"]) == (4, 4, False, None)
    study = load_study(tmp_path / "found")
    assert study.record.compare == "load.concurrency"
    assert set(study.record.arms) == {"1", "2", "4"}
    assert study.search is not None and study.search.found in (tmp_path / "found" / "report.md").read_text()
    assert all(run.valid for run in study.runs) and not study.missing


def test_repeats_of_a_search_share_an_engine_within_their_trial(tmp_path: Path) -> None:
    with golden_server(ttft_s=0.1, itl_s=0.02) as server:
        made = search(tmp_path, server.url, "study.trials=3")
    assert made.returncode == 0, made.stderr
    assert "3 engine launches took" in made.stderr  # not one for each of the nine runs
    study = load_study(tmp_path / "found")
    assert not study.missing
    assert sorted((run.trial, run.arm) for run in study.record.runs) == [
        (trial, arm) for trial in range(3) for arm in ("1", "2", "4")
    ]
    assert study.search is not None and study.search.knee == 4


def test_a_search_goes_on_from_its_valid_runs_and_says_where_there_are_none(tmp_path: Path) -> None:
    with golden_server(ttft_s=0.1, itl_s=0.02) as server:
        assert search(tmp_path, server.url).returncode == 0
        summary = tmp_path / "found" / "load_concurrency-2.trial-0" / "summary.json"
        late = json.loads(summary.read_text()) | {"valid": False, "invalid_reasons": ["client_saturated: late"]}
        summary.write_text(json.dumps(late))
        alone = search(tmp_path, server.url)
        repeated = search(tmp_path, server.url, "study.trials=2")
    assert alone.returncode == 1
    assert "the search was given up: load.concurrency=2 has no valid run" in alone.stderr
    assert "client_saturated: late" in alone.stderr and "take more trials" in alone.stderr
    assert repeated.returncode == 0, repeated.stderr
    assert "throughput still rises at load.concurrency=4" in repeated.stderr
