"""How hard a round pressed on the KV cache."""

import numpy as np
import pyarrow as pa

from llmexp.measure.latencies import floats


def pressure_measures(trace: pa.Table, capacity_tokens: int | None) -> dict[str, float]:
    """Capacity and the largest demand on it, by their names in the catalog.

    Demand counts the prompt tokens of every request in flight, as if none were shared: above 1, requests without
    a common prefix would not all fit. What is not known is left out.
    """
    if not capacity_tokens:
        return {}
    measures = {"kv_capacity_tokens": float(capacity_tokens)}
    if len(trace) and not trace["prompt_tokens"].null_count:
        measures["prompt_pressure"] = _most_in_flight(trace) / capacity_tokens
    return measures


def _most_in_flight(trace: pa.Table) -> float:
    """The most prompt tokens that were in flight at once."""
    sent, end, tokens = (floats(trace, name) for name in ("sent_s", "end_s", "prompt_tokens"))
    times = np.concatenate([sent, end])
    steps = np.concatenate([tokens, -tokens])
    order = np.lexsort((steps, times))  # a place is free before it is taken again
    return float(np.cumsum(steps[order]).max())
