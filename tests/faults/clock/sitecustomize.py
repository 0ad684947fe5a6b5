"""Where PYTHONPATH leads here, the wall clock jumps: `FAULT_CLOCK` seconds, half a second after the process began."""

import os
import time

_began = time.monotonic()
_true = time.time


def _jumping() -> float:
    return _true() + (float(os.environ["FAULT_CLOCK"]) if time.monotonic() - _began > 0.5 else 0.0)


if "FAULT_CLOCK" in os.environ:
    time.time = _jumping
