"""A study: plans its runs, makes those that are missing, one after the other, and reports what they say."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from llmexp import fingerprint, plan, results, search, tracking
from llmexp.compose import resolve
from llmexp.engines.lease import EngineLease, launch_key
from llmexp.errors import ConfigError, LlmexpError, ResultError
from llmexp.plan import Design
from llmexp.prepare import Preparation, prepare, timestamp
from llmexp.progress import console
from llmexp.results import PlannedRun, RunResult, StudyRecord
from llmexp.schema.config import Config
from llmexp.schema.study import StudyConfig

if TYPE_CHECKING:
    from llmexp.analyze.study import Study

_LOCAL = "BasicLauncher"
_ONE_HOST = (_LOCAL, "JoblibLauncher")


class StudyFailedError(LlmexpError):
    """Some runs of a study failed; the others are complete and in the report."""


@dataclass(frozen=True)
class _Job:
    """A run of the plan, ready to be made."""

    planned: PlannedRun
    overrides: tuple[str, ...]
    preparation: Preparation


def sweep(arguments: Sequence[str], base: DictConfig, context: HydraContext, task: TaskFunction) -> "Study | None":
    """Makes a study of a multirun's overrides: plan, runs, report. What is complete already is not repeated.

    Returns the study, None if only its plan was asked for. Raises ConfigError before anything starts,
    StudyFailedError at the end if runs failed.
    """
    parsed = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(arguments))
    taken = plan.take_apart(parsed)

    def composed(overrides: Sequence[str]) -> Config:
        return resolve(context.config_loader.load_sweep_config(base, [*taken.shared, *overrides]))

    shared = composed([])
    swept, asked = dict(taken.swept), shared.study
    if asked.search:
        swept, asked = _with_ends(taken, asked)
    design = plan.design(swept, asked)
    if shared.study.claims:
        from llmexp.analyze.claims import check_claims

        check_claims(shared.study.claims, _swept(design))
    name = shared.study.name or timestamp()
    folder = Path(shared.runs_dir).absolute() / name
    jobs = _jobs(design, shared, name, taken.shared, composed)
    record = _record(design, shared, name, [job.planned for job in jobs], arguments)
    launches = len({launch_key(job.preparation.config, job.preparation.model) for job in jobs})
    to_do = [job for job in jobs if not _is_done(job)]
    console.print(
        f"Study {name}: {len(design.arms)} arms × {len(design.cells)} cells × {design.trials} trials = "
        f"{len(jobs)} runs on {launches} engine launches; {len(jobs) - len(to_do)} complete already",
        highlight=False,
    )
    if shared.study.plan_only:
        _print_plan(jobs, to_do, Path(shared.runs_dir))
        return None
    _require_shareable_store(base, shared)
    results.save_study(record, folder)
    tracked = tracking.start_study(shared, name, " ".join(arguments)) if shared.tracking.enabled else None
    parent = f"run.parent_run_id={tracked.run_id}" if tracked else "run.parent_run_id=null"
    status = "killed"
    try:
        if shared.study.search:

            def made(values: tuple[str, ...]) -> tuple[list[_Job], list[str]]:
                grown = plan.design({**swept, str(asked.search_key): values}, asked)
                jobs = _jobs(grown, shared, name, taken.shared, composed)
                results.save_study(_record(grown, shared, name, [job.planned for job in jobs], arguments), folder)
                missing = [[*job.overrides, parent] for job in jobs if not _is_done(job)]
                return jobs, _launch(missing, base, context, task)

            failures = _search(shared.study, made, folder)
        else:
            failures = _launch([[*job.overrides, parent] for job in to_do], base, context, task)
        status = "failed" if failures else "complete"
        study = _conclude(shared, folder, tracked, status)
    except BaseException:
        if tracked:
            tracking.close_study(tracked, "failed" if status == "complete" else status)
        raise
    if failures:
        raise StudyFailedError(f"{len(failures)} of {len(jobs)} runs failed; the first: {failures[0]}")
    return study


def _with_ends(taken: plan.Sweep, study: StudyConfig) -> tuple[dict[str, tuple[str, ...]], StudyConfig]:
    """The swept keys, with the ends of the search as values of the searched key, and what is compared.

    That is the searched key, unless the key that the study compares is swept.
    """
    key = str(study.search_key)
    others = [other for other in taken.swept if other != key]
    if study.search == "saturation" and others:
        raise ConfigError(f"study.search=saturation: {others[0]} is swept as well; give it one value")
    if study.compare not in others:
        study = study.model_copy(update={"compare": key, "baseline": None})
    return {**taken.swept, key: (str(study.search_low), str(study.search_high))}, study


def _search(
    study: StudyConfig, made: Callable[[tuple[str, ...]], tuple[list[_Job], list[str]]], folder: Path
) -> list[str]:
    """Lets the study grow by the values that the search asks for; returns what went wrong, if it had to stop."""
    tried: dict[str, None] = {}
    known: set[str] = set()

    def runs_at(value: search.Value) -> list[RunResult]:
        tried[str(value)] = None
        jobs, failures = made(tuple(tried))
        if failures:
            raise StudyFailedError(failures[0])
        fresh = [job.planned.name for job in jobs if job.planned.name not in known]
        known.update(fresh)
        return [results.load_run(folder / name) for name in fresh]

    def point(value: search.Value) -> search.Point:
        runs = runs_at(value)
        for run in runs:
            if not run.valid:
                raise StudyFailedError(f"{run.name}: {'; '.join(run.invalid_reasons)}")
        return search.Point(
            value,
            tuple(run.measures["throughput_req_per_s"] for run in runs),
            all(run.measures.get("goodput_share", 1.0) >= search.SLO_SHARE for run in runs),
        )

    low, high, resolution = study.search_low, study.search_high, study.search_resolution
    found: search.Floor | search.Saturation
    try:
        if study.search == "floor":
            found = search.floor(
                lambda value: all(run.status == "complete" for run in runs_at(value)), low, high, resolution
            )
        else:
            found = search.saturation(point, low, high, gain=study.margin, resolution=resolution)
    except StudyFailedError as failure:
        return [str(failure)]
    said = search.sentence(found, str(study.search_key))
    (folder / results.SEARCH).write_text(json.dumps({"found": said, **asdict(found)}, indent=2))
    console.print(said, highlight=False)
    return []


def _conclude(shared: Config, folder: Path, tracked: tracking.TrackedRun | None, status: str) -> "Study":
    """Shows what the runs say, and leaves the report in the folder and on the parent's MLflow page."""
    from llmexp.analyze.study import load_study
    from llmexp.report.report import write_report
    from llmexp.report.table import cells_table, to_markdown

    study = load_study(folder)
    comparison = study.compare()
    console.print(cells_table(comparison))
    report = write_report(study, folder)
    console.print(f"Report: {report.markdown}", highlight=False, soft_wrap=True)
    if tracked:
        tracking.finish_study(tracked, status, to_markdown(comparison), folder)
        console.print(f"MLflow: {tracking.ui_command(shared.tracking)}", highlight=False, soft_wrap=True)
    return study


def _swept(design: Design) -> dict[str, tuple[str, ...]]:
    swept: dict[str, tuple[str, ...]] = {design.compare: design.arms} if design.compare else {}
    for cell in design.cells:
        for key, value in cell.items():
            swept[key] = tuple(dict.fromkeys((*swept.get(key, ()), value)))
    return swept


def _jobs(design: Design, shared: Config, name: str, common: Sequence[str], composed: Any) -> list[_Job]:
    """Every run of the design in its order, composed and checked."""

    def overrides(arm: str, cell: Any, trial: int) -> list[str]:
        run = PlannedRun(name="", arm=arm, cell=cell, trial=trial, position=0)
        return [
            *plan.overrides(design, run),
            f"seed={shared.seed + trial}",
            f"run.trial={trial}",
            f"study.name={name}",
        ]

    ready: dict[str, Preparation] = {}

    def prepared(arm: str, cell: Any, trial: int) -> Preparation:
        key = plan.name(design, arm, cell, trial)
        if key not in ready:
            ready[key] = prepare(composed([*overrides(arm, cell, trial), f"run.name={key}"]))
        return ready[key]

    def key_of(arm: str, cell: Any, trial: int) -> object:
        preparation = prepared(arm, cell, trial)
        return launch_key(preparation.config, preparation.model)

    jobs = []
    for run in plan.order(design, key_of, shared.seed):
        place = [
            f"run.name={run.name}",
            f"run.arm='{run.arm}'",
            f"run.cell='{json.dumps(dict(run.cell))}'",
            f"run.position={run.position}",
        ]
        own = overrides(run.arm, run.cell, run.trial)
        jobs.append(_Job(run, (*common, *own, *place), prepared(run.arm, run.cell, run.trial)))
    return jobs


def _record(
    design: Design, shared: Config, name: str, runs: Sequence[PlannedRun], arguments: Sequence[str]
) -> StudyRecord:
    return StudyRecord(
        name=name,
        compare=design.compare,
        baseline=design.baseline,
        arms=design.arms,
        cells=design.cells,
        trials=design.trials,
        margin=shared.study.margin,
        confidence=shared.study.confidence,
        claims=shared.study.claims,
        runs=tuple(runs),
        overrides=tuple(arguments),
    )


def _is_done(job: _Job) -> bool:
    """Whether a run is complete and its files are what it wrote.

    Raises ResultError if it is complete but measured something else than would be measured now.
    """
    ready = job.preparation
    try:
        found = results.load_run(ready.folder)
    except ResultError:
        return False
    if found.status not in ("complete", "refused") or not results.is_intact(found):
        return False
    if found.fingerprint != ready.fingerprint:
        before = fingerprint.parts(found.config, ready.model, found.workload_sha256, found.environment)
        now = fingerprint.parts(
            ready.config.model_dump(mode="json"), ready.model, ready.workload.sha256, ready.environment
        )
        changed = fingerprint.difference(before, now) or ["model: its weights changed"]
        raise ResultError(
            f"study {ready.study}: {ready.name} was measured under other conditions ({'; '.join(changed[:5])}); "
            "undo the change, or give the study another name with study.name"
        )
    return True


def _launch(jobs: Sequence[Sequence[str]], base: DictConfig, context: HydraContext, task: TaskFunction) -> list[str]:
    """Makes the runs through Hydra's launcher; returns what went wrong, run by run.

    In this process consecutive runs share an engine where they can; a distributed job has an engine of its own.
    """
    lease = EngineLease(keep=True)
    local = str(base.hydra.launcher._target_).endswith(_LOCAL)
    function: Any = partial(task, lease=lease) if local else task  # type: ignore[call-arg]
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=function, config=base)
    failures: list[str] = []
    try:
        done: Sequence[JobReturn] = launcher.launch(jobs, initial_job_idx=0) if jobs else ()
        failures = [str(job._return_value) for job in done if job.status != JobStatus.COMPLETED]
    finally:
        lease.close()
    if lease.launches:
        console.print(f"{lease.launches} engine launches took {lease.launch_s:.0f} s", highlight=False)
    return failures


def _require_shareable_store(base: DictConfig, shared: Config) -> None:
    launcher = str(base.hydra.launcher._target_).rpartition(".")[2]
    if launcher not in _ONE_HOST and shared.tracking.enabled and shared.tracking.uri is None:
        raise ConfigError(
            f"tracking.uri: got null; {launcher} may run jobs on other hosts, which cannot share a SQLite store: "
            "start `mlflow server` and give its URL"
        )


def _print_plan(jobs: Sequence[_Job], to_do: Sequence[_Job], runs_dir: Path) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("trial", "position", "run", "state"):
        table.add_column(column)
    waiting = {job.planned.name for job in to_do}
    for job in jobs:
        state = "to do" if job.planned.name in waiting else "complete"
        table.add_row(str(job.planned.trial), str(job.planned.position), job.planned.name, state)
    console.print(table)
    console.print(_expected_time(to_do, runs_dir), highlight=False)


def _expected_time(to_do: Sequence[_Job], runs_dir: Path) -> str:
    """What the missing runs will take, by the earlier runs of the same model and device."""
    earlier = [results.load_run(path.parent) for path in runs_dir.glob(f"*/*/{results.SUMMARY}")]
    alike = [
        run
        for run in earlier
        if to_do
        and run.status == "complete"
        and run.config["model"] == to_do[0].preparation.config.model.model_dump(mode="json")
    ]
    starts = sorted(run.timings_s["engine_start"] for run in alike if run.timings_s["engine_start"] > 0)
    rest = sorted(run.timings_s["warm_up"] + run.timings_s["rounds"] for run in alike)
    launches = len({launch_key(job.preparation.config, job.preparation.model) for job in to_do})
    if not starts or not rest:
        return f"To do: {len(to_do)} runs, {launches} launches. No earlier run of this model tells how long they take."
    start_s, run_s = starts[len(starts) // 2], rest[len(rest) // 2]
    total_s = launches * start_s + len(to_do) * run_s
    return (
        f"To do: {len(to_do)} runs, {launches} launches; about {total_s / 60:.0f} min "
        f"({start_s:.0f} s a launch and {run_s:.0f} s a run, medians of {len(alike)} earlier runs)"
    )
