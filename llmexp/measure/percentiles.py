"""Percentiles with the confidence that their sample allows.

The interval is distribution-free: of n independent values, the number below the q-th percentile is
binomial(n, q/100), so the percentile lies between two order statistics with a known probability (Hahn &
Meeker, Statistical Intervals, 1991, section 5.2). A percentile without such a pair is not supported by its
sample, and has no value.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, bdtrc

from llmexp.errors import ConfigError
from llmexp.results import Percentile

CONFIDENCE = 0.90


def percentile(values: ArrayLike, q: float, confidence: float = CONFIDENCE) -> Percentile:
    """The q-th percentile of `values` (shape `(n,)`; NaN are left out), interpolated linearly between
    neighbours.

    Values of one request, or of one round, are not quite independent; then the interval is too narrow. Raises
    ConfigError unless 0 < q < 100.
    """
    if not 0 < q < 100:
        raise ConfigError(f"percentile {q}: it must lie between 0 and 100, both excluded")
    sample = np.asarray(values, dtype=np.float64)
    sample = np.sort(sample[~np.isnan(sample)])
    ranks = interval_ranks(len(sample), q, confidence)
    if ranks is None:
        return Percentile(value=None, low=None, high=None, n=len(sample))
    low, high = ranks
    value = float(np.percentile(sample, q))
    return Percentile(value=value, low=float(sample[low - 1]), high=float(sample[high - 1]), n=len(sample))


def interval_ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Ranks (from 1) of the order statistics that hold the q-th percentile with at least this confidence.

    The interval covers with probability P(low <= B < high), B ~ binomial(n, q/100). Both tails get half of
    the error where there are values that far out; else the tail that has none takes its least share and the
    other one the rest. None if even the whole sample covers too rarely.
    """
    p, error = q / 100, 1 - confidence
    if n < 2:
        return None
    reach = 10 + 10 * math.sqrt(n * p * (1 - p))  # beyond it, no probability to speak of
    ranks = np.arange(max(1, math.floor(n * p - reach)), min(n, math.ceil(n * p + reach)) + 1)
    missed_below = bdtr(ranks - 1, n, p)  # P(B < rank): the percentile is below this value
    missed_above = bdtrc(ranks - 1, n, p)  # P(B >= rank): it is above
    least_below, least_above = float(missed_below[0]), float(missed_above[-1])
    if least_below + least_above > error:
        return None
    below = error - least_above if least_above > error / 2 else max(error / 2, least_below)
    low = int(np.searchsorted(missed_below, below, side="right")) - 1
    high = int(np.flatnonzero(missed_above <= error - float(missed_below[low]))[0])
    return int(ranks[low]), int(ranks[high])
