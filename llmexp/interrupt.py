"""Ctrl-C and SIGTERM: the first ends the work in good order, the second is answered, the third ends the process."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ANSWER = b"llmexp: ending already, and writing down what was measured; once more ends it at once\n"

_seen = 0
_first = int(signal.SIGINT)
_holding = _pending = False


def exit_code() -> int:
    """With what a process ends that was interrupted: 130 by Ctrl-C, 143 by SIGTERM."""
    return 128 + _first


def install() -> None:
    """Takes both signals in this process from now on; only its main thread can."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _take)
        sys.unraisablehook = _again


def _again(dropped: "sys.UnraisableHookArgs") -> None:
    """Repeats a first signal that came where Python drops exceptions, such as a finalizer, once that is over."""
    global _seen
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    _seen = 0
    threading.Timer(0.01, os.kill, (os.getpid(), _first)).start()


def _take(number: int, frame: object) -> None:
    global _seen, _first, _pending
    _seen += 1
    if _seen == 1:
        _first = number
    if _seen == 1 and not _holding:
        raise KeyboardInterrupt
    _pending = _pending or _seen == 1
    if _seen > 2:
        os._exit(exit_code())  # the engine's keeper notices and ends too, and the client's workers, with the trace made
    os.write(2, _ANSWER)


@contextmanager
def held() -> Iterator[None]:
    """Lets a block, and a block around it that is held too, come to its end before the first signal ends the work."""
    global _holding, _pending
    around, _holding = _holding, True
    try:
        yield
    finally:
        _holding = around
    if _pending and not _holding:
        _pending = False
        raise KeyboardInterrupt
