"""No two processes make the same run: a lock for each run's folder, beside the folders of a study."""

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCKS = ".locks"


@contextmanager
def alone(folder: Path, before_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keeps other processes off a run's folder, and waits for one that is at it already.

    A job may outlive its study, where a launcher gave it a process of its own. `before_waiting` is called first if
    there is one to wait for.
    """
    lock_file = _lock_file(folder)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            before_waiting()
            print(f"{folder.name}: waiting for the process that is making it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


def is_taken(folder: Path) -> bool:
    """Whether a process is at a run's folder now."""
    try:
        with _lock_file(folder).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # never made, or a file system without locks
    return False


def _lock_file(folder: Path) -> Path:
    return folder.parent / _LOCKS / folder.name
