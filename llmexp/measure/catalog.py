"""Every measure that llmexp reports: its unit, which direction is better, and what it means."""

from dataclasses import dataclass
from typing import Literal

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Measure:
    """A reported quantity. `better` is None where neither direction is an improvement by itself."""

    name: str
    unit: str
    better: Literal["higher", "lower"] | None
    meaning: str


def _latency(name: str, meaning: str) -> list[Measure]:
    spread = [
        Measure(f"{name}_ms_p{q}", "ms", "lower", f"{q}th percentile of {meaning}") for q in PERCENTILES
    ]
    return [Measure(f"{name}_ms_mean", "ms", "lower", f"mean {meaning}"), *spread]


MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in [
        Measure("throughput_req_per_s", "req/s", "higher", "completed requests per second"),
        Measure("throughput_output_tokens_per_s", "tokens/s", "higher", "generated tokens per second"),
        Measure(
            "throughput_total_tokens_per_s", "tokens/s", "higher", "prompt and generated tokens per second"
        ),
        *_latency("ttft", "time from when the request was due to its first token"),
        *_latency("tpot", "time per output token after the first"),
        *_latency("itl", "time between consecutive token chunks"),
        *_latency("e2e", "time from when the request was due to its last token"),
        *_latency("client_wait", "time from when a request was due to when the client sent it"),
        *_latency("queue", "time the engine kept a request waiting"),
        Measure("duration_s", "s", None, "from the first send of a round to its last response"),
        Measure("mean_in_flight", "requests", None, "requests in flight, on average over a round"),
        Measure(
            "tokens_per_chunk", "tokens", None, "generated tokens per token chunk; above 1, ITL is per chunk"
        ),
        Measure("cache_hit_rate", "", "higher", "hit tokens over queried tokens, by the engine's counters"),
        Measure("expected_hit_tokens", "tokens", None, "hit tokens that the audit of the workload predicts"),
        Measure("observed_hit_tokens", "tokens", None, "hit tokens that the engine counted"),
        Measure("kv_usage_peak", "", None, "largest sampled share of KV blocks in use"),
        Measure("preemptions", "", "lower", "requests preempted in the round"),
        Measure("failed_requests", "", "lower", "requests that did not complete"),
        Measure(
            "requests_without_usage", "requests", "lower", "completed requests whose tokens were not reported"
        ),
        Measure(
            "goodput_req_per_s", "req/s", "higher", "completed requests per second that met every SLO set"
        ),
        Measure("goodput_share", "", "higher", "share of requests that met every SLO set"),
    ]
}
