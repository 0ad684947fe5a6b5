"""The watchdog of a round: an engine that owes tokens and gives none has hung."""

import time

from llmexp.errors import EngineError


def require_movement(moved_s: float, stall_timeout_s: float) -> None:
    """Raises EngineError if the last movement, at `moved_s` of CLOCK_MONOTONIC, is longer ago than allowed."""
    if time.monotonic() - moved_s > stall_timeout_s:
        raise EngineError(
            f"no request got a token for engine.stall_timeout_s={stall_timeout_s:g} s: the engine hangs, or it needs "
            "longer than that for a prompt and engine.stall_timeout_s should be raised"
        )
