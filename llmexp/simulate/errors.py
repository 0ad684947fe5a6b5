"""What a simulation refuses. Each message names the request or setting, what it got and what fits."""

from typing import Literal

from llmexp.errors import WRONG_INPUT, LlmexpError


class SimulationError(LlmexpError):
    """A simulation cannot run, or cannot go on."""


class RequestNeverFitsError(SimulationError):
    """A request needs more KV blocks than the whole pool holds: the engine would preempt it for ever."""


class TokenBudgetTooSmallError(SimulationError):
    """Without chunked prefill, a sequence longer than ``max_num_batched_tokens`` could never be scheduled."""


class TimeStandsStillError(SimulationError):
    """The simulated clock does not advance, or no request makes progress any more."""


class CalibrationError(SimulationError):
    """The measured steps do not determine the coefficients of the cost."""

    exit_code = WRONG_INPUT


StandstillReason = Literal["stuck", "timeless", "fruitless"]


def standstill(
    reason: StandstillReason, now_s: float, duration_s: float, running: int, waiting: int, free_blocks: int
) -> TimeStandsStillError:
    """The error, with the state that caused it."""
    what = {
        "stuck": "nothing can be scheduled, now or later",
        "timeless": f"a step takes {duration_s} s, which must be positive and finite",
        "fruitless": "no request gets a token any more",
    }[reason]
    return TimeStandsStillError(f"at {now_s} s {what}: {running} running, {waiting} waiting, {free_blocks} free blocks")
