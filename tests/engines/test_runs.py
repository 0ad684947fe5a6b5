"""Runs and studies on a real vLLM with a tiny random model: the cache contract, invalid runs, interruption, death."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import llmexp
from llmexp import tracking
from llmexp.client.records import TRACE_SCHEMA
from llmexp.compose import compose
from llmexp.engines.lease import EngineLease
from llmexp.errors import EngineError
from llmexp.execute import run
from llmexp.models import locate
from llmexp.recording import answered
from llmexp.results import RunResult
from llmexp.schema.config import TrackingConfig
from llmexp.workloads import store
from llmexp.workloads.build import build
from tests.family import descendant
from tests.waiting import meanwhile, until

# A tiny model answers in milliseconds, so that the client's lag on shared cores is a large share of any latency.
TINY = ["model=tiny_random", "gpu=cpu", "max_num_seqs=4", "rounds=2", "client.lag_limit_ms=10000"]
SMALL = [*TINY, "workload.num_requests=8", "workload.prefix_tokens=128", "workload.suffix_tokens=40"]


@dataclass(frozen=True)
class Workplace:
    """Runs made one after the other on as few engine launches as they need."""

    folder: Path
    lease: EngineLease

    def run(self, *overrides: str) -> RunResult:
        return self.make(*SMALL, *overrides)

    def make(self, *overrides: str) -> RunResult:
        places = [f"runs_dir={self.folder / 'runs'}", f"tracking.dir={self.folder / 'mlruns'}"]
        return run(compose([*overrides, *places]), self.lease)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    lease = EngineLease(keep=True)
    yield Workplace(tmp_path_factory.mktemp("workplace"), lease)
    lease.close()


def test_a_shared_prefix_hits_exactly_what_the_audit_predicts(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    result = workplace.run("study.name=shared")
    assert result.valid, result.invalid_reasons
    for item in result.rounds:
        assert item.contract["kind"] == "exact"
        assert item.contract["expected_hit_tokens"] == item.contract["observed_hit_tokens"] == 7 * 128
        assert item.contract["queried_tokens"] == 8 * 168
        assert item.contract["reset_confirmed"] is True
    assert result.measures["cache_hit_rate"] == pytest.approx(7 * 128 / (8 * 168))
    assert result.engine["block_size"] == 32
    assert "Initializing a V1" in (result.folder / "engine.log").read_text(), (
        "the log tells, whatever the shell silenced"
    )
    trace = result.trace()
    assert trace.schema.equals(TRACE_SCHEMA)
    assert trace.num_rows == 16
    assert set(trace["output_tokens"].to_pylist()) == {8}
    assert llmexp.load_run(result.folder) == result


def test_the_control_hits_nothing(workplace: Workplace) -> None:
    result = workplace.run("study.name=unique", "workload=unique_prefix")
    assert result.valid, result.invalid_reasons
    assert [item.contract["observed_hit_tokens"] for item in result.rounds] == [0, 0]
    assert result.engine["reused"], "equal engine arguments need no second launch"


def test_a_salt_of_its_own_keeps_every_request_from_reuse(workplace: Workplace) -> None:
    result = workplace.run("study.name=salted", "cache=salted")
    assert result.valid, result.invalid_reasons
    assert [item.contract["observed_hit_tokens"] for item in result.rounds] == [0, 0]
    assert result.rounds[0].contract["queried_tokens"] == 8 * 168


def test_recorded_conversations_hit_what_the_engine_itself_has_generated(workplace: Workplace) -> None:
    shape = ["workload=multi_turn", "workload.num_conversations=3", "workload.turns=3", "workload.user_tokens=48"]
    config = compose(["model=tiny_random", "gpu=cpu", "max_num_seqs=4", *shape])
    model = locate(config.model)
    (workplace.folder / "recording").mkdir()
    with workplace.lease.engine(config, model, workplace.folder / "recording", lambda: None) as (engine, _):
        recorded = answered(build(config.workload, model), engine, config)
    store.save(recorded, workplace.folder / "answers.parquet")
    result = workplace.make(
        *TINY, "study.name=recorded", *shape, f"workload.answers={workplace.folder}/answers.parquet"
    )
    made_up = workplace.make(*TINY, "study.name=made_up", *shape)
    assert result.valid and made_up.valid, (result.invalid_reasons, made_up.invalid_reasons)
    assert {item.contract["kind"] for item in made_up.rounds} == {"exact"}
    for item in result.rounds:
        assert item.contract["observed_hit_tokens"] == item.contract["expected_hit_tokens"]
        assert item.contract["observed_hit_tokens"] > made_up.rounds[0].contract["observed_hit_tokens"]


def test_a_skipped_reset_is_caught(workplace: Workplace) -> None:
    result = workplace.run("study.name=no_reset", "reset_cache=false")
    assert not result.valid
    second = " ".join(result.rounds[1].invalid_reasons)
    assert "cache_not_reset" in second
    assert "contract_broken: 1,280 hit tokens counted, exactly 896 expected" in second


def test_a_warm_up_that_reuses_the_workload_is_caught(workplace: Workplace) -> None:
    result = workplace.run("study.name=warmed", "warm_up.prompts=workload")
    assert not result.valid
    assert result.invalid_reasons[0].startswith("round 1: warm_up_overlaps: the warm-up shares")


def test_pressure_makes_the_bound_a_ceiling(workplace: Workplace) -> None:
    result = workplace.run(
        "study.name=pressed", "workload=unique_prefix", "kv.num_blocks=24", "model.max_model_len=640"
    )
    assert result.valid, result.invalid_reasons
    assert result.engine["num_gpu_blocks"] == 24
    assert result.rounds[0].contract["kind"] == "ceiling"


def test_every_run_is_in_mlflow_valid_or_not(workplace: Workplace) -> None:
    client, experiment = tracking.open_store(TrackingConfig(dir=str(workplace.folder / "mlruns")))
    runs = client.search_runs([experiment])
    by_study = {item.data.tags["llmexp.study"]: item for item in runs}
    assert by_study["shared"].data.tags["llmexp.valid"] == "true"
    assert by_study["no_reset"].data.tags["llmexp.valid"] == "false"
    assert by_study["shared"].data.metrics["expected_hit_tokens"] == 896
    assert {item.info.status for item in runs} == {"FINISHED"}


def test_an_engine_that_dies_in_a_round_is_told_with_its_cause_and_loses_no_trace(workplace: Workplace) -> None:
    folder = workplace.folder / "runs" / "death"

    def kill_core() -> None:
        until(lambda: any(folder.glob("*/requests-1.parquet")), "a judged round")  # a later one is under way
        descendant(os.getpid(), "EngineCore").kill()

    workplace.run("study.name=before_death")
    with meanwhile(kill_core), pytest.raises(EngineError, match="the engine ended"):
        workplace.run("study.name=death", "rounds=200")
    died = llmexp.load_run(next(folder.iterdir()))
    assert died.status == "failed"
    assert not died.valid
    assert len(died.rounds) >= 1
    assert died.trace().num_rows >= 8 * len(died.rounds)


def test_a_refused_argument_is_told_in_the_engines_own_words(workplace: Workplace) -> None:
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-argument"):
        workplace.run("study.name=refused", "engine.args.no_such_argument=1")
    failed = llmexp.load_run(next((workplace.folder / "runs" / "refused").iterdir()))
    assert failed.status == "failed"
    assert "no-such-argument" in (failed.folder / "engine.log").read_text()
