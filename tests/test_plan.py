"""The design of a study: what is compared with what, in which order, on how many launches."""

from collections import Counter
from itertools import pairwise

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from llmexp import plan
from llmexp.errors import ConfigError
from llmexp.schema.study import StudyConfig


def taken(*arguments: str) -> plan.Sweep:
    return plan.take_apart(OverridesParser.create().parse_overrides(list(arguments)))


def seed_study(trials: int = 3) -> plan.Design:
    sweep = taken("cache=on,off", "max_num_seqs=32,128,256", "workload.order=sorted,shuffled", "rounds=2")
    assert sweep.shared == ("rounds=2",)
    return plan.design(sweep.swept, StudyConfig(trials=trials))


def engine_of(arm: str, cell: dict[str, str], trial: int) -> object:
    """The engine depends on everything but the order of the workload."""
    return arm, cell["max_num_seqs"], trial


def test_the_seeds_study_takes_six_launches_a_trial() -> None:
    runs = plan.order(seed_study(), engine_of, seed=0)
    assert len(runs) == 36
    for trial in range(3):
        engines = [engine_of(run.arm, dict(run.cell), trial) for run in runs if run.trial == trial]
        assert 1 + sum(a != b for a, b in pairwise(engines)) == 6


def test_arms_of_a_pair_are_neighbours_and_their_order_alternates() -> None:
    runs = plan.order(seed_study(), engine_of, seed=0)
    for trial in range(3):
        first = [run.arm for run in runs if run.trial == trial][::4]
        assert first == (["on"] * 3 if trial % 2 == 0 else ["off"] * 3)


def test_arms_that_share_an_engine_stand_side_by_side() -> None:
    sweep = taken("workload.order=sorted,shuffled", "max_num_seqs=1,2")
    study = plan.design(sweep.swept, StudyConfig(trials=2, compare="workload.order"))
    runs = plan.order(study, lambda arm, cell, trial: (cell["max_num_seqs"], trial), seed=0)
    assert [run.arm for run in runs] == ["sorted", "shuffled"] * 2 + ["shuffled", "sorted"] * 2
    for left, right in zip(runs[::2], runs[1::2], strict=True):
        assert left.cell == right.cell


@given(
    arms=st.lists(st.sampled_from("abcd"), min_size=2, max_size=4, unique=True),
    others=st.dictionaries(
        st.sampled_from(["x", "y"]), st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
    ),
    trials=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_run_is_planned_once_under_its_own_name(
    arms: list[str], others: dict[str, list[int]], trials: int, seed: int
) -> None:
    swept = {"arm": tuple(arms), **{key: tuple(map(str, values)) for key, values in others.items()}}
    study = plan.design(swept, StudyConfig(trials=trials, compare="arm"))
    runs = plan.order(study, lambda arm, cell, trial: (arm, cell.get("x"), trial), seed)
    cells = 1
    for values in others.values():
        cells *= len(values)
    assert len({run.name for run in runs}) == len(runs) == len(arms) * cells * trials
    assert Counter(run.trial for run in runs) == dict.fromkeys(range(trials), len(arms) * cells)
    for trial in range(trials):
        assert [run.position for run in runs if run.trial == trial] == list(range(len(arms) * cells))
    assert runs == plan.order(study, lambda arm, cell, trial: (arm, cell.get("x"), trial), seed)


def test_cells_can_be_stated_one_by_one() -> None:
    cells = ({"max_num_seqs": "4", "load.concurrency": "8"}, {"max_num_seqs": "16", "load.concurrency": "16"})
    study = plan.design(taken("cache=on,off").swept, StudyConfig(cells=cells))
    assert (study.compare, study.baseline, study.cells) == ("cache", "off", cells)
    with pytest.raises(ConfigError, match="max_num_seqs is swept as well"):
        plan.design(taken("cache=on,off", "max_num_seqs=1,2").swept, StudyConfig(cells=cells))


def test_a_later_override_replaces_an_experiments_sweep() -> None:
    sweep = taken("max_num_seqs=1,2,3", "cache=on,off", "max_num_seqs=8")
    assert sweep.swept == {"cache": ("on", "off")}
    assert sweep.shared == ("max_num_seqs=8",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"compare": "cach"}, "study.compare=cach.*did you mean cache"),
        ({"baseline": "of"}, "study.baseline=of.*did you mean off"),
    ],
)
def test_a_comparison_that_was_not_swept_is_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan.design(taken("cache=on,off", "max_num_seqs=1,2").swept, StudyConfig(**asked))
