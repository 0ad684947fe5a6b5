"""`llmexp calibrate`: what an engine's steps cost, from runs that recorded them."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from llmexp.arguments import Arguments
from llmexp.simulate.calibrate import TERMS
from llmexp.simulate.calibration import CalibrationFile, save
from llmexp.simulate.measured import calibrated, recorded_runs

WIDTH = 100
_UNITS = {
    "steps": "a step",
    "prefill_tokens": "a prefill token",
    "decode_tokens": "a decode token",
    "sampled": "a sampled token",
    "attended_pairs": "a million attended pairs",
    "context_tokens": "a thousand context tokens",
}
_SCALES = {"attended_pairs": 1e6, "context_tokens": 1e3, "prompt_token_s": 1e3, "echo_s": 1e3}
_DELAYS = {
    "request_s": "a request on its way in",
    "prompt_token_s": "a thousand tokens of its prompt",
    "output_s": "a step's tokens on their way out",
    "token_s": "each of them",
    "echo_s": "a thousand prompt tokens of first answers",
}


def calibrate(arguments: Sequence[str]) -> None:
    """Fits, prints the coefficients and what they miss, and writes file and plot.

    Raises ResultError, CalibrationError or ConfigError.
    """
    options = _parser().parse_args(arguments)
    output = Path(options.output)
    calibration, spans = calibrated(recorded_runs(options.folders), options.terms)
    save(calibration, output)
    console = Console(width=WIDTH)
    console.print(_heading(calibration), highlight=False)
    console.print(_coefficients(calibration))
    console.print(_residuals(calibration))
    figure = output.with_suffix(".png")
    plot(spans, calibration, figure)
    console.print(f"Calibration: {output}\nPlot: {figure}", highlight=False, soft_wrap=True)


def plot(spans: pd.DataFrame, calibration: CalibrationFile, path: Path) -> None:
    """Fitted against measured time of each span and launch, by kind, and relative errors over the measured time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    whole, errors = figure.subplots(1, 2)
    for (kind, group), mark in zip(spans.groupby("kind"), "osx^", strict=False):
        measured_ms, predicted_ms = 1e3 * group["duration_s"], 1e3 * group["predicted_s"]
        label = f"{kind} ({len(group):,})"
        whole.loglog(measured_ms, predicted_ms, mark, markersize=3, alpha=0.5, label=label)
        errors.semilogx(measured_ms, 100 * (predicted_ms / measured_ms - 1), mark, markersize=3, alpha=0.5)
    ends = [1e3 * spans["duration_s"].min(), 1e3 * spans["duration_s"].max()]
    whole.plot(ends, ends, "k-", linewidth=0.8)
    whole.set(xlabel="measured (ms)", ylabel="fitted (ms)")
    whole.legend()
    errors.axhline(0, color="k", linewidth=0.8)
    errors.set(xlabel="measured (ms)", ylabel="fitted over measured, less 100%", ylim=(-100, 100))
    figure.suptitle(f"{calibration.model} on {calibration.gpu}, {calibration.engine} {calibration.engine_version}")
    figure.savefig(path, dpi=120)


def _heading(calibration: CalibrationFile) -> str:
    devices = f"{calibration.tensor_parallel_size} × " if calibration.tensor_parallel_size > 1 else ""
    ahead = "scheduled ahead" if calibration.async_scheduling else "scheduled in turn"
    return (
        f"{calibration.model} ({calibration.dtype}) on {devices}{calibration.gpu}, {calibration.engine}, "
        f"vLLM {calibration.engine_version}, {ahead}: {calibration.steps:,} steps of {len(calibration.runs)} runs"
    )


def _coefficients(calibration: CalibrationFile) -> Table:
    table = Table(title="What it takes", title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("part")
    table.add_column("for")
    table.add_column("µs", justify="right")
    for part, terms in calibration.cost.items():
        for term, seconds in terms.items():
            table.add_row(part, _UNITS[term], f"{1e6 * seconds * _SCALES.get(term, 1.0):,.3f}")
    table.add_row("launch", "a step with prefill tokens", f"{1e6 * calibration.prefill_launch_s:,.3f}")
    for name, seconds in calibration.front_end.items():
        table.add_row("front end", _DELAYS[name], f"{1e6 * seconds * _SCALES.get(name, 1.0):,.3f}")
    if calibration.cost.get("compute"):
        table.caption = "A step takes what is fixed, and compute or memory, whichever is longer."
    return table


def _residuals(calibration: CalibrationFile) -> Table:
    table = Table(title="What the fit misses", title_justify="left", box=SIMPLE_HEAD)
    for name in ("steps", "", "share of time", "sum", "each, p50", "each, p95"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for kind, missed in calibration.residuals.items():
        table.add_row(
            kind,
            f"{missed.steps:,}",
            f"{missed.time_share:.1%}",
            f"{missed.bias:+.1%}",
            f"{missed.error_p50:.1%}",
            f"{missed.error_p95:.1%}",
        )
    return table


def _parser() -> Arguments:
    parser = Arguments(
        prog="llmexp calibrate",
        description="Fits the simulator's step cost to runs of a real engine with engine.record_steps=true.",
    )
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help="a run's folder, or one that holds some")
    parser.add_argument(
        "--output", metavar="FILE", default="calibration.json", help="where it goes (default: calibration.json)"
    )
    parser.add_argument(
        "--terms",
        nargs="+",
        choices=TERMS,
        default=TERMS,
        metavar="TERM",
        help=f"what a step's time is made of (default: all of {', '.join(TERMS)})",
    )
    return parser
