"""The design of a study: what is compared with what, in which order, on how many launches."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

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


def test_cells_are_in_another_order_in_another_trial_also_on_one_launch() -> None:
    runs = plan.order(seed_study(trials=8), engine_of, seed=0)
    orders = set()
    for trial in range(8):
        cells = [dict(run.cell) for run in runs if run.trial == trial]
        assert cells[::4] == cells[2::4] and cells[1::4] == cells[3::4], "both arms take the cells in one order"
        orders.add(tuple(cell["workload.order"] for cell in cells[:2]))
    assert orders == {("sorted", "shuffled"), ("shuffled", "sorted")}


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


@pytest.mark.parametrize("key", ["seed", "study.trials", "runs_dir", "run.trial"])
def test_what_all_runs_share_cannot_be_swept(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: cannot be swept"):
        taken("cache=on,off", f"{key}=1,2")


def test_an_added_key_is_swept_under_its_own_name() -> None:
    sweep = taken("++engine.args.swap_space=0,4", "++engine.env.A=b")
    assert sweep.shared == ("++engine.env.A=b",)
    study = plan.design(sweep.swept, StudyConfig(compare="engine.args.swap_space"))
    (first, _) = plan.order(study, engine_of_all, seed=0)
    assert first.name == "engine_args_swap_space-0.trial-0"
    assert plan.overrides(study, first) == ["++engine.args.swap_space=0"]


def engine_of_all(arm: str, cell: Mapping[str, str], trial: int) -> object:
    return None


def test_runs_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload.path=a_b: its folder would have the name of workload.path=a-b's"):
        plan.design(taken("workload.path=a-b,a_b").swept, StudyConfig())


def test_long_values_make_a_folder_name_that_fits() -> None:
    cells = tuple({"workload.path": f"/data/{'x' * 300}/{i}.jsonl"} for i in range(2))
    study = plan.design(taken("cache=on,off").swept, StudyConfig(cells=cells, trials=2))
    names = {run.name for run in plan.order(study, engine_of_all, seed=0)}
    assert len(names) == 8
    assert max(map(len, names)) < 255


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])).filter(lambda text: "\\$" not in text))
def test_a_quoted_text_comes_out_of_hydra_as_it_was(text: str) -> None:
    parsed = OverridesParser.create().parse_override(f"run.arm={plan.quoted(text)}").value()
    assert OmegaConf.create({"arm": parsed.text if isinstance(parsed, QuotedString) else parsed}).arm == text
