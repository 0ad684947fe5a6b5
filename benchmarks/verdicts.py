"""Coverage and error rates of llmexp's intervals and verdicts, from simulated studies with known effects.

    python benchmarks/verdicts.py

Noise is log-normal per launch and per round; the latencies of requests within a round are autocorrelated.
Prints what was asked, what came out and whether it is within bounds; exits with 1 if anything is not.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.signal import lfilter

from llmexp.analyze import intervals, power
from llmexp.analyze.compare import decide
from llmexp.analyze.intervals import Array

CONFIDENCE = 0.90
LEVEL = 1 - CONFIDENCE
MARGIN = float(np.log(1.05))
STUDIES, CHUNK = 4000, 500
ROUNDS, REQUESTS = 3, 32
EFFECT = float(np.log(1.5))


@dataclass(frozen=True)
class Noise:
    """Log-normal noise: standard deviations of the logarithm, and the autocorrelation between requests."""

    launch: float = 0.03
    round: float = 0.02
    request: float = 0.20
    autocorrelation: float = 0.6


ROUNDS_DIFFER, LAUNCHES_DIFFER = Noise(), Noise(launch=0.06, round=0.01, request=0.05)


class Bounds:
    """Collects what was measured against what it must lie between."""

    def __init__(self) -> None:
        self.misses: list[str] = []

    def check(self, what: str, value: float, low: float, high: float) -> str:
        inside = low <= value <= high
        if not inside:
            self.misses.append(f"{what}: {value:.3f} is not within {low:.3f} to {high:.3f}")
        return "yes" if inside else "NO"


def autocorrelated(shape: tuple[int, ...], deviation: float, phi: float, rng: np.random.Generator) -> Array:
    """Stationary AR(1) series along the last axis, with standard deviation `deviation`."""
    shocks = rng.standard_normal(shape) * np.sqrt(1 - phi**2)
    shocks[..., 0] /= np.sqrt(1 - phi**2)
    return deviation * lfilter([1.0], [1.0, -phi], shocks, axis=-1)


def arm(trials: int, noise: Noise, rng: np.random.Generator) -> Array:
    """Mean latency of every round of one arm in a chunk of studies, shape `(studies, trials, rounds)`."""
    launch = rng.normal(0, noise.launch, (CHUNK, trials, 1, 1))
    rounds = rng.normal(0, noise.round, (CHUNK, trials, ROUNDS, 1))
    requests = autocorrelated((CHUNK, trials, ROUNDS, REQUESTS), noise.request, noise.autocorrelation, rng)
    return np.exp(launch + rounds + requests).mean(axis=-1)


def studies(
    trials: int, effect: float, rng: np.random.Generator, noise: Noise = ROUNDS_DIFFER
) -> Iterator[tuple[Array, Array]]:
    """Chunks of studies: rounds of the baseline and of an arm that is exp(effect) times it."""
    for _ in range(STUDIES // CHUNK):
        yield arm(trials, noise, rng), np.exp(effect) * arm(trials, noise, rng)


def paired(trials: int, effect: float, rng: np.random.Generator) -> Array:
    """Per-trial log ratios of arm means, shape `(studies, trials)`."""
    return np.concatenate(
        [
            intervals.effect(base.mean(axis=-1), other.mean(axis=-1), "ratio")
            for base, other in studies(trials, effect, rng)
        ]
    )


def coverage(bounds: Bounds, rng: np.random.Generator) -> Table:
    """How often each interval holds the true effect, and how wide it is."""
    table = Table("noise", "trials", "t", "width", "naive bootstrap", "width", "claimed", "in bounds")
    table.title = f"Coverage of {CONFIDENCE:.0%} intervals of a ratio of {np.exp(EFFECT):.1f}, and median width"
    for name, noise in (("rounds differ", ROUNDS_DIFFER), ("launches differ", LAUNCHES_DIFFER)):
        for trials in (2, 3, 5, 10):
            table.add_row(name, str(trials), *covered(bounds, trials, name, noise, rng))
    return table


def covered(bounds: Bounds, trials: int, name: str, noise: Noise, rng: np.random.Generator) -> Iterator[str]:
    """Coverage and width of the t interval and of the naive hierarchical bootstrap."""
    shares: list[list[float]] = []
    for base, other in studies(trials, EFFECT, rng, noise):
        effects = intervals.effect(base.mean(axis=-1), other.mean(axis=-1), "ratio")
        found = [
            intervals.t_interval(effects, CONFIDENCE),
            intervals.hierarchical_bootstrap(
                [base[:, i] for i in range(trials)],
                [other[:, i] for i in range(trials)],
                "ratio",
                CONFIDENCE,
                replicates=400,
                seed=int(rng.integers(2**31)),
            ),
        ]
        shares.append(
            [
                float(value)
                for low, high in found
                for value in (
                    ((low <= EFFECT) & (high >= EFFECT)).mean(),
                    np.median(np.exp(high) - np.exp(low)),
                )
            ]
        )
    t, t_width, naive, naive_width = np.mean(shares, axis=0)
    claimed = trials >= intervals.MIN_TRIALS
    yield from (f"{t:.1%}", f"{t_width:.2f}", f"{naive:.1%}", f"{naive_width:.2f}")
    yield "t" if claimed else "none"
    yield bounds.check(f"t coverage, {name}, {trials} trials", t, 0.88, 0.92) if claimed else "-"


def verdicts(effects: Array) -> Array:
    """Verdicts of studies whose effects have shape `(studies, comparisons, trials)`; higher is better."""
    p = intervals.p_different(effects)
    p_equivalent = np.minimum(1, 2 * intervals.p_within(effects, MARGIN))
    return decide(p, p_equivalent, effects.mean(axis=-1) > 0, LEVEL)[0]


def false_verdicts(bounds: Bounds, rng: np.random.Generator) -> Table:
    """Studies whose arms are the same, or differ by exactly the margin, and get a verdict all the same."""
    table = Table("truth", "trials", "comparisons", "false verdict", "share", "nominal", "in bounds")
    table.title = f"False verdicts ({STUDIES} studies each; with several comparisons: any in the study)"
    slack = 2.6 * np.sqrt(0.1 * 0.9 / STUDIES)  # 99% of simulation noise

    def add(truth: str, trials: int, comparisons: int, wrong: str, share: float, nominal: float) -> None:
        inside = bounds.check(f"{truth}, {trials} trials, {wrong}", share, 0, nominal + slack)
        table.add_row(truth, str(trials), str(comparisons), wrong, f"{share:.1%}", f"{nominal:.0%}", inside)

    for trials in (3, 5, 10):
        alone = verdicts(paired(trials, 0.0, rng)[:, np.newaxis])
        for wrong in ("improves", "regresses"):
            add("A/A", trials, 1, wrong, float((alone == wrong).mean()), LEVEL / 2)
        # Measures of one run move together: a shared part and one of their own.
        several = np.stack([paired(trials, 0.0, rng) for _ in range(6)], axis=1)
        together = verdicts((several + several[:, :1]) / np.sqrt(2))
        wrong_any = np.isin(together, ["improves", "regresses"]).any(axis=-1)
        add("A/A", trials, 6, "improves or regresses", float(wrong_any.mean()), LEVEL)
        edge = verdicts(paired(trials, MARGIN, rng)[:, np.newaxis])
        add("at margin", trials, 1, "equivalent", float((edge == "equivalent").mean()), LEVEL / 2)
        mixed = np.stack([paired(trials, effect, rng) for effect in (0.0, 0.0, 0.0, MARGIN, MARGIN, MARGIN)], axis=1)
        found = verdicts(mixed) == "equivalent"
        rate = (found[:, 3:].sum(axis=-1) / np.maximum(found.sum(axis=-1), 1)).mean()
        add("half at margin", trials, 6, "equivalent (rate among them)", float(rate), LEVEL)
    return table


def planned_power(bounds: Bounds, rng: np.random.Generator) -> Table:
    """How often an effect is found, against what the planner says of it."""
    table = Table("trials", "true ratio", "planned", "found", "in bounds")
    table.title = f"Power of the {CONFIDENCE:.0%} interval to exclude no effect ({STUDIES} studies each)"
    deviation = float(np.mean([paired(2, 0.0, rng).std(axis=-1, ddof=1) ** 2 for _ in range(3)]) ** 0.5)
    for trials in (3, 5, 10):
        for effect in (0.5, 1.0, 1.5):
            size = effect * power.detectable(deviation, trials, CONFIDENCE)
            planned = power.power(size, deviation, trials, CONFIDENCE)
            found = float((intervals.p_different(paired(trials, size, rng)) <= LEVEL).mean())
            inside = bounds.check(f"power, {trials} trials", found, planned - 0.05, planned + 0.05)
            table.add_row(str(trials), f"{np.exp(size):.3f}", f"{planned:.1%}", f"{found:.1%}", inside)
    for ratio in (1.05, 1.10):
        needed = int(power.trials_needed(np.log(ratio), deviation, CONFIDENCE))
        planned = power.power(np.log(ratio), deviation, needed, CONFIDENCE)
        found = float((intervals.p_different(paired(needed, np.log(ratio), rng)) <= LEVEL).mean())
        inside = bounds.check(f"trials needed for {ratio}", found, planned - 0.05, planned + 0.05)
        table.add_row(f"{needed} (planned)", f"{ratio:.3f}", f"{planned:.1%}", f"{found:.1%}", inside)
    return table


def requests(rng: np.random.Generator) -> Table:
    """Coverage of the per-request interval in one launch: blocks against requests taken as independent."""
    table = Table("requests", "autocorrelation", "median block", "blocks: coverage", "independent: coverage")
    table.title = f"Coverage of {CONFIDENCE:.0%} intervals of the paired per-request effect (500 launches each)"
    for n in (64, 256, 1024):
        for phi in (0.0, 0.5, 0.8):
            lengths, held = [], []
            for series in autocorrelated((500, n), ROUNDS_DIFFER.request, phi, rng):
                block = intervals.block_length(series)
                lengths.append(block)
                means = series[intervals.circular_blocks(n, block, 200, rng)].mean(axis=-1)
                low, high = intervals.block_interval(series.mean(), means, n, block, CONFIDENCE)
                iid_low, iid_high = intervals.t_interval(series, CONFIDENCE)
                held.append([low <= 0 <= high, iid_low <= 0 <= iid_high])
            blocks, independent = np.mean(held, axis=0)
            table.add_row(str(n), f"{phi}", f"{np.median(lengths):.0f}", f"{blocks:.1%}", f"{independent:.1%}")
    return table


def main() -> int:
    """Prints the tables; 1 if a figure is out of bounds."""
    bounds, rng, console = Bounds(), np.random.default_rng(20), Console(width=110)
    for table in (
        coverage(bounds, rng),
        false_verdicts(bounds, rng),
        planned_power(bounds, rng),
        requests(rng),
    ):
        table.title_justify = "left"
        console.print(table)
    for miss in bounds.misses:
        console.print(f"out of bounds: {miss}")
    return bool(bounds.misses)


if __name__ == "__main__":
    sys.exit(main())
