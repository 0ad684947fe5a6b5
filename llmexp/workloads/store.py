"""Workloads on disk: the tokens themselves. A replay needs neither the source data nor the tokenizer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmexp.errors import WorkloadError
from llmexp.workloads.audit import Audit
from llmexp.workloads.workload import Workload, unpacked

ROWS_PER_GROUP = 1024
COLUMN = "column."


def describe(workload: Workload, account: Audit) -> dict[str, Any]:
    """The content of `workload.json`: recipe, hash and audit."""
    return {
        "name": workload.name,
        "sha256": workload.sha256,
        "recipe": dict(workload.recipe),
        "audit": account.to_json(),
    }


def save(workload: Workload, path: str | Path) -> None:
    """Writes a workload as one Parquet file, whole or not at all, one row a request."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    facts = {
        "name": workload.name,
        "recipe": dict(workload.recipe),
        "request_fields": dict(workload.request_fields),
        "keep_text": workload.keep_text,
        "sha256": workload.sha256,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = None
    for batch in _batches(workload):
        if writer is None:
            schema = batch.schema.with_metadata({"llmexp.workload": json.dumps(facts)})
            writer = pq.ParquetWriter(partial, schema, compression="zstd")
        writer.write_batch(batch)
    if writer is None:
        raise WorkloadError(f"workload {workload.name}: no requests to save")
    writer.close()
    partial.replace(target)


def _batches(workload: Workload) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(workload), ROWS_PER_GROUP):
        rows = slice(start, min(start + ROWS_PER_GROUP, len(workload)))
        prompts = [workload.prompt_at(i) for i in range(rows.start, rows.stop)]
        ends = np.cumsum([0, *map(len, prompts)], dtype=np.int32)
        arrays: dict[str, Any] = {
            "prompt": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(prompts), pa.int32())),
            "output_tokens": pa.array(workload.output_tokens[rows]),
        }
        if workload.arrivals_s is not None:
            arrays["arrival_s"] = pa.array(workload.arrivals_s[rows])
        for name, values in workload.columns.items():
            arrays[COLUMN + name] = pa.array(values[rows].tolist() if values.dtype == object else values[rows])
        yield pa.RecordBatch.from_pydict(arrays)


def load(path: str | Path) -> Workload:
    """Reads a saved workload and checks its hash.

    Raises WorkloadError if the file is missing, is no saved workload or holds something else than was saved.
    """
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file; expected a workload saved as Parquet") from None
    except pa.ArrowInvalid as error:
        raise WorkloadError(f"{path}: not a Parquet file ({error})") from None
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    if b"llmexp.workload" not in metadata:
        raise WorkloadError(f"{path}: a Parquet file, but not of a workload saved by llmexp")
    facts = json.loads(metadata[b"llmexp.workload"])
    prompts = table["prompt"].combine_chunks()
    lengths = np.diff(prompts.offsets.to_numpy()).astype(np.int32)
    workload = Workload(
        name=facts["name"],
        recipe=facts["recipe"],
        prompt_at=unpacked(prompts.flatten().to_numpy(), lengths),
        prompt_tokens=lengths,
        output_tokens=table["output_tokens"].to_numpy(),
        arrivals_s=table["arrival_s"].to_numpy() if "arrival_s" in table.column_names else None,
        columns={
            name.removeprefix(COLUMN): table[name].to_numpy() for name in table.column_names if name.startswith(COLUMN)
        },
        request_fields=facts["request_fields"],
        keep_text=facts["keep_text"],
    )
    if workload.sha256 != facts["sha256"]:
        raise WorkloadError(
            f"{path}: the file changed: saved as {facts['sha256'][:12]}…, it now has {workload.sha256[:12]}…"
        )
    return workload
