"""A timer of an event loop, exact to tens of microseconds: uvloop's own timers count whole milliseconds."""

import asyncio
import ctypes
import math
import os
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC, _TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 1, os.O_NONBLOCK, os.O_CLOEXEC, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls back once at each time that is set (Linux timerfd; times of CLOCK_MONOTONIC)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._ring = ring
        self._at: float | None = None
        loop.add_reader(self._fd, self._rang)

    def set(self, at: float | None) -> None:
        """Sets the time of the next call; one in the past calls at once, None calls never."""
        if at == self._at:
            return
        self._at = at
        seconds, fraction = (0, 0.0) if at is None else divmod(max(at, 1e-9), 1.0)
        value = _Timespec(int(seconds), math.ceil(fraction * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), value)
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set anew meanwhile
            return
        self._at = None
        self._ring()
