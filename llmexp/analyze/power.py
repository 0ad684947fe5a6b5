"""How small an effect a study can see, and how many trials an effect needs (noncentral t)."""

import functools

import numpy as np
from scipy import optimize, stats

from llmexp.analyze.intervals import MIN_TRIALS, Array

POWER = 0.8
MAX_TRIALS = 1000


def power(effect: float, deviation: float, trials: int, confidence: float) -> float:
    """Chance that the `confidence` t interval over `trials` excludes no effect.

    `effect` and `deviation` (between trials, of the paired effect) are on the same scale: log ratio or
    difference.
    """
    if deviation == 0:
        return float(effect != 0)
    critical = stats.t.ppf((1 + confidence) / 2, trials - 1)
    shift = abs(effect) * np.sqrt(trials) / deviation
    if shift > 2 * critical + 20:  # certain, and beyond what nct evaluates well
        return 1.0
    above = stats.nct.sf(critical, trials - 1, shift)
    below = stats.nct.cdf(-critical, trials - 1, shift) if shift < 8 else 0.0  # then under the normal tail of -8
    return float(above + below)


def detectable(deviation: float, trials: int, confidence: float, at_power: float = POWER) -> float:
    """Smallest effect that `trials` trials find with chance `at_power` (minimum detectable effect)."""
    return deviation * _detectable_in_deviations(trials, confidence, at_power) if deviation else 0.0


@functools.cache
def _detectable_in_deviations(trials: int, confidence: float, at_power: float) -> float:
    highest = (2 * stats.t.ppf((1 + confidence) / 2, trials - 1) + 20) / np.sqrt(trials)
    return float(optimize.brentq(lambda size: power(size, 1.0, trials, confidence) - at_power, 0, highest))


def trials_needed(effect: float, deviation: float, confidence: float, at_power: float = POWER) -> int | None:
    """Fewest trials that find `effect` with chance `at_power`; None if more than 1000."""
    low, high = MIN_TRIALS, MAX_TRIALS
    if power(effect, deviation, high, confidence) < at_power:
        return None
    while low < high:
        middle = (low + high) // 2
        if power(effect, deviation, middle, confidence) >= at_power:
            high = middle
        else:
            low = middle + 1
    return low


def noise_floor(launches: Array, confidence: float) -> float:
    """How far apart two launches of the same arm land by chance: the half-width of a prediction interval.

    `launches` has shape `(trials,)`, trials ≥ 2: log means, or means for a difference, of one arm. An upper
    bound where each trial has its own workload, since pairs cancel what a workload adds.
    """
    spread = np.sqrt(2) * launches.std(ddof=1)
    return float(stats.t.ppf((1 + confidence) / 2, len(launches) - 1) * spread)
