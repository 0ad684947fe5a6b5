"""When requests are due: offsets from the round's start, deterministic from config and seed."""

import numpy as np
from numpy.typing import NDArray

from llmexp.errors import ConfigError, WorkloadError
from llmexp.schema.load import ClosedLoop, Constant, Gamma, LoadConfig, Poisson, Ramp


def arrivals(
    load: LoadConfig, n: int, *, seed: int = 0, offsets_s: NDArray[np.float64] | None = None
) -> NDArray[np.float64] | None:
    """Offsets in seconds of `n` arrivals, shape `(n,)`, non-decreasing; None for a closed loop.

    `offsets_s` are the workload's own, which `load=trace` replays. The first gap counts: a Poisson process
    does not begin with an arrival. Raises ConfigError if `load=trace` finds no offsets and WorkloadError if
    they go back in time.
    """
    match load:
        case ClosedLoop():
            return None
        case Constant(rate=rate):
            return np.arange(n) / rate
        case Poisson(rate=rate):
            return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))
        case Gamma(rate=rate, burstiness=shape):
            return np.cumsum(np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), n))
        case Ramp(start_rate=start, end_rate=end):
            return _ramp(n, start, end)
    if offsets_s is None:
        raise ConfigError(
            "load: got trace; this workload has no arrival times, as mooncake, azure, mixed_bursty and custom with "
            "arrival_s on every line have"
        )
    if len(offsets_s) and offsets_s[0] < 0:
        raise WorkloadError(f"load=trace: request 0 is due at {offsets_s[0]} s, before the trace begins")
    backwards = np.flatnonzero(np.diff(offsets_s) < 0)
    if len(backwards):
        i = int(backwards[0]) + 1
        raise WorkloadError(
            f"load=trace: request {i} is due at {offsets_s[i]} s, request {i - 1} at {offsets_s[i - 1]} s;"
            " arrival times must not go back"
        )
    return np.asarray(offsets_s, dtype=np.float64) / load.speed


def _ramp(n: int, start: float, end: float) -> NDArray[np.float64]:
    """Times at which the integral of a rate that goes linearly from start to end reaches 0, 1, …, n - 1.

    The rate after t seconds is start + slope t. It reaches `end` at the last of the n arrivals, so the slope
    is (end² - start²) / (2 (n - 1)).
    """
    counts = np.arange(n, dtype=np.float64)
    if n < 2 or start == end:
        return counts / start
    slope = (end**2 - start**2) / (2 * (n - 1))
    # (-start + √(start² + 2 slope k)) / slope, written so that a small slope loses no digits.
    rates: NDArray[np.float64] = np.sqrt(np.maximum(start**2 + 2 * slope * counts, 0.0))
    return 2 * counts / (start + rates)
