"""Prometheus pages to counters, differences of them, and what is made of histograms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.engines import counters
from llmexp.engines.counters import Counters, Histogram, parse, settled
from llmexp.errors import EngineError
from llmexp.measure.engine import bucket, engine_measures

PAGE = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_queries_total{{engine="1",model_name="m"}} 100.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} 7777.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3",model_name="m"}} {fast}
vllm:request_queue_time_seconds_bucket{{engine="0",le="1.0",model_name="m"}} {all}
vllm:request_queue_time_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="m"}} {seconds}
vllm:request_queue_time_seconds_count{{engine="0",model_name="m"}} {all}
# TYPE vllm:request_inference_time_seconds histogram
vllm:request_inference_time_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_inference_time_seconds_sum{{engine="0",model_name="m"}} {ran}
vllm:request_inference_time_seconds_count{{engine="0",model_name="m"}} {all}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="32",num_gpu_blocks="728",enable_prefix_caching="True"}} 1.0
"""


def page(
    queries: float = 0,
    hits: float = 0,
    running: float = 0,
    fast: int = 0,
    slow: int = 0,
    seconds: float = 0,
    ran: float = 0,
) -> str:
    return PAGE.format(
        queries=queries, hits=hits, running=running, fast=fast, all=fast + slow, seconds=seconds, ran=ran
    )


def test_a_page_is_read_by_exact_names_and_summed_over_engines() -> None:
    counters, cache = parse(page(queries=900, hits=512, running=3))
    assert counters.prefix_cache_queries_tokens == 1000
    assert counters.prefix_cache_hits_tokens == 512
    assert counters.preemptions is None
    assert counters.gauges == {"requests_running": 3, "requests_waiting": None, "kv_usage": 0.25}
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("32", "728")


def test_a_difference_counts_events_and_keeps_the_last_gauges() -> None:
    before, _ = parse(page(queries=900, hits=512, running=3, fast=2, seconds=0.5))
    after, _ = parse(page(queries=1900, hits=600, running=0, fast=5, slow=1, seconds=1.75))
    change = after.since(before)
    assert change.prefix_cache_queries_tokens == 1000
    assert change.prefix_cache_hits_tokens == 88
    assert change.requests_running == 0
    assert change.queue_time == Histogram((0.3, 1.0, float("inf")), (3, 4, 4), 1.25)


@pytest.mark.parametrize("text", ["<html><body>Not Found</body></html>", 'vllm:x{le="'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="not Prometheus text"):
        parse(text)


def test_measures_of_a_round() -> None:
    before, _ = parse(page(queries=900, hits=512, ran=1.5))
    after, _ = parse(page(queries=1900, hits=1262, fast=3, slow=1, seconds=0.8, ran=9.0))
    samples = [{"kv_usage": usage, "requests_running": 1.0} for usage in (0.1, 0.7, None, 0.3)]
    measures, percentiles = engine_measures(after.since(before), samples, duration_s=2.5, answered=4)
    assert measures == {
        "kv_usage_peak": 0.7,
        "requests_running_mean": 3.0,
        "queue_ms_mean": pytest.approx(200),
    }
    p50, p99 = percentiles["queue_ms_p50"], percentiles["queue_ms_p99"]
    assert (p50.value, p50.low, p50.high, p50.n) == (None, 0, 300, 4)
    assert (p99.value, p99.low, p99.high) == (None, 300, 1000)


def test_the_token_that_ends_an_answer_is_computed_by_no_step() -> None:
    # Three prompts of 100 tokens in a step that gives a token each, and nine steps of decode.
    counted = Counters(steps=10.0, step_tokens=3 * (100 + 10.0))
    measures, _ = engine_measures(counted, [], duration_s=1.0, answered=3)
    assert measures == {"engine_steps": 10.0, "tokens_per_step": (3 * 100 + 9 * 3) / 10}


@given(times=st.lists(st.floats(0, 5), min_size=1, max_size=50), q=st.floats(0.01, 1))
def test_a_quantile_lies_in_its_bucket(times: list[float], q: float) -> None:
    bounds = (0.3, 1.0, 2.5, float("inf"))
    counts = tuple(float(sum(time <= bound for time in times)) for bound in bounds)
    low, high = bucket(Histogram(bounds, counts, sum(times)), q)
    rank = max(-(-q * len(times) // 1), 1)
    exact = sorted(times)[int(rank) - 1]
    assert low <= exact <= high


def test_an_idle_server_is_read_until_its_counters_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_SETTLE_TIMEOUT_S", 600.0)  # the machine may be slow
    readings = [Counters(preemptions=1, requests_running=1), Counters(preemptions=2, requests_running=0)]
    queue = iter([*readings, readings[-1], readings[-1]])
    assert settled(lambda: next(queue)) == readings[-1]
    assert next(queue) == readings[-1], "it stopped at the first two equal readings"
