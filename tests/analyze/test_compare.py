"""Effects with intervals, and the verdicts on them."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmexp.analyze import intervals
from llmexp.analyze.compare import Effect, compare_pairs, decide, equivalence_margin, scale_of
from llmexp.analyze.study import load_study
from llmexp.errors import ConfigError
from llmexp.results import load_run, save_run, save_study
from tests.analyze.synthetic import make_study, same_in_every_trial
from tests.analyze.test_pairs import change

CELL: dict[str, str] = {}


def test_a_known_effect_is_found(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 2.0}, trials=5, requests=100)
    comparison = load_study(tmp_path / "s").compare()
    throughput = comparison.row("throughput_req_per_s", CELL, "on")
    assert throughput is not None
    assert throughput.low is not None
    assert throughput.high is not None
    assert throughput.low < throughput.estimate < throughput.high
    assert throughput.estimate == pytest.approx(2, rel=0.1)
    assert throughput.verdict == "improves"
    assert throughput.treatment_mean / throughput.baseline_mean == pytest.approx(throughput.estimate, rel=0.02)
    latency = comparison.row("e2e_ms_p95", CELL, "on")
    assert latency is not None
    assert latency.estimate == pytest.approx(0.5, rel=0.15)
    assert latency.verdict == "improves"


def test_estimates_are_geometric_means_of_paired_ratios(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=3, rounds=2, requests=8)
    values = {"off": ((1.0, 3.0), (4.0, 4.0), (10.0, 10.0)), "on": ((4.0, 4.0), (4.0, 4.0), (5.0, 5.0))}
    for plan in record.runs:
        change_rounds(tmp_path / "s" / plan.name, {"throughput_req_per_s": values[plan.arm][plan.trial]})
    row = load_study(tmp_path / "s").compare().row("throughput_req_per_s", CELL, "on")
    assert row is not None
    assert row.per_trial == pytest.approx((2.0, 1.0, 0.5))
    assert row.estimate == pytest.approx(1)
    # Logs of 2, 1 and 1/2: mean 0, standard error log(2) / sqrt(3), t(0.95, 2) = 2.919986.
    assert row.high == pytest.approx(np.exp(2.919986 * np.log(2) / 3**0.5), rel=1e-6)
    assert row.low == pytest.approx(1 / row.high)
    assert (row.baseline_mean, row.treatment_mean) == (pytest.approx(16 / 3), pytest.approx(13 / 3))


def test_what_may_be_zero_is_compared_by_difference(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=8)
    row = load_study(tmp_path / "s").compare().row("cache_hit_rate", CELL, "on")
    assert row is not None
    assert row.scale == "difference"
    assert (row.estimate, row.low, row.high) == (pytest.approx(0.8), pytest.approx(0.8), pytest.approx(0.8))
    assert row.verdict == "improves"
    assert scale_of("preemptions") == scale_of("goodput_req_per_s") == scale_of("queue_ms_p50") == "difference"
    assert scale_of("throughput_req_per_s") == scale_of("itl_ms_p99") == scale_of("kv_capacity_tokens") == "ratio"


def test_counted_effects_that_never_vary_stay_out_of_the_family(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=8)
    comparison = load_study(tmp_path / "s").compare()
    row = comparison.row("failed_requests", CELL, "on")
    assert row is not None
    assert row.verdict == "equivalent"
    varying = [row for row in comparison.rows if row.verdict and row.varies]
    assert comparison.tested == len(varying) < len([row for row in comparison.rows if row.verdict])


def test_a_simulation_that_no_trial_changes_is_no_evidence_of_replication(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=24, simulated=True)
    same_in_every_trial(tmp_path / "s")
    comparison = load_study(tmp_path / "s").compare()
    row = comparison.row("throughput_req_per_s", CELL, "on")
    assert row is not None
    assert (row.verdict, row.deterministic, row.trials) == ("deterministic", True, 3)
    assert (row.low, row.bootstrap_low, row.p, row.q, row.detectable, row.noise_floor) == (None,) * 6
    assert comparison.tested == 0
    assert {one.verdict for one in comparison.rows} == {"deterministic", None}


def test_a_simulation_whose_trials_send_other_requests_has_intervals(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=24, simulated=True)
    comparison = load_study(tmp_path / "s").compare()
    rows = {row.measure: row for row in comparison.rows}
    assert rows["throughput_req_per_s"].replicated and rows["throughput_req_per_s"].simulated
    assert rows["cache_hit_rate"].verdict == "deterministic"


def test_margins() -> None:
    assert equivalence_margin("ratio", 0.05, 1e9) == pytest.approx(np.log(1.05))
    assert equivalence_margin("difference", 0.05, 0.3) == pytest.approx(0.05)
    assert equivalence_margin("difference", 0.05, 200.0) == pytest.approx(10)


def test_direction_decides_the_verdict(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 0.5}, trials=5, requests=40)
    comparison = load_study(tmp_path / "s").compare()
    for measure in ("throughput_req_per_s", "ttft_ms_p50", "e2e_ms_mean"):
        row = comparison.row(measure, CELL, "on")
        assert row is not None
        assert row.verdict == "regresses"
    neutral = comparison.row("observed_hit_tokens", CELL, "on")
    assert neutral is not None
    assert neutral.verdict is None


def test_no_effect_without_noise_is_equivalent(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", speedups={"off": 1.0, "on": 1.0}, trials=4, requests=8)
    rng = np.random.default_rng(0)
    for plan in record.runs:
        change_rounds(tmp_path / "s" / plan.name, {"throughput_req_per_s": np.exp(rng.normal(0, 0.01, 2))})
    row = load_study(tmp_path / "s").compare().row("throughput_req_per_s", CELL, "on")
    assert row is not None
    assert row.verdict == "equivalent"


@pytest.mark.parametrize("trials", [1, 2])
def test_too_few_trials_get_a_ratio_and_no_interval(tmp_path: Path, trials: int) -> None:
    make_study(tmp_path / "s", trials=trials, requests=8)
    comparison = load_study(tmp_path / "s").compare()
    row = comparison.row("throughput_req_per_s", CELL, "on")
    assert row is not None
    assert row.estimate > 1.5
    assert (row.low, row.high, row.p, row.q, row.detectable) == (None,) * 5
    assert row.verdict == "inconclusive"
    assert (row.bootstrap_low is None) == (trials == 1)
    assert comparison.tested == 0


def test_every_arm_is_compared_with_the_baseline(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 2.0, "salted": 1.0}, trials=3, requests=8)
    study = load_study(tmp_path / "s")
    assert {row.arm for row in study.compare().rows} == {"on", "salted"}
    other = study.compare(baseline="salted")
    assert {row.arm for row in other.rows} == {"on", "off"}
    assert other.baseline == "salted"


def test_another_swept_key_can_tell_the_arms_apart(tmp_path: Path) -> None:
    record = make_study(
        tmp_path / "s", cells=[{"order": "sorted", "n": "8"}, {"order": "shuffled", "n": "8"}], trials=2, requests=8
    )
    for plan in record.runs:  # the same requests in both, so that they may be paired
        change(tmp_path / "s" / plan.name, workload_sha256=f"{plan.trial}" * 64)
    study = load_study(tmp_path / "s")
    assert study.swept == {"cache": ("off", "on"), "order": ("sorted", "shuffled"), "n": ("8",)}
    comparison = study.compare("order")
    assert (comparison.factor, comparison.baseline) == ("order", "sorted")
    assert [(dict(pairing.cell), pairing.arm, len(pairing.pairs)) for pairing in comparison.pairings] == [
        ({"cache": "off", "n": "8"}, "shuffled", 2),
        ({"cache": "on", "n": "8"}, "shuffled", 2),
    ]
    with pytest.raises(ConfigError, match="did you mean order"):
        study.compare("ordr")


def test_tables_keep_the_order_of_the_design_whatever_the_order_of_execution(tmp_path: Path) -> None:
    cells = [{"n": n} for n in ("8", "32", "4")]
    speedups = {"off": 1.0, "salted": 1.0, "on": 2.0}
    record = make_study(tmp_path / "s", speedups=speedups, cells=cells, trials=2, requests=8)
    save_study(record.model_copy(update={"runs": record.runs[::-1]}), tmp_path / "s")
    study = load_study(tmp_path / "s")
    assert study.swept == {"cache": ("off", "salted", "on"), "n": ("8", "32", "4")}
    comparison = study.compare()
    places = [(pairing.cell["n"], pairing.arm) for pairing in comparison.pairings]
    assert places == [(n, arm) for n in ("8", "32", "4") for arm in ("salted", "on")]
    assert [level.cell["n"] for level in comparison.levels] == ["8"] * 3 + ["32"] * 3 + ["4"] * 3
    assert comparison.levels[0].runs == ("n=8-cache=off-t0", "n=8-cache=off-t1")


def test_a_single_arm_has_levels_and_no_rows(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    make_study(tmp_path / "s", compare=None, speedups={"": 1.0}, cells=cells, trials=2, requests=8)
    comparison = load_study(tmp_path / "s").compare()
    assert (comparison.factor, comparison.rows, comparison.pairings) == (None, (), ())
    assert [(level.cell, len(level.runs)) for level in comparison.levels] == [(cell, 2) for cell in cells]
    assert comparison.levels[0].mean("throughput_req_per_s") == pytest.approx(
        np.mean(comparison.levels[0].measures["throughput_req_per_s"])
    )


def test_verdicts_follow_benjamini_and_hochberg() -> None:
    # At 10% over 4: 0.01 <= 1/4 of it and 0.04 <= 2/4 of it stand, 0.08 > 3/4 of it falls.
    p = np.array([0.08, 0.01, 0.5, 0.04])
    verdicts, q, _ = decide(p, np.ones(4), np.array([True, False, True, True]), 0.1)
    assert list(verdicts) == ["inconclusive", "regresses", "inconclusive", "improves"]
    assert q == pytest.approx([0.08 * 4 / 3, 0.04, 0.5, 0.08])


def test_an_effect_too_small_to_matter_is_equivalent() -> None:
    verdicts, _, _ = decide(np.array([0.001]), np.array([0.001]), np.array([True]), 0.1)
    assert list(verdicts) == ["equivalent"]


def test_identical_arms_get_few_false_verdicts() -> None:
    rng = np.random.default_rng(4)
    effects = rng.normal(0, 0.05, (3000, 5, 3)) + rng.normal(0, 0.05, (3000, 1, 3))  # measures move together
    p = intervals.p_different(effects)
    p_equivalent = np.minimum(1, 2 * intervals.p_within(effects, np.log(1.05)))
    verdicts, _, _ = decide(p, p_equivalent, effects.mean(axis=-1) > 0, 0.1)
    assert np.isin(verdicts, ["improves", "regresses"]).any(axis=-1).mean() < 0.115


def test_the_table_has_one_line_per_cell_arm_and_measure(tmp_path: Path) -> None:
    make_study(tmp_path / "s", cells=[{"n": "1"}, {"n": "2"}], trials=3, requests=8)
    comparison = load_study(tmp_path / "s").compare()
    table = comparison.to_pandas()
    assert len(table) == len(comparison.rows)
    assert not table.duplicated(["n", "arm", "measure"]).any()
    assert {"estimate", "low", "high", "trials", "planned_trials", "verdict", "p", "q", "unit"} <= set(table.columns)


def change_rounds(folder: Path, measures: dict[str, tuple[float, ...]]) -> None:
    """Replaces measures of a run's rounds, one value a round."""
    rounds = load_run(folder).rounds
    changed = [
        one.model_copy(update={"measures": {**one.measures, **{k: float(v[i]) for k, v in measures.items()}}})
        for i, one in enumerate(rounds)
    ]
    change(folder, rounds=tuple(changed))


def test_what_is_computed_together_is_what_each_comparison_gives_alone(tmp_path: Path) -> None:
    """Of more rows than are computed at once, and of trials of several numbers of rounds."""
    cells = [{"max_num_seqs": str(n)} for n in range(8, 24)]
    record = make_study(tmp_path / "s", cells=cells, trials=3, rounds=2, requests=20)
    for plan in record.runs[:10:2]:
        run = load_run(tmp_path / "s" / plan.name)
        save_run(run.model_copy(update={"rounds": run.rounds[:1]}))
    comparison = load_study(tmp_path / "s").compare()
    assert len(comparison.rows) > 256

    def untested(rows: Iterable[Effect]) -> list[Effect]:
        return [replace(row, verdict=None, q=None, q_equivalent=None) for row in rows]

    alone = [
        row
        for pairing in comparison.pairings
        for row in compare_pairs([pairing], confidence=comparison.confidence, margin=comparison.margin)[0]
    ]
    assert untested(alone) == untested(comparison.rows)
