"""The cache contract: what is expected of a round, and when what was counted breaks it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from llmexp.client.records import TRACE_SCHEMA
from llmexp.compose import compose
from llmexp.engines.counters import Counters
from llmexp.measure.contract import Contract, Expectation, expect, hit_measures, judge
from llmexp.models import Model
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from llmexp.workloads.multi_turn import record_with
from llmexp.workloads.workload import Workload

MODEL = Model("m", Path(), 1000, frozenset({0, 1}), 2048, {})
ROOMY, BLOCK = 4096, 32


def shared(*overrides: str) -> tuple[Workload, Expectation]:
    config = compose(["gpu=cpu", "workload.num_requests=4", "workload.prefix_tokens=96", *overrides])
    workload = build(config.workload, MODEL)
    return workload, expect(config, audit(workload, BLOCK), ROOMY)


def test_recorded_answers_count_only_where_the_engine_gives_them_again() -> None:
    config = compose(["gpu=cpu", "workload=multi_turn", "workload.turns=2", "workload.user_tokens=16"])
    made_up = build(config.workload, MODEL)
    recorded = record_with(made_up, lambda prompts, counts: [[5] * count for count in counts])
    exact, between = (expect(config, audit(each, BLOCK), ROOMY) for each in (made_up, recorded))
    assert (exact.kind, exact.at_least) == ("exact", 0)
    assert (between.kind, between.at_least) == ("ceiling", exact.hit_tokens)
    assert between.hit_tokens > exact.hit_tokens
    for hits, held in ((between.at_least - 32, False), (between.at_least, True), (between.hit_tokens, True)):
        judged = judge(between, Counters(prefix_cache_hits_tokens=hits), TRACE_SCHEMA.empty_table())
        assert judged.held == held


@pytest.mark.parametrize(
    ("overrides", "kind", "hit_tokens"),
    [
        ([], "exact", 3 * 96),
        (["cache=off"], "exact", 0),
        (["cache=salted"], "exact", 0),
        (["scheduler.long_prefill_token_threshold=64"], "ceiling", 3 * 96),
        (["workload.prefix_tokens=95", "workload.suffix_tokens=33"], "exact", 3 * 64),
    ],
)
def test_what_is_expected(overrides: list[str], kind: str, hit_tokens: int) -> None:
    _, expectation = shared(*overrides)
    assert (expectation.kind, expectation.hit_tokens) == (kind, hit_tokens)


def test_without_room_or_knowledge_of_it_the_bound_is_a_ceiling() -> None:
    config = compose(["gpu=cpu", "workload.num_requests=4", "workload.prefix_tokens=96"])
    account = audit(build(config.workload, MODEL), BLOCK)
    assert expect(config, account, account.blocks_to_hold).kind == "exact"
    assert expect(config, account, account.blocks_to_hold - 1).kind == "ceiling"
    assert expect(config, account, None).kind == "ceiling"


def trace(cached: list[int | None]) -> pa.Table:
    columns = {field.name: pa.nulls(len(cached), field.type) for field in TRACE_SCHEMA}
    return pa.table({**columns, "cached_tokens": pa.array(cached, pa.int32())}, schema=TRACE_SCHEMA)


@pytest.mark.parametrize(
    ("kind", "queries", "hits", "cached", "held", "observed"),
    [
        ("ceiling", 500, 150, 90, True, 90),  # one request of 100 looked up twice, 60 hits the second time
        ("ceiling", 500, 191, 90, False, 90),  # more than a second look-up could have found
        ("ceiling", 500, 89, 90, False, 90),  # fewer than the requests had
        ("ceiling", 500, 150, 101, False, 101),  # more than the workload can share
        ("ceiling", 400, 150, 90, False, 150),  # nothing was looked up twice
        ("exact", 500, 150, 100, False, 150),  # with room for all, nothing waits for blocks
    ],
)
def test_look_ups_of_a_request_that_waits_for_blocks_are_told_from_hits(
    kind: str, queries: float, hits: float, cached: int, held: bool, observed: int
) -> None:
    requests = trace([cached, 0, 0, 0])
    place = requests.schema.get_field_index("prompt_tokens")
    requests = requests.set_column(place, requests.field(place), pa.array([100] * 4, pa.int32()))
    counters = Counters(prefix_cache_hits_tokens=hits, prefix_cache_queries_tokens=queries)
    contract = judge(Expectation(100, kind, "a test"), counters, requests)  # type: ignore[arg-type]
    assert (contract.held, contract.observed_hit_tokens) == (held, observed)
    assert contract.queried_tokens == (400 if kind == "ceiling" else queries), "each request once"


def test_hits_are_a_share_of_what_was_asked_and_of_the_bound() -> None:
    def measured(expected: int, observed: int | None, queried: int | None) -> dict[str, float]:
        return hit_measures(Contract(expected, "ceiling", "a test", observed, queried, ()))

    assert measured(120, 30, 400) == {
        "expected_hit_tokens": 120,
        "observed_hit_tokens": 30,
        "cache_hit_rate": 0.075,
        "hit_share_of_bound": 0.25,
    }
    assert measured(0, 0, 0) == {"expected_hit_tokens": 0, "observed_hit_tokens": 0, "cache_hit_rate": 0}
    assert measured(120, None, None) == {"expected_hit_tokens": 120}


def judged(kind: str, hits: float | None, cached: list[int | None]) -> Contract:
    return judge(
        Expectation(100, kind, "a test"),  # type: ignore[arg-type]
        Counters(prefix_cache_hits_tokens=hits, prefix_cache_queries_tokens=400),
        trace(cached),
    )


@pytest.mark.parametrize(
    ("kind", "hits", "cached", "held"),
    [
        ("exact", 100, [60, 40], True),
        ("exact", 99, [60, 39], False),
        ("exact", 101, [60, 41], False),
        ("ceiling", 99, [60, 39], True),
        ("ceiling", 101, [60, 41], False),
        ("exact", 100, [60, 41], False),  # somebody else used the server
        ("exact", 100, [60, None], True),  # this server reports no cached tokens
        ("exact", None, [60, 40], True),  # nothing was counted
    ],
)
def test_what_breaks_it(kind: str, hits: float | None, cached: list[int | None], held: bool) -> None:
    contract = judged(kind, hits, cached)
    assert contract.held == held
    assert bool(contract.broken) != held


def test_a_breach_is_told_with_both_numbers_and_the_reason() -> None:
    (broken,) = judged("exact", 132, [100, 32]).broken
    assert broken == "132 hit tokens counted, exactly 100 expected (a test)"


def test_a_fully_repeated_prompt_of_whole_blocks_recomputes_its_last() -> None:
    prompt = np.arange(2, 2 + 4 * BLOCK, dtype=np.int32)
    twice = Workload("twice", {}, lambda i: prompt, np.full(2, len(prompt), np.int32), np.full(2, 1, np.int32))
    expectation = expect(compose(["gpu=cpu"]), audit(twice, BLOCK), ROOMY)
    assert (expectation.kind, expectation.hit_tokens) == ("exact", 3 * BLOCK)
