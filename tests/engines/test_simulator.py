"""The simulator against a real engine: request by request the same hits, and step by step the same work."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmexp.compose import compose
from llmexp.engines.lease import EngineLease
from llmexp.execute import run
from llmexp.results import RunResult
from llmexp.simulate.measured import recorded_runs

SAME = [
    *("model=tiny_random", "model.max_model_len=1024", "gpu=cpu", "kv.block_size=32", "kv.num_blocks=64"),
    *("tracking=off", "max_num_seqs=4", "rounds=1", "client.lag_limit_ms=1000"),
]
COUNTS = ("scheduled", "prefill_tokens", "decode_tokens", "sampled", "attended_pairs", "context_tokens", "free_blocks")


class Pair:
    """The same run on the engine and simulated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lease = EngineLease(keep=True)

    def runs(self, name: str, *overrides: str) -> tuple[RunResult, RunResult]:
        asked = [*SAME, f"runs_dir={self._folder}", f"study.name={name}", *overrides]
        real = run(compose([*asked, "engine=vllm_async", "engine.record_steps=true", "run.name=real"]), self.lease)
        rates = ["gpu.flops_per_s=1e12", "gpu.bandwidth_bytes_per_s=1e11"]  # what a step costs decides nothing here
        return real, run(compose([*asked, "engine=simulator", *rates, "run.name=simulated"]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.lease.close()


ONE_BY_ONE = {
    "shared prefix": ["workload.num_requests=8", "workload.prefix_tokens=256", "workload.suffix_tokens=40"],
    "turns": ["workload=multi_turn", "workload.num_conversations=3", "workload.turns=3", "workload.output_tokens=40"],
    "evictions": [
        *("workload.num_requests=24", "workload.num_prefixes=6", "workload.prefix_tokens=400"),
        *("workload.suffix_tokens=20", "workload.output_tokens=20"),
    ],
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_request_at_a_time_every_step_is_the_engines(pair: Pair, name: str) -> None:
    real, simulated = pair.runs(name.replace(" ", "_"), *ONE_BY_ONE[name], "load.concurrency=1")
    assert real.trace()["cached_tokens"] == simulated.trace()["cached_tokens"]
    hits = simulated.measures["observed_hit_tokens"]
    assert hits == real.measures["observed_hit_tokens"] > 0
    if name == "evictions":
        assert hits < simulated.measures["expected_hit_tokens"]  # what a larger cache would have given
    steps = [pq.read_table(result.folder / "steps.parquet").select(COUNTS).to_pylist() for result in (real, simulated)]
    assert steps[0] == steps[1]
    computed = sum(step["prefill_tokens"] + step["decode_tokens"] for step in steps[0]) / len(steps[0])
    for result in (real, simulated):
        assert result.measures["tokens_per_step"] == pytest.approx(computed)


def test_several_at_once_hit_as_much(pair: Pair) -> None:
    real, simulated = pair.runs("several", *ONE_BY_ONE["shared prefix"], "load.concurrency=4")
    assert real.measures["observed_hit_tokens"] == simulated.measures["observed_hit_tokens"] == 7 * 256
    (found,) = recorded_runs([real.folder])
    assert found.steps["prefill_tokens"].sum() == 8 * 296 - 7 * 256
    assert (found.steps["duration_s"] > 0).all()
