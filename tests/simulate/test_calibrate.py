"""A calibration finds the costs and delays that made the recorded times, and says what it lacks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compose import compose
from llmexp.errors import ResultError
from llmexp.execute import run
from llmexp.results import SUMMARY, load_run
from llmexp.simulate import FrontEnd, Request, Settings, StepCost, Work, simulate
from llmexp.simulate.calibrate import durations_s, fit, fit_best, fit_roofline
from llmexp.simulate.calibration import load
from llmexp.simulate.command import calibrate
from llmexp.simulate.errors import CalibrationError
from llmexp.simulate.measured import (
    Recording,
    calibrated,
    device_spans,
    front_end,
    prefill_launches_s,
    recorded_runs,
    timed,
)

COST = StepCost(
    fixed=Work(steps=1e-3, sampled=2e-5),
    compute=Work(prefill_tokens=3e-5, decode_tokens=1e-5, attended_pairs=1e-9),
    memory=Work(steps=4e-3, context_tokens=1e-7),
)


def mixed_work(n: int = 400, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Decode steps, and prefills of all sizes."""
    rng = np.random.default_rng(seed)
    prefill = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 4000, n))
    decode = rng.integers(1, 64, n)
    sampled = decode + (prefill > 0) * rng.integers(0, 3, n)
    context = prefill + decode * rng.integers(100, 4000, n)
    return np.column_stack([np.ones(n, int), prefill, decode, sampled, prefill**2 // 2 + context, context])


def test_a_roofline_is_found_where_one_made_the_times() -> None:
    work = mixed_work()
    seconds = durations_s(COST, work)
    found = fit_roofline(work, seconds)
    assert found is not None
    assert np.allclose(found.residuals_s, 0.0, atol=1e-3 * seconds)
    assert fit_best(work, seconds).cost == found.cost
    assert fit(work, seconds).relative_error > 0.05  # which no sum of terms describes


def test_a_linear_cost_stays_linear() -> None:
    work = mixed_work()
    linear = StepCost(fixed=Work(2e-3, 3e-5, 1e-5, 2e-5, 1e-9, 1e-8))
    assert fit_best(work, durations_s(linear, work)).cost.compute == Work()


def test_hiccups_do_not_move_the_cost() -> None:
    work = mixed_work()
    seconds = durations_s(COST, work)
    seconds[::50] += 1.0
    found = fit_roofline(work, seconds)
    assert found is not None
    assert np.median(np.abs(found.residuals_s) / seconds) < 0.02


@settings(deadline=None, max_examples=10)
@given(request_ms=st.floats(0.3, 3.0), output_ms=st.floats(0.1, 1.0), echo_us=st.floats(0.5, 3.0))
def test_the_front_ends_delays_are_found_in_what_they_caused(
    request_ms: float, output_ms: float, echo_us: float
) -> None:
    truth = FrontEnd(request_s=request_ms / 1e3, output_s=output_ms / 1e3, echo_s=echo_us / 1e6)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            prompt_token_ids=rng.integers(0, 1000, rng.integers(20, 400)),
            output_tokens=int(rng.integers(2, 20)),
            arrival_s=float(rng.uniform(0, 4)),
        )
        for _ in range(240)
    ]
    cost = StepCost(Work(steps=5e-3, prefill_tokens=1e-5))
    result = simulate(requests, Settings(num_gpu_blocks=5000), cost, front_end=truth)
    offsets, times_s = result.token_times_s(delivered=True)
    traced = result.requests.to_pandas()
    traced["first_token_s"], traced["last_token_s"] = times_s[offsets[:-1]], times_s[offsets[1:] - 1]
    traced["engine_first_token_s"] = result.requests["first_token_s"].to_numpy()
    traced["engine_last_token_s"] = traced["finished_s"]
    steps = result.steps.to_pandas()
    run: Any = SimpleNamespace()
    found = front_end([Recording(run, steps.assign(round=0), traced.assign(round=0, error=None))])
    # What one request takes in all, in and out; of when it came, a step of 5 ms hides some.
    assert found.request_s + 200 * found.prompt_token_s == pytest.approx(truth.request_s, rel=0.2)
    assert found.output_s + 200 * found.echo_s == pytest.approx(truth.output_s + 200 * truth.echo_s, rel=0.1)


@settings(deadline=None, max_examples=10)
@given(launch_ms=st.floats(12, 40), seed=st.integers(0, 99), ahead=st.booleans())
def test_launch_and_device_are_told_apart_where_the_engine_schedules_ahead(
    launch_ms: float, seed: int, ahead: bool
) -> None:
    """Short prompts that the launch hides, long ones that hide the launch, and decode steps of 5 ms in between."""
    truth = StepCost(Work(steps=5e-3, prefill_tokens=2e-5), prefill_launch_s=launch_ms / 1e3 if ahead else 0.0)
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            prompt_token_ids=rng.integers(0, 1000, tokens),
            output_tokens=int(rng.integers(5, 30)),
            arrival_s=float(rng.uniform(0, 15)),
        )
        for tokens in rng.choice([50, 2500, 7500], 150)
    ]
    scheduled = Settings(num_gpu_blocks=50_000, max_num_batched_tokens=8192, async_scheduling=ahead)
    steps = timed(simulate(requests, scheduled, truth).steps.to_pandas().assign(round=0))
    launches_s = prefill_launches_s(steps)
    assert launches_s.size > 10 if ahead else launches_s.size == 0
    launch_s = float(np.median(launches_s)) if ahead else 0.0
    assert launch_s == pytest.approx(truth.prefill_launch_s, abs=1e-9)
    spans = device_spans(steps, launch_s)
    assert ahead or len(spans) == len(steps)
    terms = ("steps", "prefill_tokens")
    found = fit(spans[list(Work._fields)].to_numpy(), spans["duration_s"].to_numpy(), terms).cost.fixed
    assert (found.steps, found.prefill_tokens) == pytest.approx((5e-3, 2e-5), rel=1e-6)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs as a real engine would have recorded them, made by the simulator."""
    folder = tmp_path_factory.mktemp("recorded")
    for name, asked in {
        "long": ["workload.suffix_tokens=900", "workload.output_tokens=30"],
        "short": ["workload.prefix_tokens=64", "workload.output_tokens=60", "load.concurrency=3"],
    }.items():
        small = ["engine=simulator", "model=tiny_random", "gpu=h200", "tracking=off", "kv.num_blocks=5000"]
        made = run(compose([*small, f"runs_dir={folder}", "study.name=x", f"run.name={name}", *asked]))
        pretend(made.folder)
    return folder / "x"


def pretend(folder: Path, **changes: Any) -> None:
    """Makes a simulated run look measured."""
    summary = json.loads((folder / SUMMARY).read_text())
    summary |= {"simulated": False} | changes
    summary["config"]["engine"] = {"kind": "vllm_async"}
    (folder / SUMMARY).write_text(json.dumps(summary))


def test_the_command_writes_what_the_simulator_reads(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate([str(recorded), "--output", str(tmp_path / "new" / "c.json")])
    printed = capsys.readouterr().out
    assert "tiny_random" in printed and "a prefill token" in printed and "decode" in printed
    assert max(map(len, printed.splitlines()[:-2])) <= 100
    assert (tmp_path / "new" / "c.png").stat().st_size > 10_000
    calibration = load(tmp_path / "new" / "c.json")
    assert calibration.runs == ("x/long", "x/short") and calibration.num_gpu_blocks == 5000
    steps = pa.concat_tables(pq.read_table(recorded / name / "steps.parquet") for name in ("long", "short"))
    work = steps.append_column("steps", pa.array([1] * len(steps))).select(list(Work._fields)).to_pandas().to_numpy()
    total_s = pc.sum(steps["duration_s"]).as_py()
    assert durations_s(calibration.step_cost, work).sum() == pytest.approx(total_s, rel=0.02)


def test_what_cannot_be_calibrated_on_is_named(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no run here and none in its folders"):
        recorded_runs([tmp_path])
    found = recorded_runs([recorded / "short"])
    few = [Recording(found[0].run, found[0].steps.head(2), found[0].requests)]
    with pytest.raises(CalibrationError, match="2 steps cannot fit 6 terms"):
        calibrated(few)
    only_decode = found[0].steps[found[0].steps["prefill_tokens"] == 0]
    with pytest.raises(CalibrationError, match=r"terms apart; .*prefill_tokens"):
        calibrated([Recording(found[0].run, only_decode, found[0].requests)])
    (recorded / "short" / "steps.parquet").rename(tmp_path / "steps.parquet")
    with pytest.raises(ResultError, match=r"no steps.parquet here; a run with engine.record_steps=true leaves one"):
        recorded_runs([recorded])
    (tmp_path / "steps.parquet").rename(recorded / "short" / "steps.parquet")


def test_runs_of_different_engines_are_not_mixed(recorded: Path) -> None:
    long = load_run(recorded / "long")
    pretend(recorded / "long", engine={**long.engine, "version": "0.1"})
    with pytest.raises(ResultError, match=r"engine_version is .* a calibration takes runs of one engine"):
        recorded_runs([recorded / "short", recorded / "long"])
    pretend(recorded / "long", engine=dict(long.engine))
