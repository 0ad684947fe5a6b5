"""Reads a server's gauges now and then while a round runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmexp.engines.counters import Counters
from llmexp.errors import EngineError

Sample = dict[str, float | None]


@contextmanager
def sampled(read: Callable[[], Counters], interval_s: float) -> Iterator[list[Sample]]:
    """Collects a sample every `interval_s` in a thread: `monotonic_s` and the gauges of `Counters`.

    A reading that fails is left out; the round itself notices a dead engine.
    """
    samples: list[Sample] = []
    over = threading.Event()

    def collect() -> None:
        while not over.wait(interval_s):
            try:
                samples.append({"monotonic_s": time.monotonic(), **read().gauges})
            except (EngineError, OSError):
                continue

    thread = threading.Thread(target=collect, name="gauges", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
