"""Differential tests: the simulator against vLLM's own ``Scheduler`` and ``KVCacheManager``, step by step.

Three hundred random cases, or three thousand with ``--hypothesis-profile=thorough``.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from vllm.config import ModelConfig

from llmexp.simulate import Request, Settings, simulate
from llmexp.simulate.arrivals import Arrivals
from llmexp.simulate.errors import TimeStandsStillError
from llmexp.simulate.loop import sequence
from llmexp.simulate.requests import Requests, steps_without_token
from llmexp.simulate.scheduler import Scheduler, Step
from tests.simulate.cases import Case, cases
from tests.simulate.oracle import Oracle, model_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return model_config(Path(tmp_path_factory.mktemp("model")))


def twins() -> Case:
    """Requests of which two that came together need the whole pool each, and take it from each other in turn."""
    prompts, small = [32, 32, 32, 32, 32, 33, 33], {"num_gpu_blocks": 4, "block_size": 16, "max_num_seqs": 2}
    return Case(
        Settings(
            **small, max_num_batched_tokens=33, enable_chunked_prefill=False, enable_prefix_caching=False,
            policy="priority", long_prefill_token_threshold=7, scheduler_reserve_full_isl=False,
        ),
        [
            Request(prompt_token_ids=[100] * n, output_tokens=1, output_token_ids=[5000], after=0 if i == 2 else None)
            for i, n in enumerate(prompts)
        ],
        None,
    )  # fmt: skip


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(case=cases())
@example(case=twins())
def test_every_step_equals_vllms(model: ModelConfig, case: Case) -> None:
    """Scheduled tokens, preemptions, statistics, each sequence's blocks and the order of the free queue."""
    requests = Requests.of(case.requests, case.settings.block_size)
    ours, theirs = Scheduler(case.settings), Oracle(model, case.settings)
    arrivals = Arrivals(requests, case.max_concurrency)
    now, entered, fruitless = 0.0, 0, 0
    expected: list[dict[str, Any]] = []
    while True:
        for index, sent_s in arrivals.take(now):
            ours.add(sequence(requests, index, sent_s, entered))
            theirs.add(index, case.requests[index], sent_s)
            entered += 1
        step, output = ours.schedule(), theirs.schedule()
        scheduled = {seq.index: num_new for seq, num_new in step.scheduled.items()}
        assert list(scheduled.items()) == theirs.scheduled(output)
        assert {seq.index for seq in step.preempted} == theirs.preempted(output)
        assert [seq.index for seq in ours.running] == theirs.running
        assert len(ours.waiting) == theirs.num_waiting
        assert (step.queries, step.hits, step.preempted_queries, step.preempted_hits) == theirs.statistics
        assert list(ours.cache.pool.free) == theirs.free_queue
        for seq in ours.running:
            assert seq.blocks == theirs.blocks(seq.index)
        if not step.scheduled and not step.preempted:
            if arrivals.next_s is None:
                break
            now = arrivals.next_s
            continue
        expected.append(
            {
                "scheduled": scheduled,
                "preempted": len(step.preempted),
                "free_blocks": len(theirs.free_queue),
                "statistics": theirs.statistics,
                "counts": (len(theirs.running), theirs.num_waiting),
            }
        )
        now += 1.0 if step.scheduled else 0.0
        emitted, finished = ours.update(step)
        assert {seq.index for seq in finished} == theirs.update(output)
        for seq in finished:
            arrivals.finish(seq.index, now)
        fruitless = 0 if emitted else fruitless + 1
        if fruitless > steps_without_token(requests):
            for compiled in (False, True):
                assert_never_ends(requests, case.settings, case.max_concurrency, compiled)
            return
    assert not theirs.scheduler.has_unfinished_requests()
    event(f"{case.settings.policy}, preempted: {any(step['preempted'] for step in expected)}")
    event(f"hits: {any(step['statistics'][1] for step in expected)}")
    event(f"hits after a preemption: {any(step['statistics'][3] for step in expected)}")
    event(f"empty step: {any(not step['scheduled'] for step in expected)}")
    plain, compiled = (
        simulate(requests, case.settings, max_concurrency=case.max_concurrency, compiled=compiled)
        for compiled in (False, True)
    )
    assert_records(plain, expected)
    assert compiled == plain


def assert_never_ends(requests: Requests, settings: Settings, max_concurrency: int | None, compiled: bool) -> None:
    """Nor does vLLM, which does not say so."""
    event("never ends")
    with pytest.raises(TimeStandsStillError, match="no request gets a token any more"):
        simulate(requests, settings, max_concurrency=max_concurrency, compiled=compiled)


def assert_records(result: Any, expected: list[dict[str, Any]]) -> None:
    """The library's records tell the same story as vLLM's steps."""
    steps = result.steps.to_pydict()
    assert steps["free_blocks"] == [step["free_blocks"] for step in expected]
    assert steps["preempted"] == [step["preempted"] for step in expected]
    assert list(zip(steps["running"], steps["waiting"], strict=True)) == [step["counts"] for step in expected]
    names = ("queries", "hits", "preempted_queries", "preempted_hits")
    statistics = list(zip(*(steps[name] for name in names), strict=True))
    assert statistics == [step["statistics"] for step in expected]
    replayed: list[dict[int, int]] = [{} for _ in expected]
    for span in result.spans.to_pylist():
        for i in range(span["steps"]):
            replayed[span["first_step"] + i][span["request"]] = span["tokens"]
    assert replayed == [step["scheduled"] for step in expected]
    assert np.array_equal(steps["scheduled"], [len(step["scheduled"]) for step in expected])


@settings(deadline=None)
@given(case=cases())
@example(case=twins())
def test_steps_scheduled_ahead_equal_vllms(model: ModelConfig, case: Case) -> None:
    """The same with async scheduling: a step is decided while the one before is under way."""
    ahead = replace(case.settings, async_scheduling=True)
    requests = Requests.of(case.requests, ahead.block_size)
    ours, theirs = Scheduler(ahead), Oracle(model, ahead)
    arrivals = Arrivals(requests, case.max_concurrency)
    under_way: deque[tuple[Step, Any]] = deque()
    now, entered, fruitless = 0.0, 0, 0
    expected: list[dict[int, int]] = []
    while True:
        for index, sent_s in arrivals.take(now):
            ours.add(sequence(requests, index, sent_s, entered))
            theirs.add(index, case.requests[index], sent_s)
            entered += 1
        step, output = ours.schedule(), theirs.schedule()
        scheduled = {seq.index: num_new for seq, num_new in step.scheduled.items()}
        assert list(scheduled.items()) == theirs.scheduled(output)
        assert {seq.index for seq in step.preempted} == theirs.preempted(output)
        assert [seq.index for seq in ours.running] == theirs.running
        assert (step.queries, step.hits, step.preempted_queries, step.preempted_hits) == theirs.statistics
        assert list(ours.cache.pool.free) == theirs.free_queue
        for seq in ours.running:
            assert seq.blocks == theirs.blocks(seq.index)
        if step.scheduled or step.preempted:
            expected.append(scheduled)
            ours.run_ahead(step)
            under_way.append((step, output))
            if len(under_way) < 2:
                continue
        else:
            theirs.update(output)
            if not under_way:
                if arrivals.next_s is None:
                    break
                now = arrivals.next_s
                continue
        step, output = under_way.popleft()
        now += 1.0 if step.scheduled else 0.0
        emitted, finished = ours.update(step)
        assert {seq.index for seq in finished} == theirs.update(output)
        for seq in finished:
            arrivals.finish(seq.index, now)
        fruitless = 0 if emitted else fruitless + 1
        if fruitless > steps_without_token(requests):
            assert_never_ends(requests, ahead, case.max_concurrency, compiled=False)
            return
    assert not theirs.scheduler.has_unfinished_requests()
    result = simulate(requests, ahead, max_concurrency=case.max_concurrency)
    assert result.steps["scheduled"].to_pylist() == [len(scheduled) for scheduled in expected]
