"""`llmexp report`: the report of a study that has run, from its folder or from MLflow alone; or a run's measures."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console

from llmexp.arguments import Arguments
from llmexp.errors import ConfigError, ResultError
from llmexp.reachable import require_answer
from llmexp.results import SUMMARY, load_run, load_study_record
from llmexp.schema.config import TrackingConfig
from llmexp.tracking import store_uri
from llmexp.words import count

if TYPE_CHECKING:
    from llmexp.analyze.study import Study


def report(arguments: Sequence[str]) -> None:
    """Prints the table of a study and writes its report; of a single run's folder, prints its measures.

    Raises ConfigError or ResultError that says what to give instead, TrackingError if MLflow does not answer.
    """
    options = _parser().parse_args(arguments)
    of_mlflow = options.mlflow_experiment is not None
    of_run = not of_mlflow and Path(options.folder, SUMMARY).exists()
    # What cannot be read is told before all that makes reports is imported.
    uri = _store(options) if of_mlflow else ""
    if not of_mlflow and not of_run:
        load_study_record(options.folder)

    from llmexp.analyze.study import BEING_MADE, load_study
    from llmexp.report.report import write_report
    from llmexp.report.run_table import run_table, verdict
    from llmexp.report.table import WIDTH, cells_table

    console = Console(width=None if Console().is_terminal else WIDTH)
    if of_run:
        run = load_run(options.folder)
        console.print(run_table(run))
        console.print(verdict(run), highlight=False, markup=False, soft_wrap=True)
        return
    with _of_mlflow(options, uri) if of_mlflow else nullcontext(load_study(options.folder)) as study:
        home = Path("reports", study.record.name) if of_mlflow else study.folder
        folder = Path(options.out or (home / f"by-{options.compare}" if options.compare else home))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"--out: got {str(folder)!r}, which is no folder to write to ({error.strerror})"
            raise ConfigError(what) from None
        comparison = study.compare(options.compare)
        written = write_report(study, folder, comparison)
    console.print(cells_table(comparison, console.width))
    if BEING_MADE in study.missing.values():
        there = f"{len(study.runs)} of {count(len(study.record.runs), 'run')}"
        console.print(f"This study is still being made: {there} are there.", highlight=False)
    console.print(f"Report: {written.markdown}", highlight=False, soft_wrap=True)


def _store(options: argparse.Namespace) -> str:
    """Where MLflow is asked. Raises ConfigError or TrackingError if nobody can be asked there."""
    try:
        uri = store_uri(TrackingConfig(uri=options.tracking_uri))
    except ValidationError:
        raise ConfigError(
            f"--tracking-uri: got {options.tracking_uri!r}; accepted is http://HOST:PORT, sqlite:///FILE or a database"
        ) from None
    require_answer(uri, "--tracking-uri", "start it, name another, or give the folder of the study")
    return uri


@contextmanager
def _of_mlflow(options: argparse.Namespace, uri: str) -> "Iterator[Study]":
    """A study from MLflow; what its runs have left lies in a folder that goes at the end and that no message names."""
    from llmexp.analyze.study import from_mlflow

    with TemporaryDirectory(prefix="llmexp-") as artifacts:
        try:
            yield from_mlflow(options.mlflow_experiment, uri, options.study, artifacts)
        except ResultError as error:
            raise ResultError(str(error).replace(artifacts, "MLflow's artifacts")) from None


def _parser() -> Arguments:
    parser = Arguments(prog="llmexp report", description="The report of a study that has run.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", nargs="?", help="the folder of a study, such as runs/NAME, or of a run")
    source.add_argument("--mlflow-experiment", metavar="NAME", help="take study and runs from MLflow")
    parser.add_argument("--study", metavar="NAME", help="which study of the experiment, if it holds several")
    parser.add_argument("--tracking-uri", metavar="URI", help="the MLflow server (default: the store in mlruns/)")
    parser.add_argument("--compare", metavar="KEY", help="compare the values of another swept key")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where the report goes (default: in the study's folder, of MLflow in reports/NAME)",
    )
    return parser
