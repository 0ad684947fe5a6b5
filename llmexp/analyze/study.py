"""A finished study: its record and its runs, from a folder or from MLflow."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmexp.analyze.pairs import Excluded, choose_arms, exclude, in_design_order, pair_runs
from llmexp.errors import ResultError, TrackingError
from llmexp.results import (
    SEARCH,
    STUDY,
    SUMMARY,
    PlannedRun,
    RunResult,
    SearchRecord,
    StudyRecord,
    load_run,
    load_search,
    load_study_record,
)
from llmexp.run_lock import is_taken
from llmexp.schema.section import FOLDER_NAME

if TYPE_CHECKING:
    import pandas as pd

    from llmexp.analyze.compare import Comparison

BEING_MADE = "being made at the moment"


@dataclass(frozen=True)
class Study:
    """What was asked and what came of it. `missing` maps planned runs without a readable summary to the reason;
    `origin` is how to name the study to `llmexp report`, by default its folder."""

    folder: Path
    record: StudyRecord
    runs: tuple[RunResult, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    search: SearchRecord | None = None  # what it found, if it searched
    origin: tuple[str, ...] = ()

    @cached_property
    def excluded(self) -> tuple[Excluded, ...]:
        """Planned runs that no comparison uses, with the reasons."""
        return exclude(self.record, self.runs, self.missing)

    @property
    def swept(self) -> dict[str, tuple[str, ...]]:
        """Every swept key with its values, in the design's order."""
        values: dict[str, dict[str, None]] = {}
        for plan in in_design_order(self.record):
            for key, value in {**self._arm(plan), **plan.cell}.items():
                values.setdefault(key, {})[value] = None
        return {key: tuple(found) for key, found in values.items()}

    def _arm(self, run: RunResult | PlannedRun) -> dict[str, str]:
        return {self.record.compare: run.arm} if self.record.compare else {}

    def compare(self, factor: str | None = None, baseline: str | None = None) -> "Comparison":
        """Every arm of `factor` against the baseline, in every cell of the other swept keys.

        By default the study's own key and baseline. Arms of a pair share the trial and the workload's hash.

        Raises ConfigError if `factor` was not swept or `baseline` is none of its values.
        """
        from llmexp.analyze.compare import Comparison, compare_pairs, levels_of

        record = self.record
        factor = factor or record.compare
        if factor == record.compare:
            baseline = baseline or record.baseline
        if factor is not None:
            factor, baseline = choose_arms(factor, baseline, self.swept)
        pairings = (
            pair_runs(record, self.runs, self.excluded, factor, baseline) if factor and baseline is not None else ()
        )
        rows, tested = compare_pairs(pairings, confidence=record.confidence, margin=record.margin)
        return Comparison(
            study=record.name,
            factor=factor,
            baseline=baseline,
            trials=record.trials,
            confidence=record.confidence,
            margin=record.margin,
            kinds=frozenset("simulated" if run.simulated else "measured" for run in self.runs),
            rows=rows,
            levels=levels_of(record, self.runs, self.excluded, factor),
            pairings=pairings,
            excluded=self.excluded,
            throttled=tuple(run.name for run in self.runs if run.engine.get("throttled")),
            tested=tested,
        )

    def to_pandas(self) -> "pd.DataFrame":
        """One line a run: swept values, validity and the measures over all rounds."""
        import pandas as pd

        barred = {one.run: "; ".join(one.reasons) for one in self.excluded}
        lines: list[dict[str, Any]] = [
            {"run": run.name, **self._arm(run), **run.cell}
            | {"trial": run.trial, "position": run.position, "seed": run.seed, "status": run.status}
            | {"used": run.name not in barred, "left_out_because": barred.get(run.name)}
            | {"simulated": run.simulated, "throttled": bool(run.engine.get("throttled"))}
            | {"workload_sha256": run.workload_sha256}
            | {**{name: one.value for name, one in run.percentiles.items()}, **run.measures}
            for run in self.runs
        ]
        return pd.DataFrame(lines)


def load_study(path: str | Path) -> Study:
    """Reads a study's folder, as a multirun leaves it.

    Raises ResultError if the folder holds no study or no run of it has ended.
    """
    folder = Path(path)
    record = load_study_record(folder)
    runs, missing = [], {}
    for plan in record.runs:
        try:
            runs.append(load_run(folder / plan.name))
        except ResultError as error:
            missing[plan.name] = _why_missing(folder / plan.name, error)
    return _study(folder, record, runs, missing)


def _why_missing(folder: Path, error: ResultError) -> str:
    if is_taken(folder):
        return BEING_MADE
    return str(error) if folder.is_dir() else "not run"


def from_mlflow(
    experiment: str, tracking_uri: str, study: str | None = None, folder: str | Path | None = None
) -> Study:
    """Builds a study from MLflow alone: the runs may have been made on other machines.

    `study` names one of the experiment's studies where it holds several; the newest parent run of that name
    counts. Artifacts are put into `folder`, by default a new temporary one.

    Raises TrackingError if MLflow cannot be asked, ResultError if there is no such experiment or study, or several
    studies and no name.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return _from_mlflow(_client(tracking_uri), experiment, tracking_uri, study, folder)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise TrackingError(f"{tracking_uri}: MLflow cannot be asked ({str(error).partition(chr(10))[0]})") from None


def _client(tracking_uri: str) -> Any:
    """A client of a store that is there. Raises ResultError if its database is not; MLflow would make a new one."""
    from mlflow import MlflowClient

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    if tracking_uri.startswith("sqlite:") and not Path(urlsplit(tracking_uri).path[1:]).is_file():
        raise ResultError(f"{tracking_uri}: no such database; give its place by --tracking-uri")
    return MlflowClient(tracking_uri=tracking_uri)


def _from_mlflow(
    client: Any, experiment: str, tracking_uri: str, study: str | None, folder: str | Path | None
) -> Study:
    found = client.get_experiment_by_name(experiment)
    if found is None:
        names = ", ".join(one.name for one in client.search_experiments())
        raise ResultError(f"{tracking_uri}: no experiment {experiment} (experiments: {names})")
    parents: dict[str, str] = {}  # name to run id, newest first
    for parent in _search(client, found.experiment_id, "tags.`llmexp.kind` = 'study'"):
        parents.setdefault(parent.info.run_name, parent.info.run_id)
    if not parents:
        raise ResultError(f"{tracking_uri}: experiment {experiment} holds no study (no run tagged llmexp.kind=study)")
    if study not in parents and (study or len(parents) > 1):
        problem = f"no study {study}" if study else f"{len(parents)} studies, of which one must be named"
        raise ResultError(f"{tracking_uri}: experiment {experiment} has {problem} (studies: {', '.join(parents)})")
    name = study or next(iter(parents))
    if not re.match(FOLDER_NAME, name):
        raise ResultError(f"{tracking_uri}: a study of the name {name!r}, which is no folder's")
    target = Path(folder or tempfile.mkdtemp(prefix="llmexp-")) / name
    target.mkdir(parents=True, exist_ok=True)
    for artifact in client.list_artifacts(parents[name]):
        if artifact.path in (STUDY, SEARCH):
            client.download_artifacts(parents[name], artifact.path, str(target))
    record = load_study_record(target)
    runs: dict[str, RunResult] = {}
    for child in _search(client, found.experiment_id, f"tags.`mlflow.parentRunId` = '{parents[name]}'"):
        here = target / child.info.run_id
        here.mkdir(exist_ok=True)
        for artifact in client.list_artifacts(child.info.run_id):
            if not artifact.is_dir:
                client.download_artifacts(child.info.run_id, artifact.path, str(here))
        if (here / SUMMARY).exists():
            run = load_run(here)
            runs.setdefault(run.name, run)  # of a run that was repeated, the newest counts
    missing = {plan.name: "not run, or not logged to MLflow" for plan in record.runs if plan.name not in runs}
    made = _study(target, record, [runs[plan.name] for plan in record.runs if plan.name in runs], missing)
    return replace(made, origin=("--mlflow-experiment", experiment, "--study", name, "--tracking-uri", tracking_uri))


def _search(client: Any, experiment_id: str, condition: str) -> list[Any]:
    """Every matching run, newest first."""
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, order_by=["start_time DESC"], page_token=token)
        runs.extend(page)
        if not (token := page.token):
            return runs


def _study(folder: Path, record: StudyRecord, found: Sequence[RunResult], missing: Mapping[str, str]) -> Study:
    """Runs take the places that the record gives them: one may have been made when other keys were swept."""
    plans = {plan.name: plan for plan in record.runs}
    runs = [run.model_copy(update={"arm": plans[run.name].arm, "cell": plans[run.name].cell}) for run in found]
    if not runs:
        advice = "start the study again with the command that made it, and it goes on where it stopped"
        if BEING_MADE in missing.values():
            advice = "the first is still being made"
        raise ResultError(f"{folder}: none of the {len(record.runs)} planned runs has left a {SUMMARY}; {advice}")
    return Study(folder, record, tuple(runs), missing, load_search(folder))
