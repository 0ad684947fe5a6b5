"""A single run from the command line: what it shows, how it ends, and that it destroys nothing."""

import subprocess
import sys
from pathlib import Path

import llmexp
from tests.engines.test_endpoint import SMALL
from tests.golden.server import golden_server


def command(folder: Path, url: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    fixed = ["engine=endpoint", f"engine.url={url}", "model=tiny_random", "gpu=cpu", "kv.block_size=16", "tracking=off"]
    run = [*fixed, *SMALL, "workload=unique_prefix", "rounds=1", "max_num_seqs=2", "client.lag_limit_ms=10000"]
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
