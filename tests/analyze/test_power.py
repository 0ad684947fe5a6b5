"""The planner against published sample sizes and against simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.analyze import intervals, power


@pytest.mark.parametrize(("effect", "trials"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_trials_of_the_one_sample_t_test_by_cohen(effect: float, trials: int) -> None:
    """Small, medium and large effects at 5% two-sided and 80% power (the values that G*Power gives)."""
    assert power.trials_needed(effect, 1.0, 0.95) == trials


def test_power_by_the_planner_is_that_of_simulated_studies() -> None:
    rng = np.random.default_rng(0)
    for trials in (3, 5, 10):
        effects = rng.normal(0.08, 0.06, (4000, trials))
        found = (intervals.p_different(effects) <= 0.1).mean()
        assert power.power(0.08, 0.06, trials, 0.9) == pytest.approx(found, abs=0.025)


@given(st.floats(1e-4, 10), st.integers(2, 200), st.floats(0.55, 0.99))
def test_the_detectable_effect_has_the_power_that_defines_it(deviation: float, trials: int, confidence: float) -> None:
    smallest = power.detectable(deviation, trials, confidence)
    assert power.power(smallest, deviation, trials, confidence) == pytest.approx(power.POWER, abs=1e-6)


@given(st.floats(0.02, 2), st.floats(0.01, 1))
def test_one_trial_fewer_is_too_few(effect: float, deviation: float) -> None:
    trials = power.trials_needed(effect, deviation, 0.9)
    if trials == 0:
        assert power.power(effect, deviation, power.MAX_TRIALS, 0.9) < power.POWER
    else:
        assert power.power(effect, deviation, trials, 0.9) >= power.POWER
        assert trials == intervals.MIN_TRIALS or power.power(effect, deviation, trials - 1, 0.9) < power.POWER


def test_power_without_noise_and_without_effect() -> None:
    assert power.power(0.1, 0.0, 3, 0.9) == 1
    assert power.power(0.0, 0.0, 3, 0.9) == 0
    assert power.power(0.0, 1.0, 5, 0.9) == pytest.approx(0.1)
    assert power.power(1e6, 1.0, 5, 0.9) == 1
    assert power.detectable(0.0, 3, 0.9) == 0
    assert power.trials_needed(0.001, 1.0, 0.9) == 0


def test_the_noise_floor_holds_the_difference_of_two_launches() -> None:
    rng = np.random.default_rng(1)
    held = [
        abs(np.diff(rng.normal(0, 0.1, 2))[0]) <= power.noise_floor(rng.normal(0, 0.1, 5), 0.9) for _ in range(4000)
    ]
    assert np.mean(held) == pytest.approx(0.9, abs=0.02)
