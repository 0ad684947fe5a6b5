"""What a run leaves behind, typed: `summary.json` of its folder, and the folder's other files by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from llmexp.errors import ResultError

CONFIG, WORKLOAD, TRACE = "config.yaml", "workload.json", "requests.parquet"
COUNTERS, ENGINE_LOG, SUMMARY = "counters.parquet", "engine.log", "summary.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Percentile(_Record):
    """A percentile with its distribution-free interval; `value` is None where `n` cannot support it."""

    value: float | None
    low: float | None
    high: float | None
    n: int


class RoundResult(_Record):
    """One replay of the workload. `percentiles` maps a measure such as `ttft_ms_p95` to its interval."""

    index: int
    valid: bool
    invalid_reasons: tuple[str, ...]
    measures: Mapping[str, float]
    percentiles: Mapping[str, Percentile]
    contract: Mapping[str, Any]
    client: Mapping[str, Any]


class RunResult(_Record):
    """One arm × cell × trial. `measures` are over all rounds; a failed run has none."""

    study: str
    name: str
    folder: Path
    status: Literal["complete", "failed", "killed"]
    valid: bool
    invalid_reasons: tuple[str, ...]
    simulated: bool
    arm: str
    cell: Mapping[str, str]
    trial: int
    position: int  # place in the order of execution within the trial
    seed: int
    fingerprint: str
    workload_sha256: str
    measures: Mapping[str, float]
    percentiles: Mapping[str, Percentile]
    rounds: tuple[RoundResult, ...]
    engine: Mapping[str, Any]  # what the engine said of itself: version, block size, KV capacity, …
    environment: Mapping[str, Any]  # hardware and software versions
    timings_s: Mapping[str, float]  # engine start-up, llmexp's own overhead, …
    config: Mapping[str, Any]  # the resolved config
    error: str | None = None

    def trace(self) -> pa.Table:
        """The request trace (`llmexp.client.records.TRACE_SCHEMA`), one row a request and round."""
        return pq.read_table(self.folder / TRACE)


def save_run(result: RunResult) -> None:
    """Writes `summary.json` whole or not at all."""
    target = result.folder / SUMMARY
    partial = target.with_suffix(".partial")
    partial.write_text(result.model_dump_json(indent=2))
    partial.replace(target)


def load_run(folder: str | Path) -> RunResult:
    """Reads back the folder of a run.

    Raises ResultError if the folder holds no readable summary.
    """
    path = Path(folder) / SUMMARY
    try:
        summary = RunResult.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"{folder}: no {SUMMARY} here; a run's folder holds one once the run has ended") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ResultError(f"{path}: not a run summary ({where}: {error.errors()[0]['msg']})") from None
    return summary.model_copy(update={"folder": Path(folder)})
