"""How long things take: a step, from what it computes, and the way to the engine and back."""

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What one step computes; also seconds per unit of each, as the coefficients of a cost.

    ``attended_pairs`` counts (query token, key token) pairs, which the attention's FLOPs follow, and
    ``context_tokens`` the tokens whose KV is read (every sequence's own, shared or not).
    """

    steps: float = 0
    prefill_tokens: float = 0
    decode_tokens: float = 0
    sampled: float = 0
    attended_pairs: float = 0
    context_tokens: float = 0


NOTHING = Work()


@dataclass(frozen=True)
class StepCost:
    """What a step takes of the device, in seconds per unit of ``Work``: what always adds up, and two resources of which
    the slower one counts. A roofline has ``compute`` and ``memory``; a fitted linear cost only ``fixed``.

    ``prefill_launch_s`` is what a step that holds prefill tokens, for which there is no whole CUDA graph, takes of the
    engine core before the device can have ended it; the launch of others takes nothing.
    """

    fixed: Work = NOTHING
    compute: Work = NOTHING
    memory: Work = NOTHING
    prefill_launch_s: float = 0.0

    def duration_s(self, work: Work) -> float:
        return _dot(self.fixed, work) + max(_dot(self.compute, work), _dot(self.memory, work))

    def launch_s(self, work: Work) -> float:
        return self.prefill_launch_s if work.prefill_tokens else 0.0


UNIT_COST = StepCost(fixed=Work(steps=1.0))
"""Every step takes one second: the clock counts steps."""


@dataclass(frozen=True)
class FrontEnd:
    """What lies between a client and the engine core: one process, which does one thing after the other, as they come.

    Each request takes it ``request_s``, and ``prompt_token_s`` for each token of its prompt. Each step's tokens take it
    ``output_s``, ``token_s`` for each of them, and ``echo_s`` for each token of a prompt that gets its first answer;
    then they reach their clients together.
    """

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    output_s: float = 0.0
    token_s: float = 0.0
    echo_s: float = 0.0


NO_FRONT_END = FrontEnd()


def _dot(coefficients: Work, work: Work) -> float:
    total = 0.0
    for coefficient, amount in zip(coefficients, work, strict=True):
        total += coefficient * amount
    return total
