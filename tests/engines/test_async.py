"""Runs on a real AsyncLLM with a tiny random model: the same records and the same contract as over HTTP."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from llmexp.client import async_llm
from llmexp.compose import compose
from llmexp.engines.lease import EngineLease
from llmexp.engines.vllm_async import VllmAsync
from llmexp.errors import EngineError
from llmexp.execute import run
from llmexp.results import RunResult
from tests.waiting import meanwhile, until

SMALL = [
    "engine=vllm_async",
    "model=tiny_random",
    "gpu=cpu",
    "tracking=off",
    "max_num_seqs=4",
    "rounds=2",
    "workload.num_requests=8",
    "workload.prefix_tokens=128",
    "workload.suffix_tokens=40",
]


class Workplace:
    """Runs made one after the other on one engine, as far as it lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lease = EngineLease(keep=True)

    def run(self, *overrides: str) -> RunResult:
        return run(compose([*SMALL, f"runs_dir={self.folder}", *overrides]), self.lease)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = Workplace(tmp_path_factory.mktemp("workplace"))
    yield place
    place.lease.close()


def test_it_hits_exactly_what_the_audit_predicts(workplace: Workplace) -> None:
    result = workplace.run("study.name=shared")
    assert result.valid, result.invalid_reasons
    for item in result.rounds:
        assert item.contract["kind"] == "exact"
        assert item.contract["observed_hit_tokens"] == 7 * 128
        assert item.contract["queried_tokens"] == 8 * 168
        assert item.contract["reset_confirmed"] is True
    trace = result.trace()
    assert trace["prompt_tokens"].to_pylist() == [168] * 16
    assert trace["output_tokens"].to_pylist() == [8] * 16
    assert sorted(trace["cached_tokens"].to_pylist()) == [0] * 2 + [128] * 14
    chunks = [len(times) for times in trace["chunk_s"].to_pylist()]
    assert max(chunks) <= 8  # fewer where the client comes late, to several tokens at once
    assert result.measures["tokens_per_chunk"] == pytest.approx(16 * 8 / sum(chunks))
    assert result.measures["engine_steps"] >= 16  # two waves of four, eight tokens each


def test_the_engines_own_times_stand_between_the_clients(workplace: Workplace) -> None:
    result = workplace.run("study.name=times")
    assert result.valid, result.invalid_reasons
    trace = result.trace()
    names = ("sent_s", "engine_queued_s", "engine_scheduled_s", "engine_first_token_s", "first_token_s")
    columns = [trace[name].to_numpy() for name in names]
    for earlier, later in pairwise(columns):
        assert (earlier <= later).all()
    waits_ms = (columns[2] - columns[1]) * 1e3
    assert result.percentiles["queue_ms_p50"].value == pytest.approx(float(np.percentile(waits_ms, 50)))
    assert result.measures["queue_ms_mean"] == pytest.approx(waits_ms.mean())
    ran_s = trace["engine_last_token_s"].to_numpy() - trace["engine_scheduled_s"].to_numpy()
    for one in result.rounds:
        running = ran_s[trace["round"].to_numpy() == one.index].sum() / one.measures["duration_s"]
        assert one.measures["requests_running_mean"] == pytest.approx(running)


def test_runs_that_differ_in_salt_and_load_share_the_launch_and_a_salted_one_has_no_hits(workplace: Workplace) -> None:
    launches = workplace.lease.launches
    # A round of seconds: on a busy machine the last of 8 requests may well be late by a tenth of one.
    salted = workplace.run("study.name=salted", "cache=salted", "load=constant", "load.rate=2")
    assert salted.valid, salted.invalid_reasons
    assert salted.measures["observed_hit_tokens"] == 0
    assert workplace.lease.launches == max(launches, 1)


def test_death_in_a_round_is_told_and_leaves_no_process(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace.run("study.name=alive")  # so that there is an engine to kill
    engine = workplace.lease._engine
    assert isinstance(engine, VllmAsync)
    started = threading.Event()
    work = async_llm.Guest.work

    def slow_work(self: async_llm.Guest, *arguments: object) -> None:
        started.set()
        work(self, *arguments)  # type: ignore[arg-type]

    def kill() -> None:
        until(started.is_set, "a request")
        (host,) = psutil.Process(engine._launched.process.popen.pid).children()
        host.kill()

    monkeypatch.setattr(async_llm.Guest, "work", slow_work)
    with meanwhile(kill), pytest.raises(EngineError):
        workplace.run("study.name=dead", "workload.num_requests=500", "workload.output_tokens=64")
    assert engine._launched.process.pids() == []
