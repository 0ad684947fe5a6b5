"""What a simulation refuses. Each message names the request or setting, what it got and what fits."""

from llmexp.errors import LlmexpError


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
