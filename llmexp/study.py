"""A study: plans its runs, makes those that are missing through a Hydra launcher, and reports what they say."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from llmexp import interrupt, launchers, plan, results, search, tracking
from llmexp.compose import open_keys, resolve
from llmexp.engines.kinds import kind_of
from llmexp.engines.lease import EngineLease, launch_key
from llmexp.errors import ConfigError, LlmexpError, ResultError, TrackingError
from llmexp.plan import Design
from llmexp.prepare import Preparation, lacking, prepare, timestamp
from llmexp.progress import console
from llmexp.relog import log_study
from llmexp.results import PlannedRun, RunResult, SearchRecord, StudyRecord
from llmexp.resume import interrupted, is_complete, is_done
from llmexp.schema.config import Config
from llmexp.schema.study import StudyConfig
from llmexp.task import make_simulation
from llmexp.words import count

if TYPE_CHECKING:
    from llmexp.analyze.study import Study


class StudyFailedError(LlmexpError):
    """Some runs of a study failed; the others are complete and in the report."""


class _NoPointError(StudyFailedError):
    """A search asked for a value at which no run is valid."""


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
    launcher = launchers.name_of(base)
    here = launchers.on_this_host(launcher)

    def composed(overrides: Sequence[str]) -> Config:
        return resolve(context.config_loader.load_sweep_config(base, [*taken.shared, *overrides]))

    first = open_keys([f"{key}={values[0]}" for key, values in taken.swept.items()])
    launchers.check(launcher, context.config_loader.load_sweep_config(base, [*taken.shared, *first]))
    shared = composed([])
    if shared.simulation is not None:
        _simulate(shared, taken)
        return None
    swept, asked = dict(taken.swept), shared.study
    if asked.search:
        swept, asked = _with_ends(taken, asked)
    design = plan.design(swept, asked)
    if shared.study.claims:
        from llmexp.analyze.claims import check_claims

        check_claims(shared.study.claims, _swept(design))
    name = shared.study.name or timestamp()
    folder = Path(shared.runs_dir).absolute() / name
    OmegaConf.update(base, "hydra.sweep.dir", str(folder), force_add=True)  # where launchers keep files of their own
    held = _held(folder)
    jobs = _jobs(design, shared, name, taken.shared, composed, here, held)
    identity = results.identity(folder)
    record = _record(design, shared, name, identity, jobs, arguments)
    to_do = [job for job in jobs if not is_done(job.preparation)]
    broken = sum(job.preparation.folder.exists() for job in to_do)
    console.print(
        f"Study {name}: {count(len(design.arms), 'arm')} × {count(len(design.cells), 'cell')} × "
        f"{count(design.trials, 'trial')} = {count(len(jobs), 'run')} on "
        f"{count(_launches(jobs, launcher), 'engine launch')}; {len(jobs) - len(to_do)} complete already"
        + (f", {broken} broken or cut off, to be made again" if broken else ""),
        highlight=False,
        soft_wrap=True,
    )
    others = sorted({*held.values()} - {job.planned.name for job in jobs})
    if others and not asked.search:
        console.print(
            f"It holds {count(len(others), 'more run')} that this sweep does not ask for, such as {others[0]}: kept, "
            "but not in the report",
            highlight=False,
            soft_wrap=True,
        )
    if asked.search:
        console.print("These are the ends of the search; what it measures between them follows from what it finds")
    if shared.study.plan_only:
        _print_plan(jobs, to_do, Path(shared.runs_dir), launcher)
        return None
    if here:  # a study that is complete needs no devices for its report
        for job in to_do:
            kind_of(job.preparation.config).check(job.preparation.config, True)
    tracking.require_ready(shared.tracking)
    results.save_study(record, folder)
    (folder / results.SEARCH).unlink(missing_ok=True)  # an earlier search's; this one's comes at its end
    tracked: tracking.TrackedRun | None = None
    status = "killed"
    failures: list[str] = []
    study = None

    lease = EngineLease(keep=True)  # for the whole study: the values that a search asks for may share an engine

    def make(missing: Sequence[_Job]) -> list[str]:
        parent = f"run.parent_run_id={tracked.run_id}" if tracked else "run.parent_run_id=null"
        return _launch(missing, parent, base, context, task, lease) if missing else []

    def made(values: Iterable[str], trials: int) -> tuple[list[_Job], list[str]]:
        nonlocal jobs
        in_order = tuple(sorted(values, key=float))
        grown = plan.design({**swept, str(asked.search_key): in_order}, asked.model_copy(update={"trials": trials}))
        jobs = _jobs(grown, shared, name, taken.shared, composed, here, _held(folder))
        results.save_study(_record(grown, shared, name, identity, jobs, arguments), folder)
        return jobs, make([job for job in jobs if not is_done(job.preparation)])

    try:
        if shared.tracking.enabled:
            with interrupt.held():  # what is opened is known, and closed
                tracked = tracking.start_study(shared.tracking, folder, name, identity, " ".join(arguments))
        with closing(lease):
            failures = _search(asked, made, folder) if asked.search else make(to_do)
        if lease.launches:
            console.print(f"{count(lease.launches, 'engine launch')} took {lease.launch_s:.0f} s", highlight=False)
        for failure in failures:
            console.print(f"failed: {failure}", highlight=False, markup=False, soft_wrap=True)
        status = "failed" if failures else "complete"
        study = _conclude(shared, folder)
        if tracked:
            log_study(study, tracked, shared.tracking, status)
            console.print(f"MLflow: {tracking.ui_command(shared.tracking)}", highlight=False, soft_wrap=True)
    except BaseException as error:
        complete = f"{sum(is_complete(job.preparation.folder) for job in jobs)} of {count(len(jobs), 'run')} complete"
        what = f"Study {name}: {complete}. To go on: the same command with study.name={name}"
        console.print(what, highlight=False, soft_wrap=True)
        if tracked:
            with suppress(TrackingError):  # then the next command closes it
                tracking.close_study(tracked, "failed" if status == "complete" else status)
        if isinstance(error, KeyboardInterrupt):
            so_far = interrupted([job.preparation.folder for job in jobs])
            raise KeyboardInterrupt(f"{so_far}; study.name={name} goes on with it") from None
        if not failures or not isinstance(error, ResultError):  # without a single run there is no report
            raise
    if failures and asked.search:
        raise StudyFailedError(f"the search was given up: {failures[0]}")
    if failures:
        raise StudyFailedError(
            f"{len(failures)} of {count(len(jobs), 'run')} failed; the first: {failures[0]}\n"
            f"To make what is missing: the same command with study.name={name}"
        )
    return study


def _simulate(shared: Config, taken: plan.Sweep) -> None:
    """A study of the simulator varies by itself what it is about."""
    if taken.swept:
        key, values = next(iter(taken.swept.items()))
        raise ConfigError(f"{key}: got {','.join(values)}; a study of the simulator takes one value of each key")
    make_simulation(shared)


def _with_ends(taken: plan.Sweep, study: StudyConfig) -> tuple[dict[str, tuple[str, ...]], StudyConfig]:
    """The swept keys, with the ends of the search as values of the searched key, and what is compared.

    That is the searched key, unless the key that the study compares is swept.
    """
    key = str(study.search_key)
    others = [other for other in taken.swept if other != key]
    if study.search == "saturation" and others:
        raise ConfigError(f"study.search=saturation: {others[0]} is swept as well; give it one value")
    if study.compare not in others:
        baseline = str(study.search_high) if study.search == "floor" else None  # the smallest may not start
        study = study.model_copy(update={"compare": key, "baseline": baseline})
    return {**taken.swept, key: (str(study.search_low), str(study.search_high))}, study


def _search(
    study: StudyConfig, made: Callable[[Iterable[str], int], tuple[list[_Job], list[str]]], folder: Path
) -> list[str]:
    """Lets the study grow by the values that the search asks for; returns what went wrong, if it had to stop.

    The first trial searches alone. Each further trial then repeats all of its values, on one engine where they can
    share one, and the search goes on from the means of all valid runs, where those ask for more.
    """
    tried: dict[str, None] = {}
    known: dict[str, list[RunResult]] = {}
    trials = 1

    def runs_at(value: search.Value) -> list[RunResult]:
        if str(value) not in known:
            tried[str(value)] = None
            jobs, failures = made(tried, trials)
            if failures:
                raise StudyFailedError(failures[0])
            known.clear()
            for job in jobs:
                asked = {**job.planned.cell, str(study.compare): job.planned.arm}[str(study.search_key)]
                known.setdefault(asked, []).append(results.load_run(folder / job.planned.name))
        return known[str(value)]

    def starts(value: search.Value) -> bool:
        return all(run.status == "complete" for run in runs_at(value))

    def point(value: search.Value) -> search.Point:
        runs = runs_at(value)
        valid = [run for run in runs if run.valid]
        if not valid:
            raise _NoPointError(
                f"{study.search_key}={value} has no valid run ({runs[0].name}: {'; '.join(runs[0].invalid_reasons)}); "
                "take more trials, or remove its runs' folders to have them made again"
            )
        good = [run.measures["goodput_share"] for run in valid if "goodput_share" in run.measures]
        return search.Point(
            value,
            tuple(run.measures["throughput_req_per_s"] for run in valid),
            min(good) >= search.SLO_SHARE if good else None,
        )

    low, high, resolution = study.search_low, study.search_high, study.search_resolution
    found: search.Floor | search.Saturation
    try:
        for repeats in dict.fromkeys((1, study.trials)):
            trials = repeats
            known.clear()
            if study.search == "floor":
                found = search.floor(starts, low, high, resolution)
                continue
            try:
                found = search.saturation(point, low, high, gain=study.margin, resolution=resolution)
            except _NoPointError:
                if trials == study.trials:
                    raise
    except StudyFailedError as failure:
        return [str(failure)]
    said = search.sentence(found, str(study.search_key))
    values = {name: value for name, value in asdict(found).items() if name != "points"}  # the runs have those
    assert study.search is not None
    record = SearchRecord(kind=study.search, key=str(study.search_key), found=said, **values)
    results.save_search(record, folder)
    console.print(said, highlight=False)
    return []


def _conclude(shared: Config, folder: Path) -> "Study":
    """Shows what the runs say, and leaves the report in the folder."""
    from llmexp.analyze.study import load_study
    from llmexp.report.report import write_report
    from llmexp.report.table import cells_table

    study = load_study(folder)
    comparison = study.compare()
    console.print(cells_table(comparison, console.width))
    report = write_report(study, folder, comparison)
    console.print(f"Report: {report.markdown}", highlight=False, soft_wrap=True)
    return study


def _swept(design: Design) -> dict[str, tuple[str, ...]]:
    swept: dict[str, tuple[str, ...]] = {design.compare: design.arms} if design.compare else {}
    for cell in design.cells:
        for key, value in cell.items():
            swept[key] = tuple(dict.fromkeys((*swept.get(key, ()), value)))
    return swept


def _held(folder: Path) -> dict[str, str]:
    """The names of the runs that a study's folder holds, by what was asked of each."""
    found = {}
    for path in sorted(folder.glob(f"*/{results.SUMMARY}")):
        with suppress(ResultError):
            run = results.load_run(path.parent)
            if run.status in ("complete", "refused") and (planned := run.config["run"].get("planned")):
                found[str(planned)] = path.parent.name
    return found


def _jobs(
    design: Design,
    shared: Config,
    name: str,
    common: Sequence[str],
    composed: Any,
    here: bool,
    held: Mapping[str, str],
) -> list[_Job]:
    """Every run of the design in its order, composed and checked.

    A run that the study holds keeps the name under which it was made, whatever was swept then: more keys, or fewer.
    """
    places = [f"runs_dir={plan.quoted(str(Path(shared.runs_dir).absolute()))}"]
    places += [f"tracking.dir={plan.quoted(str(Path(shared.tracking.dir).absolute()))}"]

    def overrides(arm: str, cell: Any, trial: int) -> list[str]:
        run = PlannedRun(name=plan.name(design, arm, cell, trial), arm=arm, cell=cell, trial=trial, position=0)
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
            config = composed([*overrides(arm, cell, trial), f"run.name={key}"])
            fresh = prepare(config, here and not lacking(config))
            kept = key if (fresh.folder / results.SUMMARY).exists() else held.get(fresh.asked, key)
            ready[key] = replace(fresh, name=kept, folder=fresh.folder.parent / kept)
        return ready[key]

    def key_of(arm: str, cell: Any, trial: int) -> object:
        preparation = prepared(arm, cell, trial)
        return launch_key(preparation.config, preparation.model)

    jobs = []
    for run in plan.order(design, key_of, shared.seed):
        preparation = prepared(run.arm, run.cell, run.trial)
        run = run.model_copy(update={"name": preparation.name})
        place = [
            *places,
            f"run.name={run.name}",
            f"run.arm={plan.quoted(run.arm)}",
            f"run.cell={plan.quoted(json.dumps(dict(run.cell)))}",
            f"run.position={run.position}",
            f"run.planned='{preparation.asked}'",
        ]
        own = overrides(run.arm, run.cell, run.trial)
        jobs.append(_Job(run, (*common, *own, *place), preparation))
    return jobs


def _record(
    design: Design, shared: Config, name: str, identity: str, jobs: Sequence[_Job], arguments: Sequence[str]
) -> StudyRecord:
    return StudyRecord(
        name=name,
        identity=identity,
        compare=design.compare,
        baseline=design.baseline,
        arms=design.arms,
        cells=design.cells,
        trials=design.trials,
        margin=shared.study.margin,
        confidence=shared.study.confidence,
        claims=shared.study.claims,
        runs=tuple(job.planned for job in jobs),
        overrides=tuple(arguments),
    )


def _launches(jobs: Sequence[_Job], launcher: str) -> int:
    """How many engines the runs start: in one process, consecutive runs share one where they can."""
    keys = [launch_key(job.preparation.config, job.preparation.model) for job in jobs]
    return sum(1 for _ in groupby(keys)) if launchers.in_process(launcher) else len(jobs)


def _launch(
    jobs: Sequence[_Job], parent: str, base: DictConfig, context: HydraContext, task: TaskFunction, lease: EngineLease
) -> list[str]:
    """Makes the runs through Hydra's launcher; returns what went wrong, run by run."""
    overrides = [[*job.overrides, parent] for job in jobs]
    configs = [job.preparation.config for job in jobs]
    failed, gave_up = launchers.launch(overrides, configs, base, context, task, lease)
    failures = []
    for i, job in enumerate(jobs):
        try:
            if i in failed or not is_done(job.preparation):
                reason = failed.get(i) or gave_up or f"it left no complete run in {job.preparation.folder}"
                failures.append(f"{job.planned.name}: {reason}")
        except ResultError as error:
            failures.append(str(error))
    return failures


def _print_plan(jobs: Sequence[_Job], to_do: Sequence[_Job], runs_dir: Path, launcher: str) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("trial", "position", "run", "state"):
        table.add_column(column)
    waiting = {job.planned.name for job in to_do}
    for job in jobs:
        broken = job.preparation.folder.exists() and "broken or cut off, to be made again"
        state = (broken or "to do") if job.planned.name in waiting else "complete"
        table.add_row(str(job.planned.trial), str(job.planned.position), job.planned.name, state)
    console.print(table)
    here = jobs if launchers.on_this_host(launcher) else []
    for reason in dict.fromkeys(filter(None, (lacking(job.preparation.config) for job in here))):
        console.print(f"Not to be made on this machine: {reason}", highlight=False, soft_wrap=True)
    console.print(_expected_time(to_do, runs_dir, launcher), highlight=False, soft_wrap=True)


def _expected_time(to_do: Sequence[_Job], runs_dir: Path, launcher: str) -> str:
    """What the missing runs will take one after the other, by the earlier runs of the same model and device."""
    if not to_do:
        return "To do: nothing."
    kind = _kind(to_do[0].preparation.config.model_dump())
    alike = [run for run in _earlier(runs_dir) if _kind(run.config) == kind]
    timings = [run.timings_s for run in alike if {"engine_start", "warm_up", "rounds"} <= run.timings_s.keys()]
    starts = sorted(one["engine_start"] for one in timings if one["engine_start"] > 0)  # a simulated one takes none
    rest = sorted(one["warm_up"] + one["rounds"] for one in timings)
    launches = _launches(to_do, launcher)
    what = f"{count(len(to_do), 'run')}, {count(launches, 'launch')}"
    if not rest:
        model, gpu, engine = kind
        return f"To do: {what}. No earlier run of model={model} gpu={gpu} engine={engine} tells how long they take."
    start_s, run_s = starts[len(starts) // 2] if starts else 0.0, rest[len(rest) // 2]
    total_s = launches * start_s + len(to_do) * run_s
    about = f"{total_s:.0f} s" if total_s < 120 else f"{total_s / 60:.0f} min"
    launch = f"{start_s:.0f} s a launch and " if starts else ""
    return (
        f"To do: {what}; about {about} "
        f"({launch}{run_s:.{0 if run_s >= 1 else 1}f} s a run, medians of {count(len(timings), 'earlier run')})"
    )


def _earlier(runs_dir: Path) -> Iterator[RunResult]:
    for path in runs_dir.glob(f"*/*/{results.SUMMARY}"):
        with suppress(ResultError):
            run = results.load_run(path.parent)
            if run.status == "complete":
                yield run


_KIND = {"model": "name", "gpu": "name", "engine": "kind"}


def _kind(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(config.get(group, {}).get(key)) for group, key in _KIND.items())
