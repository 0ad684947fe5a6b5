"""The processes that a test has started, some of which end at any moment and others of which come up late."""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

T = TypeVar("T")

_PATIENCE_S = 60.0
_POLL_S = 0.02


def answers(processes: Iterable[psutil.Process], question: Callable[[psutil.Process], T]) -> list[T]:
    """What those that still live answer."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none either
            found.append(question(process))
    return found


def command_line(process: psutil.Process) -> str:
    """Empty once it has ended."""
    return " ".join(word for line in answers([process], psutil.Process.cmdline) for word in line)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def descendants(pid: int) -> list[psutil.Process]:
    """Living processes that descend from one."""
    return [process for process in psutil.Process(pid).children(recursive=True) if alive(process)]


def descendant(pid: int, word: str) -> psutil.Process:
    """The one of them that has a word in its command line, once there is one."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (found := [process for process in descendants(pid) if word in command_line(process)]):
        assert time.monotonic() < deadline, f"no {word} comes up under process {pid}"
        time.sleep(_POLL_S)
    (only,) = found
    return only


def left(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are still alive after so long; returns at once when none is."""
    deadline = time.monotonic() + within_s
    while (living := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return living
