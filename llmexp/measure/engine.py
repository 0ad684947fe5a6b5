"""Measures that come from the engine's own counters, not from the client's clock."""

import math
from collections.abc import Sequence

from llmexp.engines.counters import Counters, Histogram
from llmexp.engines.sampling import Sample
from llmexp.measure.catalog import PERCENTILES


def engine_measures(counted: Counters, samples: Sequence[Sample]) -> dict[str, float]:
    """Hit rate, preemptions, KV usage and queue time of a round, under the names of the catalog.

    What the engine did not count is left out.
    """
    measures: dict[str, float] = {}
    hits, queries = counted.prefix_cache_hits_tokens, counted.prefix_cache_queries_tokens
    if hits is not None and queries is not None:
        measures["observed_hit_tokens"] = hits
        measures["cache_hit_rate"] = hits / queries if queries else 0.0
    if counted.preemptions is not None:
        measures["preemptions"] = counted.preemptions
    usage = [sample["kv_usage"] for sample in samples if sample["kv_usage"] is not None]
    if usage:
        measures["kv_usage_peak"] = max(usage)
    queue = counted.queue_time
    if queue.counts and queue.counts[-1] > 0:
        measures["queue_ms_mean"] = queue.sum_s / queue.counts[-1] * 1000
        for q in PERCENTILES:
            if (value_s := quantile(queue, q / 100)) is not None:
                measures[f"queue_ms_p{q}"] = value_s * 1000
    return measures


def quantile(histogram: Histogram, q: float) -> float | None:
    """The quantile in seconds, linear within its bucket, as Prometheus' histogram_quantile has it.

    None where it falls beyond the last finite bound, or where nothing was observed.
    """
    total = histogram.counts[-1] if histogram.counts else 0
    if total <= 0:
        return None
    rank = q * total
    lower_s = below = 0.0
    for bound_s, count in zip(histogram.bounds_s, histogram.counts, strict=True):
        if count >= rank:
            if math.isinf(bound_s):
                return None
            inside = count - below
            return lower_s + (bound_s - lower_s) * ((rank - below) / inside if inside else 0.0)
        lower_s, below = bound_s, count
    return None
