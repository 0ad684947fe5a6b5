"""Measures that come from the engine's own counters, not from the client's clock."""

import math
from collections.abc import Sequence

from llmexp.engines.counters import Counters, Histogram
from llmexp.engines.sampling import Sample
from llmexp.measure.catalog import PERCENTILES
from llmexp.results import Percentile


def engine_measures(
    counted: Counters, samples: Sequence[Sample], duration_s: float, answered: int
) -> tuple[dict[str, float], dict[str, Percentile]]:
    """Preemptions, steps, KV usage, running requests and queue time of a round of `duration_s` in which so many
    requests were `answered`, under the names of the catalog.

    What the engine did not count is left out. vLLM counts the tokens that it takes in and gives out, of each answer
    also the last one, which no step computes any more (`IterationStats`, `vllm/v1/metrics/stats.py`). How many requests
    ran at once follows from how long they ran (Little's law): samples of the gauge fall into step with the waves of a
    closed loop. Of the queue time the engine keeps a histogram, so a percentile is known to lie between two bounds, and
    no value is given for it.
    """
    measures: dict[str, float] = {}
    if counted.preemptions is not None:
        measures["preemptions"] = counted.preemptions
    if counted.steps:
        measures["engine_steps"] = counted.steps
        if counted.step_tokens is not None:
            measures["tokens_per_step"] = (counted.step_tokens - answered) / counted.steps
    usage = [sample["kv_usage"] for sample in samples if sample["kv_usage"] is not None]
    if usage:
        measures["kv_usage_peak"] = max(usage)
    if counted.inference_s and duration_s > 0:
        measures["requests_running_mean"] = counted.inference_s / duration_s
    queue = counted.queue_time
    if not queue.counts or queue.counts[-1] <= 0:
        return measures, {}
    n = int(queue.counts[-1])
    measures["queue_ms_mean"] = queue.sum_s / n * 1000
    percentiles = {}
    for q in PERCENTILES:
        low_s, high_s = bucket(queue, q / 100)
        high_ms = None if math.isinf(high_s) else high_s * 1000
        percentiles[f"queue_ms_p{q}"] = Percentile(value=None, low=low_s * 1000, high=high_ms, n=n)
    return measures, percentiles


def bucket(histogram: Histogram, q: float) -> tuple[float, float]:
    """The bounds in seconds between which a quantile lies; the upper one may be infinite.

    Raises ValueError for a histogram without observations.
    """
    if not histogram.counts or histogram.counts[-1] <= 0:
        raise ValueError("an empty histogram has no quantiles")
    rank = q * histogram.counts[-1]
    index = next(i for i, count in enumerate(histogram.counts) if count >= rank)
    return (histogram.bounds_s[index - 1] if index else 0.0), histogram.bounds_s[index]
