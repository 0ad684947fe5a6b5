"""How small an effect a study can see, and how many trials an effect needs (noncentral t)."""

import functools

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from llmexp.analyze.intervals import MIN_TRIALS, Array

Counts = NDArray[np.int64]

POWER = 0.8
MAX_TRIALS = 1000


def power(
    effect: float | Array, deviation: float | Array, trials: int | Counts, confidence: float
) -> NDArray[np.float64]:
    """Chance that the `confidence` t interval over `trials` excludes no effect.

    `effect` and `deviation` (between trials, of the paired effect) are on the same scale: log ratio or
    difference. They and `trials` may be arrays, whose shapes broadcast.
    """
    n = np.asarray(trials)
    critical = stats.t.ppf((1 + confidence) / 2, n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # identical trials: certain, or nothing to find (0 / 0)
        shift = np.abs(effect) * np.sqrt(n) / np.asarray(deviation, float)
    critical, n, shift = np.broadcast_arrays(critical, n, shift)
    certain = shift > 2 * critical + 20  # and beyond what nct evaluates well
    chance = np.where(certain, 1.0, 0.0)
    open_ = ~certain & ~np.isnan(shift)
    chance[open_] = stats.nct.sf(critical[open_], n[open_] - 1, shift[open_])
    both = open_ & (shift < 8)  # else the other side is under the normal tail of -8
    chance[both] += stats.nct.cdf(-critical[both], n[both] - 1, shift[both])
    return chance


def detectable(deviation: float | Array, trials: int, confidence: float, at_power: float = POWER) -> Array:
    """Smallest effect that `trials` trials find with chance `at_power` (minimum detectable effect)."""
    return np.asarray(deviation) * _detectable_in_deviations(trials, confidence, at_power)


@functools.cache
def _detectable_in_deviations(trials: int, confidence: float, at_power: float) -> float:
    highest = (2 * stats.t.ppf((1 + confidence) / 2, trials - 1) + 20) / np.sqrt(trials)
    return float(optimize.brentq(lambda size: float(power(size, 1.0, trials, confidence)) - at_power, 0, highest))


def trials_needed(
    effect: float | Array, deviation: float | Array, confidence: float, at_power: float = POWER
) -> Counts:
    """Fewest trials that find `effect` with chance `at_power`; 0 if more than 1000 would be needed."""
    possible = power(effect, deviation, MAX_TRIALS, confidence) >= at_power
    low, high = np.full(possible.shape, MIN_TRIALS), np.full(possible.shape, MAX_TRIALS)
    while np.any(between := low < high):
        middle = (low + high) // 2
        enough = power(effect, deviation, middle, confidence) >= at_power
        high = np.where(between & enough, middle, high)
        low = np.where(between & ~enough, middle + 1, low)
    return np.where(possible, low, 0)


def noise_floor(launches: Array, confidence: float) -> Array:
    """How far apart two launches of the same arm land by chance: the half-width of a prediction interval.

    `launches` has shape `(..., trials)`, trials ≥ 2: log means, or means for a difference, of one arm. An upper
    bound where each trial has its own workload, since pairs cancel what a workload adds.
    """
    spread = np.sqrt(2) * launches.std(axis=-1, ddof=1)
    return np.asarray(stats.t.ppf((1 + confidence) / 2, launches.shape[-1] - 1) * spread)
