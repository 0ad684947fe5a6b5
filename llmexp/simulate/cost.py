"""How long a step takes, from what it computes."""

from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """What one step computes; the terms that its cost is linear in.

    ``attended_pairs`` counts (query token, key token) pairs, which the attention's FLOPs follow, and
    ``context_tokens`` the tokens whose KV is read (every sequence's own, shared or not).
    """

    steps: int
    prefill_tokens: int
    decode_tokens: int
    sampled: int
    attended_pairs: int
    context_tokens: int


Coefficients = tuple[float, float, float, float, float, float]
FREE: Coefficients = (0.0,) * 6


@dataclass(frozen=True)
class StepCost:
    """Seconds per unit of ``Work``: what always adds up, and two resources of which the slower one counts.

    A roofline has ``compute`` and ``memory``; a fitted linear cost only ``fixed``.
    """

    fixed: Coefficients = FREE
    compute: Coefficients = FREE
    memory: Coefficients = FREE

    def duration_s(self, work: Work) -> float:
        return _dot(self.fixed, work) + max(_dot(self.compute, work), _dot(self.memory, work))


UNIT_COST = StepCost(fixed=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
"""Every step takes one second: the clock counts steps."""


def _dot(coefficients: Coefficients, work: Work) -> float:
    total = 0.0
    for coefficient, amount in zip(coefficients, work, strict=True):
        total += coefficient * amount
    return total
