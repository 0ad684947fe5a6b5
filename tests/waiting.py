"""Waits of tests: each with an end, also where what they wait for never comes about."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

PATIENCE_S = 120.0  # processes start meanwhile, and the machine may be busy
_POLL_S = 0.01


def until(condition: Callable[[], object], what: str = "it") -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came about"
        time.sleep(_POLL_S)


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Does something beside the block, in a thread; what it raises is raised at the end of the block, however that
    ends."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        try:
            yield
        finally:
            done.result()
