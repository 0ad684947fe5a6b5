import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from llmexp.errors import ConfigError
from llmexp.measure.percentiles import interval_ranks, percentile


def coverage(n: int, q: float, low: int, high: int) -> float:
    """P(low <= B < high), with scipy's binomial."""
    below = stats.binom(n, q / 100)
    return float(below.cdf(high - 1) - below.cdf(low - 1))


@given(n=st.integers(2, 2000), q=st.floats(1, 99.9))
def test_the_interval_covers_with_the_confidence_that_it_claims_or_there_is_none(n: int, q: float) -> None:
    ranks = interval_ranks(n, q)
    if ranks is None:
        assert coverage(n, q, 1, n) < 0.90 + 1e-9
    else:
        low, high = ranks
        assert 1 <= low < high <= n
        assert coverage(n, q, low, high) >= 0.90 - 1e-9
        # Neither end can be drawn in by one rank.
        assert high == low + 1 or coverage(n, q, low, high - 1) < 0.90 + 1e-9


@pytest.mark.parametrize(("q", "least"), [(50, 5), (90, 22), (95, 45), (99, 230)])
def test_a_percentile_needs_its_sample(q: int, least: int) -> None:
    # The smallest n with 1 - p^n - (1 - p)^n >= 0.9.
    p = q / 100
    assert next(n for n in range(2, 1000) if 1 - p**n - (1 - p) ** n >= 0.9) == least
    assert percentile(np.arange(least - 1), q).value is None
    assert percentile(np.arange(least), q).value is not None


def test_tails_share_the_error_where_both_can_be_had() -> None:
    low, high = interval_ranks(1000, 50) or (0, 0)
    assert stats.binom(1000, 0.5).cdf(low - 1) <= 0.05 < stats.binom(1000, 0.5).cdf(low)
    assert low + high == pytest.approx(1001, abs=2)


def test_the_interval_of_a_large_sample_is_the_normal_approximation() -> None:
    n, q = 10_000_000, 95
    low, high = interval_ranks(n, q) or (0, 0)
    half = 1.6449 * np.sqrt(n * 0.95 * 0.05)
    assert low == pytest.approx(n * 0.95 - half, abs=10)
    assert high == pytest.approx(n * 0.95 + half, abs=10)


@given(st.lists(st.floats(-1e6, 1e6), min_size=45, max_size=200))
def test_the_value_is_numpys_and_lies_within_its_interval(values: list[float]) -> None:
    found = percentile([*values, float("nan")], 95)
    assert found.n == len(values)
    assert found.value == np.percentile(values, 95)
    assert found.low is not None and found.high is not None and found.value is not None
    assert found.low in values and found.high in values
    assert found.low <= found.high


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    truth = stats.expon.ppf(0.9)
    found = [percentile(rng.exponential(size=100), 90) for _ in range(2000)]
    held = np.mean([f.low <= truth <= f.high for f in found])  # type: ignore[operator]
    assert 0.90 - 3 * np.sqrt(0.09 / 2000) <= held <= 0.97


@pytest.mark.parametrize("q", [0, 100, -5, 101])
def test_a_percentile_outside_the_open_range_is_refused(q: float) -> None:
    with pytest.raises(ConfigError, match=str(q)):
        percentile([1.0, 2.0], q)
