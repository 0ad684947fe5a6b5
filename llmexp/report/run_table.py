"""What a single run measured, for the terminal."""

from rich import box
from rich.table import Table

from llmexp.measure.catalog import MEASURES
from llmexp.report.table import number, ratio
from llmexp.results import RunResult

_SHOWN = (
    "throughput_req_per_s",
    "throughput_output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p95",
    "tpot_ms_p50",
    "e2e_ms_p50",
    "e2e_ms_p95",
    "cache_hit_rate",
    "expected_hit_tokens",
    "observed_hit_tokens",
    "preemptions",
    "failed_requests",
    "accuracy",
)


def run_table(result: RunResult) -> Table:
    """The headline measures of a run over its rounds, a percentile with its interval and sample size."""
    marks = "SIMULATED: " if result.simulated else ""
    table = Table(
        title=f"{marks}{result.study} {result.name}", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in ("measure", "value", "unit", "90% interval", "n"):
        table.add_column(column, justify="left" if column in ("measure", "unit") else "right")
    for name in _SHOWN:
        unit = MEASURES[name].unit
        if name in result.measures:
            value = result.measures[name]
            table.add_row(name, ratio(value) if not unit else number(value), unit, "", "")
        elif name in result.percentiles:
            one = result.percentiles[name]
            interval = f"{number(one.low)} to {number(one.high)}" if one.value is not None else "too few requests"
            table.add_row(name, number(one.value), unit, interval, str(one.n))
    return table


def model_and_device(result: RunResult) -> str:
    """What a run was made with, or simulates: `random_8b on h100`."""
    names = [str((result.config.get(group) or {}).get("name", "unknown")) for group in ("model", "gpu")]
    return " on ".join(names)


def verdict(result: RunResult) -> str:
    """Whether the run may be believed, and why not, or what weakens it: one line a reason."""
    weak = [f"simulated: {model_and_device(result)}"] if result.simulated else []
    weak += [f"unknown: {fact}" for fact in result.engine.get("unknown") or ()]
    if result.engine.get("throttled"):
        weak.append("throttled: heat or a fault slowed a GPU during a round")
    if result.valid:
        return "\n".join(["valid: every rule of a valid measurement held in every round", *weak])
    return "\n".join(["NOT VALID:", *(f"  {reason}" for reason in result.invalid_reasons), *weak])
