"""Readings of an engine's gauges while a round runs."""

import threading

import pytest

from llmexp.engines.counters import Counters
from llmexp.engines.sampling import sampled


def test_there_is_a_reading_at_the_start_and_one_at_the_end() -> None:
    running = iter([1.0, 2.0])
    with sampled(lambda: Counters(requests_running=next(running)), 3600.0) as samples:
        assert [sample["requests_running"] for sample in samples] == [1.0]
    assert [sample["requests_running"] for sample in samples] == [1.0, 2.0]


def test_a_round_that_fails_does_not_wait_for_an_engine_that_hangs() -> None:
    asked, over, given_up = threading.Event(), threading.Event(), threading.Event()

    def read() -> Counters:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            if not over.wait(60):
                given_up.set()
        return Counters()

    with pytest.raises(RuntimeError, match="hangs"), sampled(read, 0.01):
        assert asked.wait(60)
        raise RuntimeError("the engine hangs")
    assert not given_up.is_set()
    over.set()
