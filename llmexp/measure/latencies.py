"""Each request's latencies, from the trace."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Latencies:
    """Latencies in ms, shape `(n,)` by row of the trace, NaN where a request has none; `itl_ms` is of all
    gaps.

    Only completed requests have them. TTFT and e2e count from when the request was due. TPOT is the time from
    the first token to the last, over the tokens after the first: it needs a usage of two tokens or more, in
    two chunks or more. ITL is the time between a request's consecutive token chunks, which hold several
    tokens each where the server bundles them.
    """

    completed: NDArray[np.bool_]
    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    itl_ms: Floats
    client_wait_ms: Floats  # from when the request was due to when it was sent; of all requests


def latencies(trace: pa.Table) -> Latencies:
    """The latencies of a trace (`llmexp.client.records.TRACE_SCHEMA`)."""
    completed = pc.is_null(trace["error"]).to_numpy(zero_copy_only=False)
    intended_s, sent_s, first_s, last_s, tokens = (
        floats(trace, name) for name in ("intended_s", "sent_s", "first_token_s", "last_token_s", "output_tokens")
    )
    num_chunks = pc.list_value_length(trace["chunk_s"]).to_numpy(zero_copy_only=False)
    some = np.where(completed, 1.0, np.nan)
    paced = np.where((tokens > 1) & (num_chunks > 1), tokens - 1, np.nan)
    return Latencies(
        completed=completed,
        ttft_ms=(first_s - intended_s) * 1e3 * some,
        tpot_ms=(last_s - first_s) * 1e3 / paced * some,
        e2e_ms=(last_s - intended_s) * 1e3 * some,
        itl_ms=_gaps_s(trace.filter(pa.array(completed))["chunk_s"]) * 1e3,
        client_wait_ms=(sent_s - intended_s) * 1e3,
    )


def floats(trace: pa.Table, name: str) -> Floats:
    """A column of a trace as numbers, NaN where it holds none."""
    values: Floats = pc.cast(trace[name], pa.float64()).to_numpy(zero_copy_only=False)
    return values


def _gaps_s(chunks: pa.ChunkedArray) -> Floats:
    """Differences between neighbours within each list."""
    times: NDArray[Any] = pc.list_flatten(chunks).to_numpy()
    owners: NDArray[Any] = pc.list_parent_indices(chunks).to_numpy()
    gaps: Floats = np.diff(times)[owners[1:] == owners[:-1]]
    return gaps
