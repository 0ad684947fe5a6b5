"""Runs of the simulated engine: the records of any other run, marked as simulated; and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from llmexp.client.records import TRACE_SCHEMA
from llmexp.compose import compose
from llmexp.errors import ConfigError, ResultError
from llmexp.execute import run
from llmexp.models import locate
from llmexp.report.run_table import verdict
from llmexp.results import RunResult
from llmexp.simulate.calibration import CalibrationFile, Residuals, load, save
from llmexp.simulate.engine import settings_of
from llmexp.simulate.measured import recorded_runs

SMALL = ["engine=simulator", "model=tiny_random", "tracking=off", "max_num_seqs=4", "kv.num_blocks=200"]
CALIBRATION = CalibrationFile(
    model="tiny_random",
    gpu="cpu",
    dtype="float32",
    tensor_parallel_size=1,
    engine="vllm_async",
    engine_version="0.32.0",
    async_scheduling=False,
    block_size=32,
    num_gpu_blocks=500,
    max_num_batched_tokens=None,
    cost={"fixed": {"steps": 0.25}, "compute": {}, "memory": {}},
    prefill_launch_s=0.0,
    front_end={},
    steps=100,
    runs=("a/b",),
    residuals={"all": Residuals(steps=100, time_share=1.0, bias=0.0, error_p50=0.0, error_p95=0.0)},
)


def simulated(folder: Path, *overrides: str) -> RunResult:
    return run(compose([*SMALL, f"runs_dir={folder}", *overrides]))


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    save(CALIBRATION, tmp_path / "calibration.json")
    return tmp_path / "calibration.json"


def test_it_leaves_the_records_of_any_run_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    result = simulated(tmp_path, "study.name=x")
    assert result.simulated and result.valid and result.status == "complete"
    assert len(result.rounds) == 1 and result.rounds[0].client == {}
    trace = result.trace()
    assert trace.schema == TRACE_SCHEMA and len(trace) == 16
    assert result.measures["observed_hit_tokens"] == result.measures["expected_hit_tokens"] == 15 * 512
    assert sum(trace["cached_tokens"].to_pylist()) == 15 * 512
    assert [len(chunks) for chunks in trace["chunk_s"].to_pylist()] == [8] * 16
    steps = pq.read_table(result.folder / "steps.parquet")
    assert sum(steps["finished"].to_pylist()) == 16
    assert result.measures["engine_steps"] == len(steps)
    computed = sum(trace["prompt_tokens"].to_pylist()) - 15 * 512 + 16 * 7  # the eighth token is not fed back
    assert result.measures["tokens_per_step"] == pytest.approx(computed / len(steps))
    assert "traceEvents" in json.loads((result.folder / "timeline.json").read_text())


def test_the_calibration_tells_the_time(tmp_path: Path, calibration: Path) -> None:
    result = simulated(tmp_path, "gpu=cpu", f"engine.calibration={calibration}", "workload.output_tokens=3")
    # Four waves of four requests, each of three steps of a quarter second.
    assert result.trace()["end_s"].to_numpy().max() == 4 * 3 * 0.25
    assert result.measures["throughput_req_per_s"] == pytest.approx(16 / 3.0)
    assert result.measures["requests_running_mean"] == pytest.approx(4.0)


def test_open_loops_are_due_when_they_are_for_a_server(tmp_path: Path, calibration: Path) -> None:
    result = simulated(
        tmp_path, "gpu=cpu", f"engine.calibration={calibration}", "load=constant", "load.rate=2", "load.max_in_flight=1"
    )
    trace = result.trace()
    assert trace["intended_s"].to_pylist() == [i / 2 for i in range(16)]
    assert trace["sent_s"].to_pylist()[1] == trace["end_s"].to_pylist()[0] == 8 * 0.25


def test_turns_keep_their_place_and_pause(tmp_path: Path, calibration: Path) -> None:
    result = simulated(
        tmp_path,
        "gpu=cpu",
        f"engine.calibration={calibration}",
        "workload=multi_turn",
        "workload.num_conversations=2",
        "workload.turns=2",
        "workload.output_tokens=4",
        "workload.think_s=0.5",
        "load.concurrency=1",
    )
    rows = result.trace().to_pandas().sort_values("sent_s")
    assert rows["sent_s"].tolist() == [0.0, 1.5, 2.5, 4.0]  # a turn takes a second, the next comes half a second later
    assert np.array_equal(rows["intended_s"], rows["sent_s"])


@pytest.mark.parametrize("cache", ["off", "salted"])
def test_without_reuse_nothing_is_hit(tmp_path: Path, cache: str) -> None:
    result = simulated(tmp_path, f"cache={cache}")
    assert result.valid
    assert result.measures["observed_hit_tokens"] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gpu=cpu"], "gpu: got cpu, whose datasheet is not known"),
        (["gpu=t4", "model=random_8b", "kv.num_blocks=null"], "gpu=t4: 0 bytes are left for the KV cache of random_8b"),
        (["kv.num_blocks=10"], "kv.num_blocks: got 10; request 0: 551 tokens need 35 blocks of 16"),
        (["scheduler.max_num_batched_tokens=3"], "scheduler.max_num_batched_tokens: got 3; accepted is max_num_seqs=4"),
        (
            ["scheduler.max_num_batched_tokens=32", "scheduler.enable_chunked_prefill=false"],
            "scheduler.max_num_batched_tokens: got 32; request 0: up to 551 tokens",
        ),
        (["reset_cache=false"], "reset_cache"),
        (["warm_up.prompts=workload"], "warm_up.prompts"),
        (["engine.calibration=/nowhere/x.json"], "engine.calibration: got '/nowhere/x.json'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(tmp_path, *overrides)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_the_device_that_is_simulated_does_not_depend_on_the_machine(tmp_path: Path, calibration: Path) -> None:
    asked = ["engine=simulator", "model=tiny_random", "gpu=auto"]
    assert compose(asked).gpu.name == "h100"
    assert "\nsimulated: tiny_random on h100" in verdict(simulated(tmp_path, "gpu=auto"))
    assert compose([*asked, f"engine.calibration={calibration}"]).gpu.name == CALIBRATION.gpu


def test_a_calibration_holds_for_what_it_was_made_on(tmp_path: Path, calibration: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu: got h200; engine.calibration was made with cpu"):
        simulated(tmp_path, "gpu=h200", f"engine.calibration={calibration}")
    calibration.write_text('{"model": "x"}')
    with pytest.raises(ConfigError, match="did not write"):
        load(calibration)


def test_what_the_config_leaves_open_is_vllms_default_or_as_calibrated() -> None:
    model = locate(compose(["model=tiny_random"]).model)
    alone = settings_of(compose(["engine=simulator", "model=tiny_random", "gpu=h200"]), model)
    assert (alone.block_size, alone.max_num_batched_tokens, alone.async_scheduling) == (16, 8192, True)
    calibrated = settings_of(compose(["engine=simulator", "model=tiny_random", "gpu=cpu"]), model, CALIBRATION)
    assert (calibrated.block_size, calibrated.num_gpu_blocks, calibrated.async_scheduling) == (32, 500, False)


def test_a_simulated_run_is_no_measurement_to_calibrate_on(tmp_path: Path) -> None:
    result = simulated(tmp_path)
    with pytest.raises(ResultError, match="this run is simulated"):
        recorded_runs([result.folder])
