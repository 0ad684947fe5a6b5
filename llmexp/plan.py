"""A sweep as a design: which runs, in which order, sharing which engine launches."""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmexp.analyze.pairs import choose_arms
from llmexp.compose import open_keys
from llmexp.errors import ConfigError
from llmexp.results import PlannedRun
from llmexp.schema.study import StudyConfig

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_OF_THE_STUDY = ("seed", "study", "tracking", "runs_dir", "run")
_MOST_RUNS = 10_000
_LONGEST_NAME = 200  # of a folder; file systems take 255 bytes


@dataclass(frozen=True)
class Sweep:
    """A command line taken apart: values of every swept key in order, and the overrides that all runs share."""

    swept: Mapping[str, tuple[str, ...]]
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """Arms × cells × trials. Without anything to compare, `compare` is None and the only arm is ""."""

    compare: str | None
    baseline: str | None
    arms: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]
    trials: int


def take_apart(overrides: Sequence["Override"]) -> Sweep:
    """Separates the swept keys from the rest; of several overrides of a key the last counts, as in Hydra.

    Raises ConfigError for a sweep without a finite list of values, or of what all runs of a study share.
    """
    swept: dict[str, tuple[str, ...]] = {}
    shared: dict[str, str] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+")
        swept.pop(key, None)
        shared.pop(key, None)
        if not override.is_sweep_override():
            shared[key] = str(override.input_line)
        elif key.partition(".")[0] in _OF_THE_STUDY:
            hint = ": each trial has a seed of its own, see study.trials" if key == "seed" else ""
            raise ConfigError(f"{key}: cannot be swept{hint}")
        elif override.is_discrete_sweep():
            values = tuple(dict.fromkeys(itertools.islice(override.sweep_string_iterator(), _MOST_RUNS + 1)))
            if not values:
                raise ConfigError(f"{key}: no values; give them as in {key}=1,2,3 (a glob takes the files of a group)")
            if len(values) > _MOST_RUNS:
                raise ConfigError(f"{key}: more than {_MOST_RUNS} values")
            swept[key] = values
        else:
            raise ConfigError(f"{key}: an interval has no list of values; give the values, as in {key}=1,2,3")
    return Sweep(swept, tuple(open_keys(list(shared.values()))))


def design(swept: Mapping[str, tuple[str, ...]], study: StudyConfig) -> Design:
    """The design of a study: what is swept, compared and repeated.

    `study.cells` replaces the product of the keys that are not compared.
    Raises ConfigError if the compared key is not swept, the baseline is no arm, two runs have one name, or there are
    too many.
    """
    compare, baseline = choose_arms(study.compare, study.baseline, swept)
    arms = swept[compare] if compare else ("",)
    others = {key: values for key, values in swept.items() if key != compare}
    runs = math.prod(map(len, swept.values())) * len(study.cells or ((),)) * study.trials
    if runs > _MOST_RUNS:
        raise ConfigError(f"study: {runs} runs in all; {_MOST_RUNS} are the most")
    cells = tuple(dict(zip(others, values, strict=True)) for values in itertools.product(*others.values()))
    if study.cells:
        clash = sorted({key for cell in study.cells for key in cell} & swept.keys())
        if clash:
            raise ConfigError(f"study.cells: {clash[0]} is swept as well; state it in one place")
        cells = tuple({**cell, **extra} for cell in cells for extra in study.cells)
    made = Design(compare, baseline, arms, cells, study.trials)
    seen: dict[str, str] = {}
    for arm, cell in itertools.product(arms, cells):
        values = " ".join(f"{key}={value}" for key, value in {**({compare: arm} if compare else {}), **cell}.items())
        other = seen.setdefault(name(made, arm, cell, 0), values)
        if other != values:
            raise ConfigError(f"{values}: its folder would have the name of {other}'s; choose other values")
    return made


def order(plan: Design, launch_key: Callable[[str, Mapping[str, str], int], object], seed: int) -> list[PlannedRun]:
    """All runs in the order in which they are made.

    Within a trial, cells whose engines are equal for every arm stand together; these groups, and the cells in them,
    are shuffled by `seed`. Where the arms need different engines, each arm does all its cells of a group on one
    launch, in one order, so that the runs of any pair are equally far apart; where they share an engine, the arms
    of a cell stand side by side. The order of the arms is reversed from trial to trial.
    """
    runs: list[PlannedRun] = []
    for trial in range(plan.trials):
        groups: dict[tuple[object, ...], list[Mapping[str, str]]] = {}
        for cell in plan.cells:
            groups.setdefault(tuple(launch_key(arm, cell, trial) for arm in plan.arms), []).append(cell)
        arms = plan.arms if trial % 2 == 0 else plan.arms[::-1]
        dealt = list(groups.items())
        shuffle = random.Random(f"{seed}/{trial}").shuffle
        shuffle(dealt)
        position = 0
        for keys, cells in dealt:
            shuffle(cells)
            pairs: list[tuple[str, Mapping[str, str]]]
            if len(set(keys)) == 1:
                pairs = [(arm, cell) for cell in cells for arm in arms]
            else:
                pairs = [(arm, cell) for arm in arms for cell in cells]
            for arm, cell in pairs:
                runs.append(
                    PlannedRun(name=name(plan, arm, cell, trial), arm=arm, cell=cell, trial=trial, position=position)
                )
                position += 1
    return runs


def name(plan: Design, arm: str, cell: Mapping[str, str], trial: int) -> str:
    """A run's name by its swept values, fit for a folder: `cache-on.max_num_seqs-4.trial-0`."""
    values = {**({plan.compare: arm} if plan.compare else {}), **cell, "trial": str(trial)}
    full = ".".join(f"{_plain(key)}-{_plain(value)}" for key, value in values.items())
    if len(full) <= _LONGEST_NAME:
        return full
    return f"{full[:_LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}.trial-{trial}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", text)


def overrides(plan: Design, run: PlannedRun) -> list[str]:
    """The overrides that make a run of the shared config."""
    arm = [f"{plan.compare}={run.arm}"] if plan.compare else []
    return open_keys([*arm, *(f"{key}={value}" for key, value in run.cell.items())])


def quoted(text: str) -> str:
    """A text as a value of Hydra's grammar that comes out as it is, whatever stands in it."""
    literal = text.replace("${", "\\${")  # no interpolation
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), literal) + "'"
