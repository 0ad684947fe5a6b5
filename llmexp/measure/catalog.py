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
    spread = [Measure(f"{name}_ms_p{q}", "ms", "lower", f"{q}th percentile of {meaning}") for q in PERCENTILES]
    return [Measure(f"{name}_ms_mean", "ms", "lower", f"mean {meaning}"), *spread]


def _accuracy(name: str, meaning: str) -> list[Measure]:
    """Of one round, and so of each question once; the interval is Wilson's of 95%."""
    ends = [Measure(f"{name}_{end}", "", None, f"{end} end of the interval of {name}") for end in ("low", "high")]
    return [Measure(name, "", "higher", meaning), *ends]


MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in [
        Measure("throughput_req_per_s", "req/s", "higher", "completed requests per second"),
        Measure("throughput_output_tokens_per_s", "tokens/s", "higher", "generated tokens per second"),
        Measure("throughput_total_tokens_per_s", "tokens/s", "higher", "prompt and generated tokens per second"),
        *_latency("ttft", "time from when the request was due to its first token"),
        *_latency("tpot", "time per output token after the first"),
        *_latency("itl", "time between consecutive token chunks"),
        *_latency("e2e", "time from when the request was due to its last token"),
        *_latency("client_wait", "time from when a request was due to when the client sent it"),
        *_latency("queue", "time the engine kept a request waiting"),
        Measure("duration_s", "s", None, "from the first send of a round to its last response"),
        Measure("mean_in_flight", "requests", None, "requests in flight, on average over a round"),
        Measure("tokens_per_chunk", "tokens", None, "generated tokens per token chunk; above 1, ITL is per chunk"),
        Measure("cache_hit_rate", "", "higher", "hit tokens over queried tokens, each request counted once"),
        Measure("expected_hit_tokens", "tokens", None, "hit tokens that the audit of the workload predicts"),
        Measure("observed_hit_tokens", "tokens", None, "hit tokens that the engine tells"),
        Measure("hit_share_of_bound", "", "higher", "hit tokens over those that the audit allows at most"),
        Measure("kv_capacity_tokens", "tokens", "higher", "tokens that the KV cache holds"),
        Measure("kv_usage_peak", "", None, "largest sampled share of KV blocks in use"),
        Measure(
            "requests_running_mean", "requests", None, "requests that the engine ran at once, by their times in it"
        ),
        Measure("prompt_pressure", "", None, "most prompt tokens in flight at once, over the KV cache's capacity"),
        Measure("preemptions", "", "lower", "requests preempted in the round"),
        Measure("engine_steps", "steps", None, "forward passes of the engine"),
        Measure("tokens_per_step", "tokens", None, "prompt and generated tokens that a forward pass computes"),
        Measure("throughput_req_per_s_per_gpu", "req/s", "higher", "completed requests per second and GPU"),
        Measure("cost_per_million_tokens", "", "lower", "price of a million prompt and generated tokens"),
        Measure("energy_j", "J", "lower", "energy that the GPUs used in a round"),
        Measure("energy_j_per_request", "J", "lower", "energy per completed request"),
        Measure("energy_j_per_output_token", "J", "lower", "energy per generated token"),
        Measure("gpu_power_w_mean", "W", None, "power of all GPUs together"),
        Measure("gpu_utilization_mean", "", None, "share of time that a kernel ran, by NVML"),
        Measure("gpu_memory_utilization_mean", "", None, "share of time that device memory was in use, by NVML"),
        Measure("gpu_memory_used_bytes_peak", "bytes", None, "largest sampled memory in use on a GPU"),
        Measure("gpu_sm_clock_mhz_mean", "MHz", None, "clock of the GPUs' multiprocessors"),
        Measure("gpu_power_capped_share", "", None, "share of samples in which a GPU kept to its power limit"),
        Measure("gpu_throttled_share", "", "lower", "share of samples in which heat or a fault slowed a GPU"),
        Measure("limit_prefill_s", "s", None, "least time for the arithmetic of the uncached prompt tokens"),
        Measure("limit_decode_s", "s", None, "least time to read weights and KV for the generated tokens"),
        Measure("limit_all_reduce_s", "s", None, "least time to add up tensor parallelism's partial sums"),
        Measure("limit_s", "s", None, "least time for the whole round, by the datasheet and the tokens served"),
        Measure("limit_share", "", "higher", "least time for the round over the time that it took"),
        *_accuracy("accuracy", "share of questions whose generated letter is the right one"),
        *_accuracy("accuracy_of_likeliest_letter", "share of questions whose likeliest of the four letters is right"),
        Measure("changed_answers", "questions", None, "questions with another generated letter in another round"),
        Measure("failed_requests", "", "lower", "requests that did not complete"),
        Measure("requests_without_usage", "requests", "lower", "completed requests whose tokens were not reported"),
        Measure("goodput_req_per_s", "req/s", "higher", "completed requests per second that met every SLO set"),
        Measure("goodput_share", "", "higher", "share of requests that met every SLO set"),
    ]
}
