"""Bisection finds floors and knees that are known, and asks little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp import search
from llmexp.search import Floor, Point


@given(st.integers(1, 5000))
def test_the_floor_is_found_to_within_the_resolution(true_floor: int) -> None:
    asked: list[float] = []

    def works(value: float) -> bool:
        asked.append(value)
        return value >= true_floor

    found = search.floor(works, 1, 5000, resolution=0.05)
    assert found.smallest is not None and found.smallest >= true_floor
    if found.largest_failed is None:
        assert found.smallest == true_floor == 1
    else:
        assert found.largest_failed < true_floor
        assert found.smallest - found.largest_failed <= max(0.05 * found.smallest, 1)
    assert len(asked) == len(set(asked)) <= 15
    assert all(isinstance(value, int) for value in asked)


def test_a_floor_outside_the_ends_is_told() -> None:
    assert search.floor(lambda value: False, 0.1, 0.9, 0.01) == Floor(None, 0.9)
    assert search.floor(lambda value: True, 0.1, 0.9, 0.01) == Floor(0.1, None)
    assert "raise study.search_high" in search.sentence(Floor(None, 0.9), "kv.gpu_memory_utilization")
    assert "lower study.search_low" in search.sentence(Floor(0.1, None), "kv.gpu_memory_utilization")


def test_fractions_stay_short_enough_to_read() -> None:
    found = search.floor(lambda value: value >= 0.1234567, 0.05, 0.5, 0.01)
    assert found.smallest is not None and found.smallest == round(found.smallest, 4)


@given(st.integers(40, 900), st.sampled_from([0.0, 0.5]))
def test_the_knee_is_where_a_plateau_begins(true_knee: int, fall: float) -> None:
    def probe(value: float) -> Point:
        beyond = max(value - 2 * true_knee, 0) / true_knee
        rate = min(value, true_knee) * max(1 - fall * beyond, 0.1)
        return Point(value, (rate * 0.999, rate * 1.001), met_slo=True)

    found = search.saturation(probe, 32, 4096, gain=0.05, resolution=0.1)
    # The knee is good enough within the gain, and known to within the resolution.
    assert true_knee / 1.06 / 1.1 <= found.knee <= true_knee * 1.12
    assert found.slo_limit == (max(p.value for p in found.points))
    assert len(found.points) <= 14


def test_a_fall_beyond_the_peak_is_seen_and_said() -> None:
    rates = {32: 10.0, 64: 20.0, 128: 30.0, 256: 12.0, 512: 11.0, 1024: 10.0}
    found = search.saturation(
        lambda value: Point(value, (rates.get(int(value), 25.0),), True), 32, 1024, gain=0.05, resolution=0.5
    )
    assert (found.best, found.falls) == (128, True)
    assert found.dips == ()
    assert "falls again" in search.sentence(found, "max_num_seqs")


def test_a_dip_is_passed_and_said() -> None:
    # As a served engine did: its front end held it up between 128 and 512 requests at once.
    rates = {32: 104.0, 64: 138.0, 128: 167.0, 256: 150.0, 512: 174.0, 1024: 189.0}
    found = search.saturation(
        lambda value: Point(value, (rates.get(int(value), 180.0),), True), 32, 1024, gain=0.05, resolution=0.5
    )
    assert (found.best, found.falls, found.dips) == (1024, False, (256,))
    assert "with a dip at 256" in search.sentence(found, "max_num_seqs")


@pytest.mark.parametrize(("breaks_at", "limit"), [(200, range(180, 200)), (10, None)])
def test_the_slo_ends_the_search(breaks_at: int, limit: range | None) -> None:
    found = search.saturation(
        lambda value: Point(value, (float(value),), value < breaks_at), 32, 4096, gain=0.05, resolution=0.1
    )
    assert found.slo_limit is None if limit is None else found.slo_limit in limit
    assert max(point.value for point in found.points) <= 256  # no doubling beyond the break
    assert "SLO" in search.sentence(found, "load.concurrency")
