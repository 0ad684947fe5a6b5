"""Intervals, tests and bootstraps on effects whose answers are known otherwise."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import signal

from llmexp.analyze import intervals

finite = st.floats(-3, 3).map(lambda value: round(value, 6))
effect_arrays = st.integers(3, 12).flatmap(lambda n: arrays(np.float64, n, elements=finite))


def autocorrelated(shape: tuple[int, int], phi: float, seed: int) -> np.ndarray:
    shocks = np.random.default_rng(seed).normal(size=shape)
    shocks[:, 0] /= np.sqrt(1 - phi**2)
    return signal.lfilter([1], [1, -phi], shocks, axis=-1)


def test_t_interval_by_the_table() -> None:
    # t(0.95, 2) = 2.919986 and the standard error of 0.1, 0.2, 0.3 is 0.1 / sqrt(3).
    low, high = intervals.t_interval(np.array([0.1, 0.2, 0.3]), 0.9)
    assert low == pytest.approx(0.2 - 2.919986 * 0.1 / 3**0.5, abs=1e-6)
    assert high == pytest.approx(0.2 + 2.919986 * 0.1 / 3**0.5, abs=1e-6)


@given(effect_arrays, st.floats(0.5, 0.99))
def test_the_interval_excludes_no_effect_exactly_where_the_test_rejects(effects: np.ndarray, confidence: float) -> None:
    assume(effects.std() > 1e-3)
    low, high = intervals.t_interval(effects, confidence)
    p = float(intervals.p_different(effects))
    assume(abs(p - (1 - confidence)) > 1e-9)
    assert (low > 0 or high < 0) == (p < 1 - confidence)


@given(effect_arrays, st.floats(0.5, 0.99), st.floats(0.01, 2))
def test_equivalence_holds_exactly_where_the_interval_is_within_the_margin(
    effects: np.ndarray, confidence: float, margin: float
) -> None:
    assume(effects.std() > 1e-3)
    low, high = intervals.t_interval(effects, confidence)
    p = 2 * float(intervals.p_within(effects, margin))
    assume(abs(p - (1 - confidence)) > 1e-9)
    assert (-margin < low and high < margin) == (p < 1 - confidence)


@given(effect_arrays, st.floats(-1, 1))
def test_one_sided_tests_share_the_probability(effects: np.ndarray, null: float) -> None:
    assume(effects.std() > 1e-3)
    above, below = intervals.p_above(effects, null), intervals.p_below(effects, null)
    assert float(above + below) == pytest.approx(1)
    assert float(intervals.p_different(effects, null)) == pytest.approx(2 * min(above, below))


def test_effects_without_any_variation() -> None:
    none, some = np.zeros(3), np.full(3, 0.8)
    assert intervals.p_different(none) == 1
    assert intervals.p_within(none, 0.05) < 1e-9
    assert intervals.p_different(some) < 1e-9
    assert intervals.p_within(some, 0.05) == 1
    low, high = intervals.t_interval(some, 0.9)
    assert (low, high) == (pytest.approx(0.8), pytest.approx(0.8))


def test_leading_axes_are_independent_studies() -> None:
    effects = np.random.default_rng(0).normal(size=(4, 3, 5))
    low, _ = intervals.t_interval(effects, 0.9)
    margins = np.array([0.1, 0.2, 0.3])
    within = intervals.p_within(effects, margins)
    assert low.shape == within.shape == (4, 3)
    assert low[2, 1] == pytest.approx(float(intervals.t_interval(effects[2, 1], 0.9)[0]))
    assert within[2, 1] == pytest.approx(float(intervals.p_within(effects[2, 1], 0.2)))


def test_bootstrap_of_constant_rounds_resamples_trials_alone() -> None:
    # Two trials with effects 1 and 3: a replicate's mean is 1, 2 or 3 with chances 1/4, 1/2, 1/4.
    baseline = [np.ones(4), np.ones(4)]
    treatment = [np.full(4, 2.0), np.full(4, 4.0)]
    low, high = intervals.hierarchical_bootstrap(baseline, treatment, "difference", 0.9)
    assert (low, high) == (1, 3)
    low, high = intervals.hierarchical_bootstrap(baseline, treatment, "difference", 0.3)
    assert (low, high) == (2, 2)


def test_bootstrap_of_a_single_trial_resamples_rounds() -> None:
    rng = np.random.default_rng(3)
    base, other = rng.normal(10, 1, 40), rng.normal(12, 1, 40)
    low, high = intervals.hierarchical_bootstrap([base], [other], "difference", 0.9, replicates=4000)
    # Normal theory for the difference of two means, with the variances that the bootstrap sees.
    half = 1.645 * np.sqrt(base.var() / 40 + other.var() / 40)
    assert low == pytest.approx(other.mean() - base.mean() - half, abs=0.04)
    assert high == pytest.approx(other.mean() - base.mean() + half, abs=0.04)


@given(st.integers(1, 60), st.data())
def test_circular_blocks_are_runs_of_neighbours(length: int, data: st.DataObject) -> None:
    block = data.draw(st.integers(1, length))
    indices = intervals.circular_blocks(length, block, 5, np.random.default_rng(0))
    assert indices.shape == (5, length)
    assert indices.min() >= 0
    assert indices.max() < length
    steps = (np.diff(indices, axis=1) - 1) % length
    inside = np.arange(1, length) % block != 0
    assert not steps[:, inside].any()


def test_blocks_grow_with_autocorrelation() -> None:
    medians = [
        np.median([intervals.block_length(series) for series in autocorrelated((40, 400), phi, seed=1)])
        for phi in (0.0, 0.5, 0.9)
    ]
    assert medians[0] <= 4 < medians[1] < medians[2] <= 100


def test_blocks_of_series_that_say_nothing() -> None:
    assert intervals.block_length(np.ones(100)) == 1
    assert intervals.block_length(np.arange(4.0)) == 1


def test_block_intervals_cover_where_independence_would_not() -> None:
    rng = np.random.default_rng(5)
    held = {"blocks": 0, "independent": 0}
    for series in autocorrelated((150, 512), 0.7, seed=2):
        block = intervals.block_length(series)
        means = series[intervals.circular_blocks(512, block, 200, rng)].mean(axis=-1)
        low, high = intervals.block_interval(series.mean(), means, 512, block, 0.9)
        held["blocks"] += bool(low <= 0 <= high)
        low, high = intervals.t_interval(series, 0.9)
        held["independent"] += bool(low <= 0 <= high)
    assert held["blocks"] / 150 > 0.82
    assert held["independent"] / 150 < 0.65


def test_simulated_intervals_cover_and_naive_bootstrap_over_two_trials_does_not() -> None:
    rng = np.random.default_rng(11)
    for trials in (3, 5):
        effects = 0.4 + rng.normal(0, 0.05, (4000, trials))
        low, high = intervals.t_interval(effects, 0.9)
        assert 0.88 <= ((low <= 0.4) & (high >= 0.4)).mean() <= 0.92
    launches = [np.exp(rng.normal(0, 0.05, (1000, 1)) + rng.normal(0, 0.005, (1000, 3))) for _ in range(4)]
    low, high = intervals.hierarchical_bootstrap(launches[:2], launches[2:], "ratio", 0.9, replicates=300)
    assert ((low <= 0) & (high >= 0)).mean() < 0.65
