"""Tells MLflow of what is on disk: runs that it has missed, or that were made where its server is not reached."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmexp import results, tracking
from llmexp.arguments import Arguments
from llmexp.compose import compose
from llmexp.errors import ConfigError, ResultError, TrackingError
from llmexp.progress import console
from llmexp.run_lock import alone
from llmexp.schema.config import TrackingConfig
from llmexp.words import count

if TYPE_CHECKING:
    from llmexp.analyze.study import Study


def log(arguments: Sequence[str]) -> None:
    """`llmexp log`: logs a study, or a single run, from its folder, as far as MLflow does not have it.

    Raises ConfigError, ResultError or TrackingError that says what to give instead.
    """
    parser = Arguments(prog="llmexp log", description="Tells MLflow of a study or a run that is on disk.")
    parser.add_argument("folder", help="the folder of a study, such as runs/NAME, or of a run")
    parser.epilog = "More arguments are the config's: tracking.uri=http://HOST:PORT, tracking.experiment=NAME, …"
    options, overrides = parser.with_overrides(arguments)
    folder = Path(options.folder).absolute()
    of_run = (folder / results.SUMMARY).exists()
    record = None if of_run else results.load_study_record(folder)
    config = compose(overrides)
    if not config.tracking.enabled:
        raise ConfigError("tracking: got off; accepted is a store to log to, such as tracking.uri=http://HOST:PORT")
    if record is None:
        logged = tracking.log_alone(results.load_run(folder), config.tracking)
    else:
        from llmexp.analyze.study import load_study

        study = load_study(folder)
        _require_ended(folder, config.tracking)
        name, command = record.name, " ".join(record.overrides)
        tracked = tracking.start_study(config.tracking, folder, name, record.identity or name, command)
        broken = study.missing or any(run.status in ("failed", "killed") for run in study.runs)
        logged = log_study(study, tracked, config.tracking, "failed" if broken else "complete")
    console.print(f"{count(logged, 'run')} logged", highlight=False)
    console.print(f"MLflow: {tracking.ui_command(config.tracking)}", highlight=False, soft_wrap=True)


def _require_ended(folder: Path, config: TrackingConfig) -> None:
    """Refuses a study that another process is making: that one tells MLflow itself, and closes the study."""
    for run in tracking.left_open(*tracking.open_store(config)):
        if run.kind == "study" and run.folder == str(folder) and run.gone is False:
            pid = run.process.split()[3]
            raise TrackingError(f"{folder}: process {pid} is making this study, and logs it itself; wait for its end")


def log_study(study: "Study", tracked: tracking.TrackedRun, config: TrackingConfig, status: str) -> int:
    """Logs the runs of a study that MLflow does not have, shows the report on the parent's page and closes it.

    Returns how many runs it logged. Raises TrackingError that says how to go on.
    """
    from llmexp.report.markdown import brief

    try:
        folders = [study.folder / plan.name for plan in study.record.runs]
        logged = _log_runs(folders, tracked, config)
        written_s = [file.stat().st_mtime for folder in folders if (file := folder / results.SUMMARY).exists()]
        ended_s = max(written_s, default=time.time())
        tracking.finish_study(tracked, status, brief(study, study.compare()), study.folder, ended_s)
        return logged
    except TrackingError as failure:
        raise TrackingError(
            f"{study.folder} holds all that was measured, but {failure}\nTo tell it: llmexp log {study.folder}"
        ) from None


def _log_runs(folders: Iterable[Path], tracked: tracking.TrackedRun, config: TrackingConfig) -> int:
    known = tracking.logged_runs(tracked)
    logged = 0
    for folder in folders:
        with alone(folder):
            try:
                run = results.load_run(folder)
            except ResultError:
                continue
            if known.get(run.name) != (tracking.STATUS[run.status], run.fingerprint):
                tracking.log_again(tracked, config, run)
                logged += 1
    return logged
