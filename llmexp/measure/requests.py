"""From the request trace to measures: throughput, latencies and what went wrong."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmexp.measure.catalog import PERCENTILES
from llmexp.measure.goodput import meets_slo
from llmexp.measure.latencies import Latencies, floats, latencies
from llmexp.measure.percentiles import percentile
from llmexp.results import Percentile
from llmexp.schema.load import SloConfig


def request_measures(trace: pa.Table, slo: SloConfig) -> tuple[dict[str, float], dict[str, Percentile]]:
    """Measures and percentiles of one round, or of several pooled, by their names in
    `llmexp.measure.catalog`.

    Over several rounds latencies are pooled, counts are summed, and what has a time in its denominator
    (throughput, goodput, mean in flight), like the duration itself, is computed per round and averaged. A
    measure that the trace holds no value for is left out.
    """
    if not len(trace):
        return {}, {}
    each = latencies(trace)
    rounds = trace["round"].to_numpy()
    good = meets_slo(each, slo)
    per_round = [_rates(trace, each, good, rounds == index) for index in np.unique(rounds)]
    measures = {name: float(np.mean([rates[name] for rates in per_round])) for name in per_round[0]}
    if slo == SloConfig():
        del measures["goodput_req_per_s"]
    else:
        measures["goodput_share"] = float(good.mean())

    samples = _samples(each) | _queue(trace)
    measures |= {f"{name}_ms_mean": float(sample.mean()) for name, sample in samples.items() if len(sample)}
    measures["failed_requests"] = float((~each.completed).sum())
    output_tokens = floats(trace, "output_tokens")
    known = each.completed & ~np.isnan(output_tokens)
    measures["requests_without_usage"] = float((each.completed & ~known).sum())
    num_chunks = np.array(trace["chunk_s"].combine_chunks().value_lengths())
    if chunks := int(num_chunks[known].sum()):
        measures["tokens_per_chunk"] = float(output_tokens[known].sum()) / chunks
    percentiles = {f"{name}_ms_p{q}": percentile(sample, q) for name, sample in samples.items() for q in PERCENTILES}
    return measures, percentiles


def _samples(each: Latencies) -> dict[str, NDArray[np.float64]]:
    samples = {
        "ttft": each.ttft_ms,
        "tpot": each.tpot_ms,
        "itl": each.itl_ms,
        "e2e": each.e2e_ms,
        "client_wait": each.client_wait_ms,
    }
    return {name: sample[~np.isnan(sample)] for name, sample in samples.items()}


def _queue(trace: pa.Table) -> dict[str, NDArray[np.float64]]:
    """Times that the engine kept requests waiting, where it tells them of each request."""
    waits_ms = (floats(trace, "engine_scheduled_s") - floats(trace, "engine_queued_s")) * 1e3
    known = waits_ms[~np.isnan(waits_ms)]
    return {"queue": known} if len(known) else {}


def _rates(trace: pa.Table, each: Latencies, good: NDArray[np.bool_], among: NDArray[np.bool_]) -> dict[str, float]:
    """What one round has a duration for: its first send to its last response."""
    sent_s, end_s = (trace[name].to_numpy()[among] for name in ("sent_s", "end_s"))
    duration_s = float(end_s.max() - sent_s.min())
    completed = each.completed & among
    output, prompt = (float(np.nansum(floats(trace, name)[completed])) for name in ("output_tokens", "prompt_tokens"))
    totals = {
        "throughput_req_per_s": float(completed.sum()),
        "throughput_output_tokens_per_s": output,
        "throughput_total_tokens_per_s": prompt + output,
        "goodput_req_per_s": float((good & among).sum()),
        "mean_in_flight": float((end_s - sent_s).sum()),
    }
    rates = {name: total / duration_s if duration_s > 0 else 0.0 for name, total in totals.items()}
    return {"duration_s": duration_s, **rates}
