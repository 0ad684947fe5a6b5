"""Claims stated before the runs, answered with the evidence: supported, refuted or undecided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from llmexp.analyze import intervals
from llmexp.analyze.compare import Comparison, Effect, equivalence_margin, scale_of
from llmexp.analyze.pairs import near_misses
from llmexp.errors import ConfigError
from llmexp.measure.catalog import MEASURES
from llmexp.schema.study import Claim

Outcome = Literal["supported", "refuted", "undecided"]


@dataclass(frozen=True)
class Answer:
    """What the study says to a claim. `evidence` holds the effects that it covers; `q` is None if none was
    tested."""

    claim: Claim
    outcome: Outcome
    reason: str
    evidence: tuple[Effect, ...]
    p: float | None = None
    q: float | None = None


def check_claims(claims: Sequence[Claim], swept: Mapping[str, Sequence[str]]) -> None:
    """Refuses claims that no study of these swept keys and values could answer; cheap, so before any run.

    Raises ConfigError that names the claim and the nearest accepted words.
    """
    for i, claim in enumerate(claims):
        where = f"study.claims[{i}]"
        if claim.measure not in MEASURES:
            raise ConfigError(
                f"{where}.measure={claim.measure}: no such measure{near_misses(claim.measure, MEASURES)} "
                f"(measures: {', '.join(MEASURES)})"
            )
        for key, value in claim.cell.items():
            if key not in swept:
                raise ConfigError(
                    f"{where}.cell.{key}: this key is not swept{near_misses(key, swept)} "
                    f"(swept keys: {', '.join(swept) or 'none'})"
                )
            if value not in swept[key]:
                raise ConfigError(
                    f"{where}.cell.{key}={value}: not a swept value{near_misses(value, swept[key])} "
                    f"(values: {', '.join(swept[key])})"
                )
        if claim.threshold is not None and claim.threshold <= 0 and scale_of(claim.measure) == "ratio":
            raise ConfigError(f"{where}.threshold={claim.threshold}: a ratio to the baseline is above 0")


def answer_claims(comparison: Comparison, claims: Sequence[Claim]) -> tuple[Answer, ...]:
    """Answers every claim from the rows that it covers, at false discovery rate 1 - confidence over the
    claims.

    A claim holds if it holds in every covered cell (intersection-union test: the largest p value), and
    falls if it falls in any (the smallest, times the number of cells). One-sided p values are doubled, so
    that a claim about one cell is decided exactly where the interval leaves the threshold. What is the same in every
    trial needs no test, and among the others it would loosen the control of what is uncertain.
    """
    drafts = [_draft(comparison, claim) for claim in claims]
    tested = [i for i, draft in enumerate(drafts) if draft.p is not None and any(row.varies for row in draft.evidence)]
    adjusted = stats.false_discovery_control([drafts[i].p for i in tested]) if tested else []
    q_values = dict(zip(tested, map(float, adjusted), strict=True))
    return tuple(
        _decided(draft, q_values.get(i, draft.p), comparison.confidence, q_values.get(i))
        for i, draft in enumerate(drafts)
    )


def _decided(draft: Answer, p: float | None, confidence: float, q: float | None) -> Answer:
    if p is None or p <= 1 - confidence:
        return replace(draft, q=q)
    return replace(draft, outcome="undecided", reason="the interval leaves both open", q=q)


def _draft(comparison: Comparison, claim: Claim) -> Answer:
    """The outcome that the evidence leans to, with its p value before the adjustment over claims."""
    rows = tuple(row for row in comparison.rows if row.measure == claim.measure and _covers(claim, row, comparison))
    if not rows:
        return Answer(claim, "undecided", "no valid pair of runs has this measure there", ())
    if not all(row.replicated or row.deterministic for row in rows):
        few = min(row.trials for row in rows)
        return Answer(
            claim,
            "undecided",
            f"not replicated: {few} of the {intervals.MIN_TRIALS} valid pairs that it needs",
            rows,
        )
    of_model = ", the same in every trial of the simulation" if all(row.deterministic for row in rows) else ""
    holds, falls = np.array([_p_values(claim, row, comparison.margin) for row in rows]).T
    p_holds, p_falls = float(min(1, 2 * holds.max())), float(min(1, 2 * falls.min() * len(rows)))
    if p_holds <= p_falls:
        return Answer(claim, "supported", f"in every cell that it covers{of_model}", rows, p_holds)
    return Answer(claim, "refuted", f"in at least one cell that it covers{of_model}", rows, p_falls)


def _covers(claim: Claim, row: Effect, comparison: Comparison) -> bool:
    return all(
        (row.arm if key == comparison.factor else row.cell.get(key)) == value for key, value in claim.cell.items()
    )


def _p_values(claim: Claim, row: Effect, margin: float) -> tuple[float, float]:
    """One-sided p values for the claim holding and for it failing in one cell."""
    effects = row.effects()
    if claim.direction == "equivalent":
        bound = equivalence_margin(row.scale, margin, row.baseline_mean)
        beyond = np.minimum(intervals.p_above(effects, bound), intervals.p_below(effects, -bound))
        return float(intervals.p_within(effects, bound)), float(beyond)
    if row.scale == "ratio":
        threshold = float(np.log(1.0 if claim.threshold is None else claim.threshold))
    else:
        threshold = claim.threshold or 0.0
    above, below = float(intervals.p_above(effects, threshold)), float(intervals.p_below(effects, threshold))
    return (above, below) if claim.direction == "higher" else (below, above)
