"""What an arm did to single requests: the same request in both arms, and both latency distributions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmexp.analyze.intervals import Array, block_interval, block_length, circular_blocks
from llmexp.analyze.pairs import Cell, Pairing
from llmexp.results import TRACE, RunResult

LATENCIES = {"ttft_ms": "first_token_s", "e2e_ms": "last_token_s"}
QUANTILES = (50, 95)
MIN_REQUESTS = 20
_AT_ONCE = 1 << 22  # values that are resampled together


@dataclass(frozen=True)
class RequestEffect:
    """A latency effect within the launches that were made.

    `statistic` is `paired`, the geometric mean over requests of the ratio to the same request under the
    baseline, or `p50` and `p95`, the ratio of that percentile of both arms. The interval resamples blocks
    of consecutive requests, since neighbours share a batch and a queue. It says how much the requests sent
    decide, and nothing of what another launch would bring: no verdict rests on it. `faster` is the share of
    requests that took less time.
    """

    cell: Cell
    arm: str
    measure: str
    statistic: str
    estimate: float
    low: float
    high: float
    faster: float
    requests: int
    trials: int
    block: int


def latencies(run: RunResult, measure: str) -> Array:
    """Latencies of shape `(rounds, requests)` in ms over valid rounds; NaN for a request that did not
    complete."""
    return _latencies(run, (measure,))[measure]


def _latencies(run: RunResult, measures: Iterable[str]) -> dict[str, Array]:
    trace = run.trace()
    valid = [one.index for one in run.rounds if one.valid]
    trace = trace.filter(pc.is_in(trace["round"], pc.cast(valid, "int32")))
    rounds = np.searchsorted(valid, trace["round"].to_numpy())
    requests = trace["request"].to_numpy()
    completed, due_s = trace["error"].is_null().to_numpy(), trace["intended_s"].to_numpy()
    tables = {}
    for measure in measures:
        tables[measure] = np.full((len(valid), int(requests.max()) + 1 if len(requests) else 0), np.nan)
        milliseconds = 1000 * (trace[LATENCIES[measure]].to_numpy() - due_s)
        tables[measure][rounds, requests] = np.where(completed, milliseconds, np.nan)
    return tables


def request_effects(
    pairings: Sequence[Pairing], *, confidence: float, replicates: int = 500, seed: int = 0
) -> tuple[RequestEffect, ...]:
    """Paired and distribution effects of TTFT and e2e, where at least 20 requests completed in both arms."""
    rng = np.random.default_rng(seed)
    effects = []
    for pairing in pairings:
        pairs = [
            pair
            for pair in pairing.pairs
            if all((run.folder / TRACE).exists() for run in (pair.baseline, pair.treatment))
        ]
        tables = [[_latencies(run, LATENCIES) for run in (pair.baseline, pair.treatment)] for pair in pairs]
        for measure in LATENCIES:
            both = [_common(base[measure], other[measure]) for base, other in tables]
            both = [(base, other) for base, other in both if base.shape[1] >= MIN_REQUESTS]
            if both:
                effects += _effects(pairing, measure, both, confidence, replicates, rng)
    return tuple(effects)


def _common(baseline: Array, treatment: Array) -> tuple[Array, Array]:
    """Both arms at the requests that completed, with a positive latency, in every valid round of both."""
    n = min(baseline.shape[1], treatment.shape[1])
    good = (baseline[:, :n] > 0).all(axis=0) & (treatment[:, :n] > 0).all(axis=0)
    return baseline[:, :n][:, good], treatment[:, :n][:, good]


def _effects(
    pairing: Pairing,
    measure: str,
    both: Sequence[tuple[Array, Array]],
    confidence: float,
    replicates: int,
    rng: np.random.Generator,
) -> list[RequestEffect]:
    """`both` has one pair of arrays `(rounds, requests)` per trial."""
    paired = [np.log(other).mean(axis=0) - np.log(base).mean(axis=0) for base, other in both]
    estimates, samples, blocks = np.zeros(3), np.zeros((replicates, 3)), []
    for (base, other), ratios in zip(both, paired, strict=True):
        block = max(block_length(series) for series in (ratios, np.log(base).mean(0), np.log(other).mean(0)))
        blocks.append(block)
        estimates += _statistics(base, other, ratios, np.arange(len(ratios))[np.newaxis])[0]
        drawn = circular_blocks(len(ratios), block, replicates, rng)
        at_once = max(1, _AT_ONCE // base.size)
        for start in range(0, replicates, at_once):
            some = slice(start, start + at_once)
            samples[some] += _statistics(base, other, ratios, drawn[some])
    estimates, samples = estimates / len(both), samples / len(both)
    shortest = min(len(ratios) for ratios in paired)
    low, high = block_interval(estimates, samples, shortest, max(blocks), confidence)
    return [
        RequestEffect(
            cell=pairing.cell,
            arm=pairing.arm,
            measure=measure,
            statistic=statistic,
            estimate=float(np.exp(estimates[i])),
            low=float(np.exp(low[i])),
            high=float(np.exp(high[i])),
            faster=float((np.concatenate(paired) < 0).mean()),
            requests=sum(len(ratios) for ratios in paired),
            trials=len(both),
            block=max(blocks),
        )
        for i, statistic in enumerate(("paired", *(f"p{q}" for q in QUANTILES)))
    ]


def _statistics(base: Array, other: Array, ratios: Array, drawn: NDArray[np.int64]) -> Array:
    """The log of each statistic, of shape `(replicates, 3)`, over the requests `drawn`, `(replicates, requests)`."""
    both = (arm[:, drawn].transpose(1, 0, 2).reshape(len(drawn), -1) for arm in (base, other))
    of_base, of_other = (np.log(np.percentile(arm, QUANTILES, axis=1)) for arm in both)
    return np.column_stack([ratios[drawn].mean(axis=1), *(of_other - of_base)])
