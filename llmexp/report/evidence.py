"""Why a study came out as it did: what the engine and the device did under each arm, side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmexp.analyze.compare import Comparison, Level
from llmexp.analyze.intervals import MIN_TRIALS, t_interval
from llmexp.analyze.pairs import Pair, cell_label, shortage
from llmexp.analyze.study import Study
from llmexp.report.blocks import by_cell, filled, section
from llmexp.report.table import number, ratio
from llmexp.results import RunResult
from llmexp.words import count

KV_BUDGETS = ("kv.gpu_memory_utilization", "kv.num_blocks", "kv.cache_memory_bytes")


@dataclass(frozen=True)
class Place:
    """An arm in a cell with its valid runs and those whose engine had too little memory to start."""

    level: Level
    runs: tuple[RunResult, ...]
    refused: tuple[RunResult, ...]

    def mean(self, measure: str, shown: Callable[[float | None], str] = lambda value: number(value)) -> str:
        """A measure's mean over trials as text; `-` where it is not known."""
        return shown(self.level.mean(measure))

    @property
    def capacity_bytes(self) -> float | None:
        """What the KV cache takes, by its tokens and the model's dimensions."""
        tokens = self.level.mean("kv_capacity_tokens")
        a_token = self.runs[0].engine.get("kv_bytes_per_token") if self.runs else None
        return tokens * a_token if tokens and a_token else None

    @property
    def bound(self) -> float | None:
        """The hit rate that the audit of the workload allows, mean over the valid rounds that were counted."""
        rates = [
            one.contract["expected_hit_tokens"] / one.contract["queried_tokens"]
            for run in self.runs
            for one in run.rounds
            if one.valid and one.contract.get("queried_tokens") and one.contract.get("expected_hit_tokens") is not None
        ]
        return sum(rates) / len(rates) if rates else None


def places(study: Study, levels: Sequence[Level]) -> list[Place]:
    """Levels with their runs."""
    runs = {run.name: run for run in study.runs}
    return [
        Place(level, tuple(runs[name] for name in level.runs), tuple(runs[name] for name in level.refused))
        for level in levels
    ]


def engine_section(study: Study, comparison: Comparison) -> list[str]:
    """What each engine did under load, as far as it told: a table with a heading."""
    keys = [key for key in study.swept if key in KV_BUDGETS]
    title = "KV budgets" if keys else "What the engine did"
    found = by_capacity(places(study, comparison.levels)) if keys else places(study, comparison.levels)
    return section(title, engine_table(comparison, found))


def engine_table(comparison: Comparison, found: Sequence[Place]) -> list[str]:
    columns: dict[str, Callable[[Place], str]] = {
        "KV cache": _capacity,
        "prompt pressure": lambda place: place.mean("prompt_pressure", ratio),
        "hit rate": _hit_rate,
        "preemptions": lambda place: place.mean("preemptions"),
        "running": lambda place: place.mean("requests_running_mean"),
        "steps": lambda place: place.mean("engine_steps", whole),
        "tokens a step": lambda place: place.mean("tokens_per_step", whole),
        "queue mean (ms)": lambda place: place.mean("queue_ms_mean"),
        "queue p50 (ms)": lambda place: queue(place, 50),
        "queue p95 (ms)": lambda place: queue(place, 95),
        "throughput (req/s)": lambda place: place.mean("throughput_req_per_s"),
        "TTFT p50 (ms)": lambda place: place.mean("ttft_ms_p50"),
        "e2e p95 (ms)": lambda place: place.mean("e2e_ms_p95"),
        "SLO met": lambda place: place.mean("goodput_share", share) if _has_slo(place) else "-",
    }
    if not any(place.runs or place.refused for place in found):
        return []
    note = (
        "Means of the valid runs, per round. KV cache: what it holds; of an engine that did not start, what memory "
        "there was. Prompt pressure: most prompt tokens in flight at once, over what the cache holds, as if none were "
        "shared. Hit rate: counted, of what the workload allows. Running: requests that the engine ran at once. A "
        "queue percentile lies between two bounds of the engine's own histogram."
    )
    return [_table(comparison, found, columns), note]


def device_section(study: Study, comparison: Comparison) -> list[str]:
    """How near to the hardware's limit each arm came, and what energy and money it took; nothing where unknown."""
    found = [place for place in places(study, comparison.levels) if place.runs]
    several = any(_gpus(place) > 1 for place in found)
    columns: dict[str, Callable[[Place], str]] = {
        "least time (s)": lambda place: place.mean("limit_s"),
        "prefill (s)": lambda place: place.mean("limit_prefill_s"),
        "decode (s)": lambda place: place.mean("limit_decode_s"),
        "all-reduce (s)": lambda place: place.mean("limit_all_reduce_s"),
        "reached": lambda place: place.mean("limit_share", share),
        "req/s a GPU": lambda place: place.mean("throughput_req_per_s_per_gpu") if several else "-",
        "power (W)": lambda place: place.mean("gpu_power_w_mean", whole),
        "J a request": lambda place: place.mean("energy_j_per_request"),
        "J an output token": lambda place: place.mean("energy_j_per_output_token"),
        "GPU busy": lambda place: place.mean("gpu_utilization_mean", share),
        "clock (MHz)": lambda place: place.mean("gpu_sm_clock_mhz_mean", whole),
        "power-capped": lambda place: place.mean("gpu_power_capped_share", share),
        "throttled": lambda place: place.mean("gpu_throttled_share", share),
        "cost of 1M tokens": lambda place: place.mean("cost_per_million_tokens"),
    }
    if not found or all(text(place) == "-" for text in columns.values() for place in found):
        return []
    note = (
        "Least time: what arithmetic, reading of weights and KV, and sums over devices take at the datasheet's rates; "
        "reached: that over the time that a round took. Power and energy: of all GPUs used, by NVML, over the round. "
        "Busy: share of time in which any kernel ran. Power-capped: share of samples at the board's power limit, usual "
        "under full load; throttled: slowed by heat or a fault. Cost: prompt and output tokens, by gpu.cost_per_hour."
    )
    return section("The device", [_table(comparison, found, columns), note])


def weaknesses(study: Study, comparison: Comparison) -> Iterator[str]:
    """What a reader must know before the numbers: throttled runs, pairs across devices, and what an engine could not
    tell."""
    throttled = [run for run in study.runs if run.engine.get("throttled")]
    if throttled:
        worst = max(one.measures.get("gpu_throttled_share", 0.0) for run in throttled for one in run.rounds)
        yield (
            f"**{len(throttled)} of {count(len(study.runs), 'run')} throttled**: heat or a fault slowed a GPU, in up "
            f"to {share(worst)} of a round's samples ({', '.join(run.name for run in throttled[:5])}"
            f"{', …' if len(throttled) > 5 else ''})."
        )
    pairs = [pair for pairing in comparison.pairings for pair in pairing.pairs]
    apart = [pair for pair in pairs if _on_other_gpus(pair)]
    if apart:
        places = [f"{comparison.label(pair.cell)}, trial {pair.trial}" for pair in apart]
        yield (
            f"**{len(apart)} of {count(len(pairs), 'pair')} on different GPUs**: their arms ran on other GPUs of the "
            f"same kind, so that a difference between these counts as the arm's ({'; '.join(places[:5])}"
            f"{'; …' if len(places) > 5 else ''})."
        )
    unknown: dict[str, int] = {}
    for run in study.runs:
        for fact in run.engine.get("unknown") or ():
            unknown[fact] = unknown.get(fact, 0) + 1
    for fact, runs in unknown.items():
        what, _, weakens = fact.partition(": ")
        where = "every run" if runs == len(study.runs) else f"{runs} of {count(len(study.runs), 'run')}"
        yield f"**Unknown in {where}: {what}.** {weakens[:1].upper()}{weakens[1:]}."


def _on_other_gpus(pair: Pair) -> bool:
    """Whether the arms of a pair had no GPU in common, as far as both tell."""
    baseline, treatment = (set(run.engine.get("gpus") or ()) for run in (pair.baseline, pair.treatment))
    return bool(baseline and treatment) and baseline.isdisjoint(treatment)


def by_capacity(found: Sequence[Place]) -> list[Place]:
    """Cells in the order of their KV capacity, the largest first and those that did not start last."""
    capacity: dict[str, float] = {}
    for place in found:
        label = cell_label(place.level.cell)
        left = [run.engine.get("available_bytes") or 0.0 for run in place.refused]
        known = place.level.mean("kv_capacity_tokens") or (max(left) / 1e15 if left else 0.0)
        capacity[label] = max(capacity.get(label, -1.0), known)
    return sorted(found, key=lambda place: -capacity[cell_label(place.level.cell)])


def share(value: float | None) -> str:
    """A share in percent, with a decimal below 10."""
    return "-" if value is None else f"{100 * value:.{0 if value >= 0.1 or value == 0 else 1}f}%"


def whole(value: float | None) -> str:
    """A whole number with separators; `-` for None."""
    return "-" if value is None else f"{value:,.0f}"


def level(place: Place, measure: str, confidence: float) -> str:
    """A measure's mean over trials, with its t interval where there are enough: `388 (380 to 396)`; of two trials both;
    the mean alone where trials do not differ."""
    trials = place.level.measures.get(measure, ())
    shown = place.mean(measure)
    if len(trials) < 2 or np.ptp(trials) <= 1e-9 * abs(np.mean(trials)):
        return shown
    if len(trials) < MIN_TRIALS:
        return f"{shown} ({' and '.join(map(number, trials))})"
    low, high = t_interval(np.array(trials), confidence)
    return f"{shown} ({number(float(low))} to {number(float(high))})"


def gib(value: float | None) -> str:
    """Bytes in GiB; `-` for None."""
    return "-" if value is None else f"{value / 2**30:.2f}"


def _table(comparison: Comparison, found: Sequence[Place], columns: Mapping[str, Callable[[Place], str]]) -> str:
    named = comparison.factor is not None
    header = ["cell", *([str(comparison.factor)] if named else []), *columns]
    lines = [
        [
            comparison.label(place.level.cell),
            *([place.level.arm] if named else []),
            *(text(place) for text in columns.values()),
        ]
        for place in found
    ]
    return filled(*by_cell(header, lines)) if named else filled(header, lines)


def _capacity(place: Place) -> str:
    if not place.runs and place.refused:
        return f"does not start ({shortage(place.refused[0])})"
    tokens = place.level.mean("kv_capacity_tokens")
    if tokens is None:
        return "-"
    size = f" ({gib(place.capacity_bytes)} GiB)" if place.capacity_bytes else ""
    return f"{whole(tokens)} tokens{size}"


def _hit_rate(place: Place) -> str:
    rate = place.level.mean("cache_hit_rate")
    if rate is None:
        return "-"
    return f"{rate:.3f} of {place.bound:.3f}" if place.bound else f"{rate:.3f}"


def queue(place: Place, q: int) -> str:
    """The bounds between which a percentile of the queue time lies in every valid round, or itself where known."""
    if (mean := place.level.mean(f"queue_ms_p{q}")) is not None:
        return number(mean)
    found = [one.percentiles.get(f"queue_ms_p{q}") for run in place.runs for one in run.rounds if one.valid]
    lows = [each.low for each in found if each is not None and each.low is not None]
    highs = [each.high for each in found if each is not None]
    if not lows:
        return "-"
    known = [high for high in highs if high is not None]
    return f"{min(lows):,.0f} to {max(known):,.0f}" if len(known) == len(highs) else f"over {min(lows):,.0f}"


def _has_slo(place: Place) -> bool:
    return any(value is not None for run in place.runs for value in run.config.get("slo", {}).values())


def _gpus(place: Place) -> int:
    return max((int(run.config.get("gpu", {}).get("tensor_parallel_size", 1)) for run in place.runs), default=1)
