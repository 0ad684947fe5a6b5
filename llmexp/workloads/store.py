"""Workloads on disk: the tokens themselves. A replay needs neither the source data nor the tokenizer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from llmexp.errors import WorkloadError
from llmexp.workloads.audit import Audit
from llmexp.workloads.workload import SENDING, Workload, unpacked

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
    file = Path(path).expanduser()
    try:
        table = pq.read_table(file)
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file; expected a workload saved as Parquet") from None
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: not a Parquet file ({str(error)[:200]})") from None
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    if b"llmexp.workload" not in metadata:
        raise WorkloadError(f"{path}: a Parquet file, but not of a workload saved by llmexp")
    try:
        facts = _Facts.model_validate_json(metadata[b"llmexp.workload"])
        workload = _from_table(table, facts)
        _require_sound(workload)
        sha256 = workload.sha256
    except (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise WorkloadError(f"{path}: not as llmexp saves a workload ({type(error).__name__}: {reason})") from None
    if sha256 != facts.sha256:
        raise WorkloadError(f"{path}: the file changed: saved as {facts.sha256[:12]}…, it now has {sha256[:12]}…")
    return workload


class _Facts(BaseModel):
    """What the file says of the workload as a whole."""

    model_config = ConfigDict(strict=True)

    name: str
    recipe: dict[str, Any]
    request_fields: dict[str, Any]
    keep_text: bool
    sha256: str


def _from_table(table: pa.Table, facts: _Facts) -> Workload:
    prompts = table["prompt"].cast(pa.list_(pa.int32())).combine_chunks()
    if prompts.null_count or prompts.flatten().null_count:
        raise ValueError("prompts with nulls")
    lengths = np.diff(prompts.offsets.to_numpy()).astype(np.int32)
    return Workload(
        name=facts.name,
        recipe=facts.recipe,
        prompt_at=unpacked(prompts.flatten().to_numpy(), lengths),
        prompt_tokens=lengths,
        output_tokens=_column(table, "output_tokens", pa.int32()),
        arrivals_s=_column(table, "arrival_s", pa.float64()) if "arrival_s" in table.column_names else None,
        columns={
            name.removeprefix(COLUMN): _values(table, name) for name in table.column_names if name.startswith(COLUMN)
        },
        request_fields=facts.request_fields,
        keep_text=facts.keep_text,
    )


def _values(table: pa.Table, name: str) -> NDArray[Any]:
    kind = pa.float64() if name in (f"{COLUMN}think_s", f"{COLUMN}deadline_s") else None
    numbers = name.removeprefix(COLUMN) in (*SENDING, "answer_in")
    return _column(table, name, kind or (pa.int64() if numbers else table.schema.field(name).type))


def _column(table: pa.Table, name: str, kind: pa.DataType) -> NDArray[Any]:
    """A column of that type without nulls, shape `(n,)`."""
    column = table[name].cast(kind)
    if column.null_count:
        raise ValueError(f"nulls in {name}")
    values: NDArray[Any] = column.to_numpy()
    return values


def _require_sound(workload: Workload) -> None:
    """Raises ValueError for what no workload holds."""
    arrivals, columns = workload.arrivals_s, workload.columns
    if len(workload) and workload.output_tokens.min() < 1:
        raise ValueError("output_tokens below 1")
    if arrivals is not None and not (np.isfinite(arrivals).all() and (np.diff(arrivals, prepend=0.0) >= 0).all()):
        raise ValueError("arrivals that go back, or are no numbers")
    if "answer_in" in columns and not ((columns["answer_in"] >= -1) & (columns["answer_in"] < len(workload))).all():
        raise ValueError("answer_in of a request that there is not")
    for name in ("think_s", "deadline_s"):
        if name in columns and not (columns[name] >= 0).all():
            raise ValueError(f"{name} below 0")
