"""vLLM's own counters, read from its Prometheus page."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmexp.errors import EngineError


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper bound, as Prometheus gives them; bounds in seconds, the last one infinite."""

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum_s: float = 0.0

    def since(self, before: "Histogram") -> "Histogram":
        """What was observed after `before`."""
        earlier = before.counts or (0.0,) * len(self.counts)
        return Histogram(
            self.bounds_s,
            tuple(a - b for a, b in zip(self.counts, earlier, strict=True)),
            self.sum_s - before.sum_s,
        )


@dataclass(frozen=True)
class Counters:
    """A reading of the server: monotone counters, three gauges, and the histogram of queue times. `inference_s` adds up
    the times from the scheduling of ended requests to their last token.

    Source of the names: `vllm/v1/metrics/loggers.py`. A counter that this version lacks is None.
    """

    prefix_cache_queries_tokens: float | None = None
    prefix_cache_hits_tokens: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    steps: float | None = None
    step_tokens: float | None = None
    inference_s: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_usage: float | None = None
    queue_time: Histogram = field(default_factory=Histogram)

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`; the gauges are this reading's own."""
        values: dict[str, Any] = {}
        for item in fields(self):
            now, then = getattr(self, item.name), getattr(before, item.name)
            if item.name in _GAUGES:
                values[item.name] = now
            elif isinstance(now, Histogram):
                values[item.name] = now.since(then)
            else:
                values[item.name] = None if now is None or then is None else now - then
        return Counters(**values)

    @property
    def gauges(self) -> dict[str, float | None]:
        """The readings that are a state, not a count."""
        return {name: getattr(self, name) for name in _GAUGES}


_NAMES = {
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_tokens",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:iteration_tokens_total_sum": "step_tokens",
    "vllm:request_inference_time_seconds_sum": "inference_s",
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
_GAUGES = ("requests_running", "requests_waiting", "kv_usage")
_SETTLE_POLL_S, _SETTLE_TIMEOUT_S = 0.1, 5.0
_QUEUE = "vllm:request_queue_time_seconds"


def parse(page: str) -> tuple[Counters, Mapping[str, str]]:
    """The counters on a Prometheus page, summed over engines, and the labels of vLLM's cache config.

    Raises EngineError if the page is not in Prometheus' text format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    buckets: dict[float, float] = {}
    queue_sum_s = 0.0
    cache_config: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if name := _NAMES.get(sample.name):
                    values[name] = values.get(name, 0.0) + sample.value
                elif sample.name == f"{_QUEUE}_bucket":
                    bound_s = float(sample.labels["le"])
                    buckets[bound_s] = buckets.get(bound_s, 0.0) + sample.value
                elif sample.name == f"{_QUEUE}_sum":
                    queue_sum_s += sample.value
                elif sample.name == "vllm:cache_config_info":
                    cache_config = dict(sample.labels)
    except (ValueError, KeyError) as error:
        raise EngineError(f"/metrics: not Prometheus text ({error})") from None
    bounds_s = tuple(sorted(buckets))
    queue = Histogram(bounds_s, tuple(buckets[bound_s] for bound_s in bounds_s), queue_sum_s)
    return Counters(**values, queue_time=queue), cache_config


def settled(read: Callable[[], Counters]) -> Counters:
    """A reading of an idle server: vLLM records a step's statistics shortly after its last answer."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    reading = read()
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_POLL_S)
        earlier, reading = reading, read()
        if reading == earlier and not reading.requests_running and not reading.requests_waiting:
            break
    return reading
