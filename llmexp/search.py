"""Searches over one key of the config: bisection instead of a grid. They ask a probe and know nothing of engines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

Value = int | float
SLO_SHARE = 0.99  # of the requests, for a value to meet the SLO


@dataclass(frozen=True)
class Floor:
    """`smallest` value that was seen to work and `largest_failed` below it; None where there is none between the
    two ends."""

    smallest: Value | None
    largest_failed: Value | None


def floor(works: Callable[[Value], bool], low: Value, high: Value, resolution: float) -> Floor:
    """The smallest value that works, of those between `low` and `high`, where every larger one works too.

    It is known to within `resolution`, a share of itself. Integer ends are searched in integers.
    """
    if not works(high):
        return Floor(None, high)
    if works(low):
        return Floor(low, None)
    while high - low > resolution * high and (middle := _between(low, high)) is not None:
        if works(middle):
            high = middle
        else:
            low = middle
    return Floor(high, low)


@dataclass(frozen=True)
class Point:
    """What was measured at a value: the throughput of each repeat, and whether the SLO was met; None without one."""

    value: Value
    throughputs: tuple[float, ...]
    met_slo: bool | None

    @property
    def mean(self) -> float:
        """Mean throughput over the repeats."""
        return fmean(self.throughputs)


@dataclass(frozen=True)
class Saturation:
    """Where throughput stops rising. `knee` is the smallest value tried that is as good as the `best` one, by the
    gain that counts; `slo_limit` the largest value that met the SLO, below the smallest that did not (None: none
    met it, or there is none); `falls` says that the largest value tried is worse again than the best. `dips` are values
    worse by the gain than a smaller one, while a larger one is as good again."""

    knee: Value
    best: Value
    slo_limit: Value | None
    falls: bool
    dips: tuple[Value, ...]
    points: tuple[Point, ...]


def saturation(
    probe: Callable[[Value], Point], low: Value, high: Value, *, gain: float, resolution: float
) -> Saturation:
    """Where throughput stops rising by more than `gain` (a share), or the SLO breaks, between `low` and `high`.

    Values are doubled from `low` to `high`, or until the SLO breaks: throughput may dip and rise again. Then the knee,
    and the value up to which the SLO is met, are bisected until neighbours differ by a share of at most `resolution`.
    """
    tried: dict[Value, Point] = {}

    def at(value: Value) -> Point:
        if value not in tried:
            tried[value] = probe(value)
        return tried[value]

    value = low
    while at(value).met_slo is not False and value < high:
        value = min(2 * value, high)

    def good() -> float:
        return max(point.mean for point in tried.values()) / (1 + gain)

    _bisect(tried, at, lambda point: point.mean >= good(), resolution)
    _bisect(tried, at, lambda point: point.met_slo is False, resolution)
    points = tuple(tried[key] for key in sorted(tried))
    broken = [point.value for point in points if point.met_slo is False]
    met = [point.value for point in points if point.met_slo and point.value < min(broken, default=math.inf)]
    best = max(points, key=lambda point: point.mean)
    return Saturation(
        knee=next(point.value for point in points if point.mean >= good()),
        best=best.value,
        slo_limit=max(met, default=None),
        falls=points[-1].mean < good(),
        dips=_dips(points, gain),
        points=points,
    )


def _dips(points: Sequence[Point], gain: float) -> tuple[Value, ...]:
    """Points lie in the order of their values."""
    found = []
    for i, point in enumerate(points):
        before = max((other.mean for other in points[:i]), default=0.0)
        after = max((other.mean for other in points[i + 1 :]), default=0.0)
        if point.mean * (1 + gain) < before <= after:
            found.append(point.value)
    return tuple(found)


def _bisect(
    tried: dict[Value, Point], at: Callable[[Value], Point], holds: Callable[[Point], bool], resolution: float
) -> None:
    """Narrows the gap between the smallest value where something holds and the largest tried below it."""
    while True:
        first = next((value for value in sorted(tried) if holds(tried[value])), None)
        below = [value for value in tried if first is not None and value < first]
        if first is None or not below or first - max(below) <= resolution * first:
            return
        middle = _between(max(below), first)
        if middle is None:
            return
        at(middle)


def _between(low: Value, high: Value) -> Value | None:
    """The middle of two values, an integer between integers, else with four decimals; None if they are neighbours."""
    if isinstance(low, int) and isinstance(high, int):
        whole = (low + high) // 2
        return whole if low < whole < high else None
    middle = round((low + high) / 2, 4)
    return middle if low < middle < high else None


def sentence(found: Floor | Saturation, key: str) -> str:
    """What was found, in words."""
    if isinstance(found, Floor):
        if found.smallest is None:
            return f"{key}={found.largest_failed} does not start; raise study.search_high"
        if found.largest_failed is None:
            return f"{key}={found.smallest} starts already; lower study.search_low to find the floor"
        return f"smallest {key} that starts: {found.smallest} ({found.largest_failed} does not)"
    broken = [point.value for point in found.points if point.met_slo is False]
    if found.knee < found.points[-1].value:
        said = f"throughput stops rising at {key}={found.knee} (best: {found.best})"
    else:
        said = f"throughput still rises at {key}={found.knee}"
    if found.dips:
        said += f", with a dip at {', '.join(map(str, found.dips))}"
    if found.falls:
        said += " and falls again beyond"
    if broken:
        limit = "no value tried" if found.slo_limit is None else f"{key}={found.slo_limit}"
        said += f"; the SLO is met up to {limit}, not at {min(broken)}"
    return said
