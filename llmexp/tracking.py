"""MLflow: one store, one parent run a study, one child a run. Nothing here runs while requests are in flight."""

import errno
import fcntl
import functools
import importlib.metadata
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from llmexp import interrupt, liveness
from llmexp.errors import ConfigError, ResultError, TrackingError
from llmexp.reachable import require_answer
from llmexp.results import FIGURES, Percentile, RunResult, load_run
from llmexp.schema.config import Config, TrackingConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

P = ParamSpec("P")
T = TypeVar("T")

STATUS = {"complete": "FINISHED", "refused": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
OLDEST = "3.10"
_VALID, _WHY_NOT = "llmexp.valid", "llmexp.invalid_reasons"  # tags that tell how a run ended
_LONGEST_TAG = 5000
TOLD_LATER = "The next llmexp command with this store tells it, or: python -m llmexp doctor --mend"
# What MLflow's errors hold, and what that means to a user.
_REASONS = {
    "database is locked": "another program locks its database; end that one (fuser FILE.db names it)",
    "database or disk is full": "the disk of its database is full; free some space",
    "No space left on device": "its disk is full; free some space",
    "disk I/O error": "the disk of its database fails or is full; free some space",
    "attempt to write a readonly database": "its database is read-only; make it writable",
    "unable to open database file": "its database cannot be opened; look at its folder's permissions",
    "malformed": "its database is broken; give a new one by tracking.dir, and study.name=NAME logs the study anew",
    "file is not a database": "its database is none; give a new one by tracking.dir",
    "Connection refused": "no server answers at its address; start it again",
    "Max retries exceeded": "no server answers at its address; start it again",
}


@dataclass(frozen=True)
class TrackedRun:
    """An open MLflow run."""

    client: "MlflowClient"
    run_id: str


def store_uri(config: TrackingConfig) -> str:
    """The tracking URI: the server's, or the absolute one of the SQLite store under `dir`."""
    return config.uri or f"sqlite:///{Path(config.dir).absolute() / 'mlflow.db'}"


def ui_command(config: TrackingConfig) -> str:
    """The shell command that shows this store in a browser."""
    if config.uri and not config.uri.startswith("sqlite:"):
        return f"open {config.uri}"
    return f"mlflow ui --backend-store-uri {store_uri(config)}"


def require_ready(config: TrackingConfig) -> None:
    """Refuses a store that runs could not be told to, as far as can be seen at once. Raises ConfigError for an MLflow
    that we do not know how to use, which pip does not keep anybody from, and TrackingError for a server that is not
    there."""
    if not config.enabled:
        return
    _require_version()
    if config.uri is not None:
        require_answer(config.uri)


def _require_version() -> None:
    version = importlib.metadata.version("mlflow")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < tuple(map(int, OLDEST.split("."))):
        raise ConfigError(
            f"tracking: this Python has MLflow {version}; {OLDEST} or newer is needed: pip install 'mlflow>={OLDEST}', "
            "or set tracking.enabled=false"
        )


def open_store(config: TrackingConfig) -> tuple["MlflowClient", str]:
    """A client and the experiment's id. A new SQLite store is made by one process while others wait.

    Raises ConfigError if there can be no such store, TrackingError if it cannot be written or reached now.
    """
    require_ready(config)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "4")  # 30 s; what is unlogged then is logged later
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    for noisy in ("mlflow", "mlflow.store.db.utils"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)  # it logs a traceback of what it raises
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if config.uri is not None:
            client = MlflowClient(config.uri)
            return client, _experiment(client, config.experiment, None)
        folder = Path(config.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make_database(folder / "mlflow.db", folder / "artifacts")
            client = MlflowClient(store_uri(config))
            return client, _experiment(client, config.experiment, (folder / "artifacts").as_uri())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrackingError(_reason(error)) from None
        raise ConfigError(f"tracking.dir: got {config.dir!r}, which cannot be written ({error.strerror})") from None
    except SQLAlchemyError as error:
        raise TrackingError(f"{_asked(config)}{_reason(error)}") from None
    except MlflowException as error:
        if config.uri is None or "API request" in str(error) or "OperationalError" in str(error):
            raise TrackingError(f"{_asked(config)}{_reason(error)}") from None
        raise ConfigError(f"tracking.uri: got {config.uri!r}; {str(error).splitlines()[0]}") from None


def _asked(config: TrackingConfig) -> str:
    return "" if config.uri is None else f"tracking.uri: got {config.uri}; "


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Words the failure to log what is safe on disk. Raises TrackingError."""
    try:
        with _reached_by_all():
            yield
    except TrackingError as error:
        raise TrackingError(f"{folder} holds all that was measured, but {error}") from None


@contextmanager
def _reached_by_all() -> Iterator[None]:
    """Words whatever MLflow raises where it cannot be reached or written. Raises TrackingError."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with interrupt.held():  # cut off in there, a signal may be swallowed, or a transaction stay open
            yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise TrackingError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Why MLflow could not be told, and what to do about it, from what it raises."""
    said = str(error)
    for sign, reason in _REASONS.items():
        if sign in said:
            return f"MLflow could not be told: {reason}"
    return f"MLflow could not be told: {said.splitlines()[0] if said else type(error).__name__}"


def _reached(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with _reached_by_all():
            return function(*args, **kwargs)

    return wrapper


def _make_database(database: Path, artifacts: Path) -> None:
    """Makes an SQLite store, whole or not at all: MLflow's migrations cannot go on where they were cut off."""
    if database.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    partial = database.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    store: Any = SqlAlchemyStore(f"sqlite:///{partial}", artifacts.as_uri())  # type: ignore[no-untyped-call]
    store.engine.dispose()
    partial.replace(database)


def _experiment(client: "MlflowClient", name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        # Of the kinds that MLflow's UI knows, the one whose list of runs shows metrics and parameters.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return str(client.create_experiment(name, artifacts, tags=kind))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process may have made it meanwhile
            if found is None:
                raise
    return str(found.experiment_id)


@_reached
def start_study(config: TrackingConfig, folder: Path, name: str, identity: str, command: str) -> TrackedRun:
    """Opens the parent run of a study, the one it had before if it is resumed.

    A study of the same name in another folder, which may be another user's, has another `identity`.
    """
    client, experiment = open_store(config)
    mend(client, experiment)
    place = {"llmexp.process": liveness.mark(), "llmexp.folder": str(folder)}
    same = f"tags.`llmexp.kind` = 'study' and tags.`llmexp.study_id` = '{identity}'"
    for earlier in client.search_runs([experiment], same, max_results=1):
        client.update_run(earlier.info.run_id, status="RUNNING")
        for said in earlier.data.tags.keys() & {_VALID, _WHY_NOT}:  # of how it ended before, which no longer holds
            client.delete_tag(earlier.info.run_id, said)
        set_tags(TrackedRun(client, earlier.info.run_id), place)
        return TrackedRun(client, earlier.info.run_id)
    tags = {"llmexp.kind": "study", "llmexp.study": name, "llmexp.study_id": identity, "llmexp.command": command}
    tags |= place
    return TrackedRun(client, client.create_run(experiment, run_name=name, tags=tags).info.run_id)


@_reached
def start_run(config: Config, study: str, name: str) -> TrackedRun:
    """Opens the run of a job, under its study's parent where it has one; an earlier attempt is deleted."""
    from mlflow.entities import Param

    client, experiment = open_store(config.tracking)
    tags = {
        "llmexp.kind": "run",
        "llmexp.study": study,
        "llmexp.trial": str(config.run.trial),
        "llmexp.process": liveness.mark(),
        "llmexp.folder": str(Path(config.runs_dir).absolute() / study / name),
    }
    if config.run.parent_run_id is None:
        mend(client, experiment)
    else:
        tags["mlflow.parentRunId"] = config.run.parent_run_id
        same = f"tags.`mlflow.parentRunId` = '{config.run.parent_run_id}' and attributes.run_name = '{name}'"
        for earlier in client.search_runs([experiment], same):
            client.delete_run(earlier.info.run_id)
    run_id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
    client.log_batch(run_id, params=[Param(key, value) for key, value in parameters(config).items()])
    return TrackedRun(client, run_id)


def log_simulation(config: Config, study: str, title: str, measures: Mapping[str, float], folder: Path) -> None:
    """Logs a study of the simulator as one run, with its files.

    Raises ConfigError or TrackingError.
    """
    from mlflow.entities import Metric, Param

    assert config.simulation is not None
    with told(folder):
        client, experiment = open_store(config.tracking)
        tags = {
            "llmexp.kind": "simulation",
            "llmexp.study": study,
            "llmexp.simulated": "true",
            "mlflow.note.content": f"Simulated: {title}",
        }
        run_id = client.create_run(experiment, run_name=study, tags=tags).info.run_id
        knobs = {f"simulation.{key}": str(value) for key, value in config.simulation.model_dump().items()}
        params = [Param(key, value) for key, value in (parameters(config) | knobs).items()]
        now = int(time.time() * 1000)
        metrics = [Metric(re.sub(r"[^\w. /-]", "", name), value, now, 0) for name, value in measures.items()]
        client.log_batch(run_id, params=params, metrics=metrics)
        client.log_artifacts(run_id, str(folder))
        client.set_terminated(run_id, "FINISHED")


def parameters(config: Config) -> dict[str, str]:
    """What identifies a run among its siblings, under the names of the command line; unset knobs are left out."""
    values: dict[str, Any] = {
        "model": config.model.name,
        "gpu": config.gpu.name,
        "cache": config.cache.name,
        "workload": config.workload.kind,
        "load": config.load.kind,
        "engine": config.engine.kind,
        "max_num_seqs": config.max_num_seqs,
        "rounds": config.rounds,
        "seed": config.seed,
        "arm": config.arm,
        "trial": config.run.trial,
        "gpu.dtype": config.gpu.dtype,
        "gpu.tensor_parallel_size": config.gpu.tensor_parallel_size,
        **_leaves("kv", config.kv),
        **_leaves("workload", config.workload),
        **_leaves("load", config.load),
        **_leaves("scheduler", config.scheduler),
        **_leaves("slo", config.slo),
        **config.run.cell,
    }
    return {key: str(value) for key, value in values.items() if value is not None}


def _leaves(prefix: str, section: Any) -> dict[str, Any]:
    plain = (str, int, float, bool)
    return {
        f"{prefix}.{key}": value
        for key, value in section.model_dump().items()
        if isinstance(value, plain) and key != "kind"
    }


def _values(measures: Mapping[str, float], percentiles: Mapping[str, Percentile]) -> dict[str, float]:
    """Measures, and the percentiles that their samples support."""
    supported = {name: one.value for name, one in percentiles.items() if one.value is not None}
    return {**measures, **supported}


@_reached
def finish_run(run: TrackedRun, result: RunResult) -> None:
    """Logs a run's measures, one step a round, and its files, and closes it."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    per_round = [
        Metric(f"round/{name}", value, now, item.index)
        for item in result.rounds
        for name, value in _values(item.measures, item.percentiles).items()
    ]
    values = _values(result.measures, result.percentiles)
    overall = [Metric(name, value, now, 0) for name, value in values.items()]
    seconds = [Metric(f"time/{name}_s", value, now, 0) for name, value in result.timings_s.items()]
    metrics = [*overall, *per_round, *seconds]
    for start in range(0, len(metrics), 1000):  # the most that one batch may hold
        run.client.log_batch(run.run_id, metrics=metrics[start : start + 1000])
    set_tags(
        run,
        {
            _VALID: str(result.valid).lower(),
            _WHY_NOT: "; ".join(result.invalid_reasons),
            "llmexp.arm": result.arm,
            "llmexp.fingerprint": result.fingerprint,
            "llmexp.simulated": str(result.simulated).lower(),
            "llmexp.workload_sha256": result.workload_sha256,
            **{f"env.{name}": value for name, value in result.environment.get("variables", {}).items()},
        },
    )
    run.client.log_artifacts(run.run_id, str(result.folder))
    run.client.set_terminated(run.run_id, STATUS[result.status])


@_reached
def logged_runs(study: TrackedRun) -> dict[str, tuple[str, str]]:
    """The runs of a study that are logged to their end, by name, with status and fingerprint."""
    experiment = study.client.get_run(study.run_id).info.experiment_id
    whole = f"tags.`mlflow.parentRunId` = '{study.run_id}' and attributes.status != 'RUNNING'"
    found: dict[str, tuple[str, str]] = {}
    token = None
    while True:
        page = study.client.search_runs([experiment], whole, page_token=token)
        found |= {run.info.run_name: (run.info.status, run.data.tags.get("llmexp.fingerprint", "")) for run in page}
        if not (token := page.token):
            return found


@_reached
def log_again(study: TrackedRun, tracking: TrackingConfig, result: RunResult) -> None:
    """Logs a run from what it left on disk, in place of what an interrupted attempt has logged."""
    place = {**result.config["run"], "parent_run_id": study.run_id}
    config = Config.model_validate({**result.config, "run": place, "tracking": tracking.model_dump()})
    finish_run(start_run(config, result.study, result.name), result)


@_reached
def log_alone(result: RunResult, tracking: TrackingConfig) -> int:
    """Logs a run that belongs to no study from what it left on disk. Returns 0 if MLflow has it already, else 1."""
    client, experiment = open_store(tracking)
    same = f"tags.`llmexp.fingerprint` = '{result.fingerprint}' and attributes.run_name = '{result.name}'"
    if client.search_runs([experiment], same, max_results=1):
        return 0
    place = {**result.config["run"], "parent_run_id": None}
    config = Config.model_validate({**result.config, "run": place, "tracking": tracking.model_dump()})
    finish_run(start_run(config, result.study, result.name), result)
    return 1


@_reached
def finish_study(run: TrackedRun, status: str, note: str, folder: Path, ended_s: float) -> None:
    """Puts the study's table on the parent's page, its files beside it, and closes it, as of `ended_s` (Unix time)."""
    set_tags(run, {"mlflow.note.content": note})
    whole = (path for path in folder.iterdir() if path.is_file() and path.suffix != ".partial")
    for file in sorted(whole):
        run.client.log_artifact(run.run_id, str(file))
    if (folder / FIGURES).is_dir():
        run.client.log_artifacts(run.run_id, str(folder / FIGURES), FIGURES)
    run.client.set_terminated(run.run_id, STATUS[status], end_time=round(1000 * ended_s))


@_reached
def close_run(run: TrackedRun, status: str, reason: str) -> None:
    """Closes the run of a job that could not be recorded."""
    set_tags(run, {_VALID: "false", _WHY_NOT: f"{status}: {reason}"})
    run.client.set_terminated(run.run_id, STATUS[status])


@_reached
def close_study(run: TrackedRun, status: str) -> None:
    """Closes the parent run of a study that did not get to its report, and the runs that it left open."""
    mend(run.client, run.client.get_run(run.run_id).info.experiment_id, also_of=liveness.mark())
    run.client.set_terminated(run.run_id, STATUS[status])


@dataclass(frozen=True)
class LeftOpen:
    """A run, or a study, that MLflow shows as running. `gone`: whether its process has ended; None if that cannot be
    told here."""

    run_id: str
    name: str
    kind: str
    study: str
    folder: str
    process: str
    gone: bool | None


@_reached
def left_open(client: "MlflowClient", experiment: str) -> list[LeftOpen]:
    """All runs of llmexp's that MLflow shows as running."""
    found: list[LeftOpen] = []
    token = None
    while True:
        page = client.search_runs([experiment], "attributes.status = 'RUNNING'", page_token=token)
        for run in page:
            if "llmexp.kind" in run.data.tags:
                kind, study, folder, process = (
                    run.data.tags.get(f"llmexp.{name}", "") for name in ("kind", "study", "folder", "process")
                )
                gone = liveness.is_gone(process)
                found.append(LeftOpen(run.info.run_id, run.info.run_name, kind, study, folder, process, gone))
        if not (token := page.token):
            return found


@_reached
def mend(client: "MlflowClient", experiment: str, also_of: str | None = None) -> list[LeftOpen]:
    """Closes the runs whose process has ended, or is `also_of`: as their folders tell, else as killed. Returns them."""
    mended = [
        run for run in left_open(client, experiment) if run.gone or (run.process == also_of and run.kind != "study")
    ]
    for run in mended:
        _mend(TrackedRun(client, run.run_id), run)
    return mended


def _mend(run: TrackedRun, found: LeftOpen) -> None:
    try:
        result = load_run(found.folder)
    except ResultError:
        result = None
    if result is not None and result.mlflow_run == run.run_id:
        finish_run(run, result)
    else:
        close_run(run, "killed", f"its process ended without a word ({found.process})")


def set_tags(run: TrackedRun, tags: Mapping[str, str]) -> None:
    """Sets tags in one request, cut to what MLflow stores."""
    from mlflow.entities import RunTag

    run.client.log_batch(run.run_id, tags=[RunTag(key, value[:_LONGEST_TAG]) for key, value in tags.items()])
