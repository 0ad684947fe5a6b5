"""Which runs are paired, which are left out, and what a user is told."""

from pathlib import Path

import pytest

from llmexp.analyze.pairs import choose_arms, measure_values
from llmexp.analyze.study import load_study
from llmexp.errors import ConfigError
from llmexp.results import Percentile, RunResult, load_run, save_run
from tests.analyze.synthetic import make_study

SWEPT = {"max_num_seqs": ("32", "128"), "cache": ("on", "off"), "workload.order": ("sorted",)}


def change(folder: Path, **update: object) -> RunResult:
    """Rewrites the summary of a run."""
    changed = load_run(folder).model_copy(update=update)
    save_run(changed)
    return changed


def test_arms_by_default() -> None:
    assert choose_arms(None, None, SWEPT) == ("cache", "off")
    assert choose_arms("max_num_seqs", None, SWEPT) == ("max_num_seqs", "32")
    assert choose_arms(None, None, {"a": ("1",), "b": ("x", "y")}) == ("b", "x")
    assert choose_arms(None, "on", SWEPT) == ("cache", "on")
    assert choose_arms(None, None, {"cache": ("on",)}) == (None, None)
    assert choose_arms(None, None, {}) == (None, None)


def test_a_key_that_is_not_swept() -> None:
    with pytest.raises(ConfigError, match=r"study.compare=max_num_seq.*did you mean max_num_seqs.*cache"):
        choose_arms("max_num_seq", None, SWEPT)
    with pytest.raises(ConfigError, match="nothing is swept"):
        choose_arms("cache", None, {})


def test_a_baseline_that_is_no_arm() -> None:
    with pytest.raises(ConfigError, match=r"study.baseline=of: .*did you mean off.*on, off"):
        choose_arms("cache", "of", SWEPT)
    with pytest.raises(ConfigError, match="no arms"):
        choose_arms(None, "off", {"cache": ("off",)})


def test_pairs_share_cell_and_trial(tmp_path: Path) -> None:
    make_study(tmp_path / "s", cells=[{"max_num_seqs": "8"}, {"max_num_seqs": "32"}], trials=3, requests=8)
    pairings = load_study(tmp_path / "s").compare().pairings
    assert [(pairing.cell, pairing.arm, len(pairing.pairs)) for pairing in pairings] == [
        ({"max_num_seqs": "8"}, "on", 3),
        ({"max_num_seqs": "32"}, "on", 3),
    ]
    for pairing in pairings:
        for pair in pairing.pairs:
            assert (pair.baseline.arm, pair.treatment.arm) == ("off", "on")
            assert pair.baseline.trial == pair.treatment.trial == pair.trial
            assert pair.baseline.cell == pair.treatment.cell == pairing.cell


def test_unequal_workloads_are_refused_with_both_hashes(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=3, requests=8)
    off, on = record.runs[0].name, record.runs[1].name
    ours = load_run(tmp_path / "s" / off).workload_sha256
    change(tmp_path / "s" / on, workload_sha256="f" * 64)
    (pairing,) = load_study(tmp_path / "s").compare().pairings
    assert (len(pairing.pairs), pairing.planned) == (2, 3)
    (message,) = pairing.refused
    assert ours in message
    assert "f" * 64 in message
    assert "same requests" in message


def test_simulated_and_measured_runs_are_never_paired(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, requests=8)
    change(tmp_path / "s" / record.runs[0].name, simulated=True)
    comparison = load_study(tmp_path / "s").compare()
    assert comparison.rows == ()
    assert "simulated" in comparison.pairings[0].refused[0]
    assert "measured" in comparison.pairings[0].refused[0]


def test_runs_that_do_not_count_are_counted(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=5, requests=8)
    names = [plan.name for plan in record.runs if plan.arm == "on"]
    change(tmp_path / "s" / names[0], valid=False, invalid_reasons=("client saturated",))
    change(tmp_path / "s" / names[1], status="failed", error="engine died: no KV blocks", measures={}, rounds=())
    (tmp_path / "s" / names[2] / "summary.json").unlink()
    rounds = load_run(tmp_path / "s" / names[3]).rounds
    broken = [one.model_copy(update={"valid": False, "invalid_reasons": ("hits 3, not 4",)}) for one in rounds]
    change(tmp_path / "s" / names[3], rounds=tuple(broken))
    comparison = load_study(tmp_path / "s").compare()
    found = {one.run: (one.kind, one.reasons) for one in comparison.excluded}
    assert found[names[0]] == ("invalid", ("client saturated",))
    assert found[names[1]] == ("failed", ("engine died: no KV blocks",))
    assert found[names[2]][0] == "missing"
    assert found[names[3]] == ("invalid", ("hits 3, not 4", "hits 3, not 4"))
    (pairing,) = comparison.pairings
    assert (len(pairing.pairs), pairing.planned, len(pairing.refused)) == (1, 5, 4)
    assert {row.trials for row in comparison.rows} == {1}


def test_only_valid_rounds_count(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, rounds=3, requests=8)
    folder = tmp_path / "s" / record.runs[0].name
    rounds = load_run(folder).rounds
    spoiled = rounds[1].model_copy(update={"valid": False, "invalid_reasons": ("no reset",)})
    run = change(folder, rounds=(rounds[0], spoiled, rounds[2]))
    values = measure_values(run)
    assert values["ttft_ms_mean"] == (rounds[0].measures["ttft_ms_mean"], rounds[2].measures["ttft_ms_mean"])
    assert "ttft_ms_p99" not in values  # no round has the requests for it, and all rounds together hold an invalid one


def test_a_percentile_that_needs_all_rounds_together(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, rounds=2, requests=12)
    run = load_run(tmp_path / "s" / record.runs[0].name)
    assert run.rounds[0].percentiles["e2e_ms_p95"].value is None
    pooled = run.percentiles["e2e_ms_p95"].value
    assert measure_values(run)["e2e_ms_p95"] == (pooled,)
    assert measure_values(run)["e2e_ms_p50"] == tuple(one.percentiles["e2e_ms_p50"].value for one in run.rounds)


def test_values_that_are_no_numbers_are_no_values(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, rounds=1, requests=8)
    run = load_run(tmp_path / "s" / record.runs[0].name)
    absent = Percentile(value=None, low=None, high=None, n=0)
    one = run.rounds[0].model_copy(update={"measures": {"tpot_ms_mean": float("nan")}, "percentiles": {"x": absent}})
    bare = run.model_copy(update={"rounds": (one,), "measures": {}, "percentiles": {}})
    assert measure_values(bare) == {}


GPU = {"name": "NVIDIA H200", "driver": "570.1"}
HERE = {"cpu": "x", "cpu_cores": 8, "gpus": [GPU], "versions": {"vllm": "0.24.0", "llmexp": "0.1"}}


@pytest.mark.parametrize(
    ("there", "difference"),
    [
        ({"gpus": [{**GPU, "name": "NVIDIA L4"}]}, "hardware.gpus"),
        ({"gpus": [{**GPU, "driver": "550.2"}]}, "hardware.drivers"),
        ({"versions": {"vllm": "0.32.0", "llmexp": "0.1"}}, "versions.vllm: 0.24.0 -> 0.32.0"),
        ({"versions": {"vllm": "0.24.0", "llmexp": "0.2"}}, "versions.llmexp: 0.1 -> 0.2"),
    ],
)
def test_runs_made_on_other_hardware_or_software_are_no_pair(
    tmp_path: Path, there: dict[str, object], difference: str
) -> None:
    record = make_study(tmp_path / "s", trials=2, requests=8)
    for plan in record.runs:
        elsewhere = (plan.arm, plan.trial) == ("on", 1)
        change(tmp_path / "s" / plan.name, environment=HERE | there if elsewhere else HERE)
    (pairing,) = load_study(tmp_path / "s").compare().pairings
    assert [pair.trial for pair in pairing.pairs] == [0]
    assert difference in pairing.refused[0]


def test_what_a_factor_stands_for_is_its_effect(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", compare="engine.python", trials=1, requests=8)
    newer = HERE | {"versions": {"vllm": "0.32.0", "llmexp": "0.1"}}
    for plan in record.runs:
        change(tmp_path / "s" / plan.name, environment=newer if plan.arm == "on" else HERE)
    (pairing,) = load_study(tmp_path / "s").compare().pairings
    assert len(pairing.pairs) == 1


@pytest.mark.parametrize(
    ("compare", "told", "pairs"), [("cache", True, 0), ("cache", False, 1), ("engine.env.NCCL_ALGO", True, 1)]
)
def test_arms_whose_shells_set_other_variables_are_no_pair(
    tmp_path: Path, compare: str, told: bool, pairs: int
) -> None:
    record = make_study(tmp_path / "s", compare=compare, trials=1, requests=8)
    for plan in record.runs:
        shell = {"NCCL_P2P_DISABLE": "1"} if plan.arm == "on" else {}
        known = told or plan.arm == "on"  # else of an engine that is not ours
        change(tmp_path / "s" / plan.name, environment=HERE | ({"variables": shell} if known else {}))
    (pairing,) = load_study(tmp_path / "s").compare().pairings
    assert len(pairing.pairs) == pairs
    if not pairs:
        assert "made under other conditions (variables.NCCL_P2P_DISABLE: None -> 1)" in pairing.refused[0]
