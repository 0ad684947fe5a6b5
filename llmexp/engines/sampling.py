"""Reads a server's gauges now and then while a round runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from llmexp.engines.counters import Counters
from llmexp.errors import EngineError

Sample = dict[str, float | None]


@contextmanager
def sampled(read: Callable[[], Counters], interval_s: float) -> Iterator[list[Sample]]:
    """Collects samples at the start, every `interval_s` in a thread, and at the end: `monotonic_s` and the gauges.

    A reading that fails is left out; the round itself notices a dead engine. After a block that fails there is none
    at the end: an engine that hangs would keep its failure back until the reading is given up.
    """
    samples: list[Sample] = []
    over = threading.Event()

    def sample() -> None:
        with suppress(EngineError, OSError):
            samples.append({"monotonic_s": time.monotonic(), **read().gauges})

    def collect() -> None:
        while not over.wait(interval_s):
            sample()

    sample()
    thread = threading.Thread(target=collect, name="gauges", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
    thread.join()
    sample()
