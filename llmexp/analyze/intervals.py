"""Intervals and tests on per-trial effects, and the bootstraps beside them.

An effect is a log ratio or a difference. Arrays of effects have shape `(..., trials)`; leading axes are
independent studies. Every test treats a trial (an engine launch) as the unit of replication.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Scale = Literal["ratio", "difference"]
Alternative = Literal["two-sided", "greater", "less"]

MIN_TRIALS = 3
"""Fewest trials for which an interval is claimed.

With two trials the t interval has one degree of freedom. It is exact only if the noise is exactly normal,
which two values cannot show, and its half-width at 90% is 4.5 standard deviations against 1.7 with three; a
bootstrap over two trials covers less than its name says by far (`benchmarks/verdicts.py`). Neither is
worth printing.
"""


def effect(baseline: Array, treatment: Array, scale: Scale) -> Array:
    """Log ratio or difference of treatment over baseline, elementwise."""
    return np.log(treatment / baseline) if scale == "ratio" else treatment - baseline


def t_interval(effects: Array, confidence: float) -> tuple[Array, Array]:
    """Student's t interval of the mean effect over the last axis (trials ≥ 2)."""
    interval = _t_test(effects, 0.0, "two-sided").confidence_interval(confidence)
    return np.asarray(interval.low), np.asarray(interval.high)


def p_different(effects: Array, null: float = 0.0) -> Array:
    """Two-sided p value of the mean effect being `null`."""
    return _p(effects, null, "two-sided")


def p_above(effects: Array, null: float) -> Array:
    """One-sided p value for the mean effect being above `null`."""
    return _p(effects, null, "greater")


def p_below(effects: Array, null: float) -> Array:
    """One-sided p value for the mean effect being below `null`."""
    return _p(effects, null, "less")


def p_within(effects: Array, margin: float | Array) -> Array:
    """Two one-sided tests: p value for the mean effect being within ±margin (Schuirmann 1987)."""
    bound = np.asarray(margin)
    return np.maximum(_p(effects, -bound, "greater"), _p(effects, bound, "less"))


def _t_test(effects: Array, null: float | Array, alternative: Alternative) -> Any:
    with warnings.catch_warnings():  # identical effects: zero variance, for which the limit is right
        warnings.simplefilter("ignore", RuntimeWarning)
        return stats.ttest_1samp(effects, null, axis=-1, alternative=alternative)


def _p(effects: Array, null: float | Array, alternative: Alternative) -> Array:
    shifted = effects - np.asarray(null)[..., np.newaxis]
    p = np.asarray(_t_test(shifted, 0.0, alternative).pvalue)
    return np.where(np.isnan(p), 1.0, p)  # 0 / 0: identical effects that equal the null say nothing against it


def hierarchical_bootstrap(
    baseline: Sequence[Array],
    treatment: Sequence[Array],
    scale: Scale,
    confidence: float,
    *,
    replicates: int = 2000,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Percentile interval of the mean effect from resampled trials, then resampled rounds in each arm of a
    trial.

    One array per trial, of shape `(..., rounds)`. It shows what the rounds add; its coverage is below
    nominal with few trials, which is why no verdict rests on it.
    """
    rng = np.random.default_rng(seed)
    trials = len(baseline)
    total: Array = np.zeros((*baseline[0].shape[:-1], replicates))
    for _ in range(trials):
        chosen = rng.integers(trials, size=replicates)
        for trial in range(trials):
            slots = np.flatnonzero(chosen == trial)
            means = [
                arm[trial][..., rng.integers(arm[trial].shape[-1], size=(len(slots), arm[trial].shape[-1]))].mean(-1)
                for arm in (baseline, treatment)
            ]
            total[..., slots] += effect(means[0], means[1], scale)
    tail = (1 - confidence) / 2
    low, high = np.quantile(total / trials, [tail, 1 - tail], axis=-1)
    return low, high


def circular_blocks(length: int, block: int, replicates: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices of shape `(replicates, length)`: blocks of consecutive requests, wrapped (Politis & Romano
    1992)."""
    starts = rng.integers(length, size=(replicates, -(-length // block)))
    indices = (starts[..., np.newaxis] + np.arange(block)) % length
    return indices.reshape(replicates, -1)[:, :length]


def block_length(series: Array) -> int:
    """Block length for circular bootstrap intervals of a series of shape `(n,)`.

    Twice the length that Politis & White (2004, corrected by Patton et al. 2009) estimate to be best for a
    variance, since intervals want longer blocks; 1 where no autocorrelation shows, and at most n / 4.
    """
    n = len(series)
    centred = series - series.mean()
    if n < 8 or not np.any(centred):
        return 1
    run = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    largest_lag = min(int(np.ceil(np.sqrt(n))) + run, n - 1)
    covariance = np.array([centred[: n - lag] @ centred[lag:] for lag in range(largest_lag + 1)]) / n
    small = np.abs(covariance[1:] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    quiet = [lag for lag in range(largest_lag - run + 1) if small[lag : lag + run].all()]
    last = quiet[0] if quiet else int(np.flatnonzero(~small)[-1]) + 1  # last lag whose correlation shows
    bandwidth = min(2 * max(last, 1), largest_lag)
    lags = np.abs(np.arange(-bandwidth, bandwidth + 1))
    weighted = np.clip(2 * (1 - lags / bandwidth), 0, 1) * covariance[lags]  # flat-top window
    spectrum, curvature = weighted.sum(), (lags * weighted).sum()
    if spectrum <= 0:
        return 1
    best = (2 * curvature**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * n ** (1 / 3)
    return 1 if best < 1.5 else int(min(np.round(2 * best), n // 4))


def block_interval(estimate: Array, samples: Array, length: int, block: int, confidence: float) -> tuple[Array, Array]:
    """Percentile interval over the first axis of block-bootstrap `samples`, widened for short series.

    Blocks understate the variance by about 1 - block / length, and length / block of them estimate it: so
    the bootstrap's deviations grow by the root of the inverse and by Student's over the normal quantile.
    `benchmarks/verdicts.py` prints the coverage that results.
    """
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, [tail, 1 - tail], axis=0)
    student = stats.t.ppf(1 - tail, max(length / block - 1, 1)) / stats.norm.ppf(1 - tail)
    wider = student * np.sqrt(length / (length - block))
    return estimate + wider * (low - estimate), estimate + wider * (high - estimate)
