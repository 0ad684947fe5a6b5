"""The processes that a test has started, some of which end at any moment and others of which come up late."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.waiting import PATIENCE_S, until

T = TypeVar("T")

_POLL_S = 0.02


@dataclass(frozen=True)
class Command:
    """A command under way; `out` is the file of what it says."""

    process: subprocess.Popen[bytes]
    out: Path

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def comes_to(self, ripe: Callable[[], bool]) -> None:
        """Waits until something is so, which must come while the command runs, and within the test's own timeout."""
        while not ripe():
            assert self.process.poll() is None, self.said
            time.sleep(_POLL_S)


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, **environment: str) -> Iterator[Command]:
    """A command begun in a folder. It does not outlast the block, nor does an engine of its, whatever fails there."""
    out = folder / "out"
    with out.open("a") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env={**os.environ, **environment})
    try:
        yield Command(process, out)
    finally:
        family = descendants(process.pid) if process.poll() is None else []
        process.kill()
        process.wait()
        left(family, PATIENCE_S)  # their keeper ends them
        print(out.read_text(errors="replace"))  # which is shown if the test fails


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
    """The one of them that has a word in its command line, once there is one; a child that it has just forked has its
    command line for a moment."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [process for process in descendants(pid) if word in command_line(process)]
        return len(found) == 1

    until(is_there, f"{word} under process {pid}")
    return found[0]


def left(processes: Iterable[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are still alive after so long; returns at once when none is."""
    deadline = time.monotonic() + within_s
    while (living := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return living
