"""The workers' records, gathered into one trace."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmexp.client.ledger import UNKNOWN, Records
from llmexp.client.records import TRACE_SCHEMA


def gather(records: Mapping[int, Records], *, round_index: int, origin: float) -> pa.Table:
    """The trace of a round (TRACE_SCHEMA), in the workload's order, from each worker's records."""
    parts = [_table(part, worker, round_index, origin) for worker, part in records.items()]
    if not parts:
        return TRACE_SCHEMA.empty_table()
    table = pa.concat_tables(parts) if len(parts) > 1 else parts[0]
    requests = table["request"].to_numpy()
    if (np.diff(requests) < 0).any():
        table = table.take(np.argsort(requests, kind="stable"))
    return table.combine_chunks()


def _table(records: Records, worker: int, round_index: int, origin: float) -> pa.Table:
    rows, n = records.rows, len(records.rows)
    ends = np.cumsum(rows["num_chunks"], dtype=np.int64)
    chunks = records.chunks - origin
    some = rows["num_chunks"] > 0
    first, last = np.zeros(n), np.zeros(n)
    first[some] = chunks[ends[some] - rows["num_chunks"][some]]
    last[some] = chunks[ends[some] - 1]
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    columns: dict[str, Any] = {
        "round": np.full(n, round_index, np.int32),
        "request": np.ascontiguousarray(rows["request"]),
        "worker": np.full(n, worker, np.int16),
        **{f"{name}_s": rows[name] - origin for name in ("intended", "sent", "end")},
        "first_token_s": pa.array(first, mask=~some),
        "last_token_s": pa.array(last, mask=~some),
        "chunk_s": pa.ListArray.from_arrays(offsets, pa.array(chunks)),
        **_engine_times(records.engine_times, n, origin),
        **{name: _known(rows[name]) for name in ("prompt_tokens", "cached_tokens", "output_tokens")},
        "finish_reason": pa.array(records.finish_reasons, pa.string()).dictionary_encode(),
        **{
            name: pa.array([values.get(i) for i in range(n)], pa.string())
            for name, values in (
                ("error", records.errors),
                ("text", records.texts),
                ("logprobs", records.logprobs),
            )
        },
    }
    return pa.table({name: columns[name] for name in TRACE_SCHEMA.names}).cast(TRACE_SCHEMA)


def _engine_times(times: Mapping[int, tuple[float, float, float, float]], n: int, origin: float) -> dict[str, pa.Array]:
    values = np.zeros((n, 4))
    unknown = np.ones(n, bool)
    for position, known in times.items():
        values[position] = known
        unknown[position] = False
    names = ("engine_queued_s", "engine_scheduled_s", "engine_first_token_s", "engine_last_token_s")
    return {name: pa.array(values[:, k] - origin, mask=unknown) for k, name in enumerate(names)}


def _known(counts: NDArray[np.int32]) -> pa.Array:
    counts = np.ascontiguousarray(counts)
    return pa.array(counts, mask=counts == UNKNOWN)
