"""What runs and studies leave behind, typed: `summary.json` of a run, `study.json` of a study, other files
by name."""

import hashlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmexp.client.records import TRACE_SCHEMA
from llmexp.errors import ResultError
from llmexp.schema.accepted import explained
from llmexp.schema.section import Words
from llmexp.schema.study import Claim

CONFIG, WORKLOAD, TRACE = "config.yaml", "workload.json", "requests.parquet"
COUNTERS, ENGINE_LOG, SUMMARY = "counters.parquet", "engine.log", "summary.json"
STEPS, ENGINE_STEPS = "steps.parquet", "engine-steps.csv"  # the rounds' steps; all of the launch's, as they came
SPANS, TIMELINE = "spans.parquet", "timeline.json"  # of a simulated run: who was computed when
ANSWERS, ACCURACY = "answers.parquet", "accuracy.json"  # where the workload has right answers
STUDY, SEARCH, FIGURES = "study.json", "search.json", "figures"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


Record = TypeVar("Record", bound=_Record)


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
    client: Mapping[str, Any]  # empty where there was none: a simulated round


class RunResult(_Record):
    """One arm × cell × trial. `measures` are over all rounds; a failed run has none."""

    study: str
    name: str
    folder: Path
    status: Literal["complete", "failed", "killed", "refused"]  # refused: too little memory for it to start
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
    files: Mapping[str, str] = {}  # SHA-256 of the folder's other files by name
    error: str | None = None
    mlflow_run: str | None = None  # the id of its MLflow run

    def trace(self) -> pa.Table:
        """The request trace (`llmexp.client.records.TRACE_SCHEMA`), one row a request and round.

        Raises ResultError if there is none that can be read.
        """
        path = self.folder / TRACE
        try:
            trace = pq.read_table(path)
            trace = trace.select(TRACE_SCHEMA.names).cast(TRACE_SCHEMA)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise ResultError(f"{path}: not the trace of a run ({str(error).partition(chr(10))[0]})") from None
        numbers = pc.min_max(trace["request"]).as_py()
        if len(trace) and not 0 <= numbers["min"] <= numbers["max"] < len(trace):
            raise ResultError(f"{path}: not the trace of a run (requests number {numbers['min']} to {numbers['max']})")
        return trace


class PlannedRun(_Record):
    """A run that a study asks for: its name is that of its folder in the study's."""

    name: Annotated[str, Field(pattern=r"^[^/.\x00][^/\x00]*$"), Words("the name of a folder, no dot first")]
    arm: str
    cell: Mapping[str, str]
    trial: int
    position: int  # place in the order of execution within the trial


class StudyRecord(_Record):
    """What a study was asked. An arm is a value of the key `compare` ("on"); a cell maps the other keys to
    values.

    Where nothing is compared, `compare` and `baseline` are None and every swept key is part of the cell.
    """

    name: str
    identity: str = ""  # of this study's folder, which another of the same name does not share
    compare: str | None
    baseline: str | None
    arms: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]
    trials: int
    margin: float
    confidence: float
    claims: tuple[Claim, ...] = ()
    runs: tuple[PlannedRun, ...]
    overrides: tuple[str, ...] = ()  # the command line that asked for it, from which it can be repeated


class SearchRecord(_Record):
    """What a study that searched over `key` has found, in words and in values; None where the kind has no such value.

    `smallest` and `largest_failed` are a floor's; `knee`, `best`, `slo_limit`, `falls` and `dips` a saturation's
    (`llmexp.search`).
    """

    kind: Literal["floor", "saturation"]
    key: str
    found: str
    smallest: float | None = None
    largest_failed: float | None = None
    knee: float | None = None
    best: float | None = None
    slo_limit: float | None = None
    falls: bool | None = None
    dips: tuple[float, ...] = ()


def save_run(result: RunResult) -> None:
    """Writes `summary.json` whole or not at all."""
    _save(result, result.folder / SUMMARY)


def load_run(folder: str | Path) -> RunResult:
    """Reads back the folder of a run.

    Raises ResultError if the folder holds no readable summary.
    """
    try:
        summary = _load(RunResult, Path(folder) / SUMMARY, "a run summary")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ResultError(f"{folder}: no {SUMMARY} here; a run's folder holds one once the run has ended") from None
    return summary.model_copy(update={"folder": Path(folder)})


def is_intact(run: RunResult) -> bool:
    """Whether the files of a run's folder are those that it wrote."""
    return {CONFIG, TRACE} <= run.files.keys() and all(
        sha256_of(run.folder / name) == sha256 for name, sha256 in run.files.items()
    )


def sha256_of(file: Path) -> str | None:
    """The SHA-256 of a file; None where there is none."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    except FileNotFoundError:  # not any more: another process makes it anew
        return None


def save_study(record: StudyRecord, folder: str | Path) -> None:
    """Writes `study.json` into the study's folder, whole or not at all."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _save(record, Path(folder) / STUDY)


def identity(folder: str | Path) -> str:
    """The identity of a folder's study, a new one where there is none yet."""
    try:
        return load_study_record(folder).identity or uuid.uuid4().hex
    except ResultError:
        return uuid.uuid4().hex


def load_study_record(folder: str | Path) -> StudyRecord:
    """Reads back what a study was asked.

    Raises ResultError if the folder is no study's, with what it seems to be instead.
    """
    folder = Path(folder)
    try:
        return _load(StudyRecord, folder / STUDY, "a study's record")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ResultError(_not_a_study(folder)) from None


def save_search(record: SearchRecord, folder: str | Path) -> None:
    """Writes `search.json` into the study's folder, whole or not at all."""
    _save(record, Path(folder) / SEARCH)


def load_search(folder: str | Path) -> SearchRecord | None:
    """Reads back what a study's search has found; None if it did not search, or not to its end.

    Raises ResultError if the file is none of that kind.
    """
    try:
        return _load(SearchRecord, Path(folder) / SEARCH, "what a search has found")
    except FileNotFoundError:
        return None


def _not_a_study(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; give the folder of a study, such as runs/NAME"
    if (folder / SUMMARY).exists():
        return f"{folder}: this is a single run; give the folder of its study, {folder.resolve().parent}"
    studies = sorted(str(found.parent) for found in folder.glob(f"*/{STUDY}"))
    if studies:
        return f"{folder}: no {STUDY} here; the studies below it are {', '.join(studies)}"
    return f"{folder}: no {STUDY} here; run a study first: python -m llmexp -m cache=on,off study.trials=3"


def _save(record: _Record, target: Path) -> None:
    partial = target.with_suffix(f".{uuid.uuid4().hex}.partial")  # another process may write the same record now
    try:
        partial.write_text(record.model_dump_json(indent=2))
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from None  # a full disk is told without its file


def _load(kind: type[Record], path: Path, what: str) -> Record:
    """Reads a record back. Raises ResultError with the first key that does not fit, or what keeps it from being
    read."""
    try:
        content = path.read_bytes()
        return kind.model_validate_json(content)
    except PermissionError as error:
        raise ResultError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        try:
            wrong = explained(error, kind, json.loads(content))[0]
        except (ValueError, RecursionError) as broken:
            wrong = f"not JSON ({broken})"
    raise ResultError(f"{path}: not {what}; {wrong}")
