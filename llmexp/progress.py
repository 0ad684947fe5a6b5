"""What a person sees while a run works: one line a phase, with a bar where there is something to count."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

T = TypeVar("T")

console = Console(stderr=True)
if not console.is_terminal:
    console = Console(stderr=True, width=100)


@contextmanager
def phase(text: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Shows a phase until it ends; yields a callback that takes how many of how many are done.

    Without a terminal, one plain line is written when the phase ends.
    """
    if not console.is_terminal:
        started = time.monotonic()
        yield lambda done, of: None
        print(f"{text} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def each(text: str, items: Sequence[T]) -> Iterator[T]:
    """The items one by one, with a bar of how many are done."""
    with phase(text, len(items)) as done:
        for i, item in enumerate(items):
            yield item
            done(i + 1, len(items))
