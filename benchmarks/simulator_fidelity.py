"""How well does the simulator predict an engine that it was calibrated on?

`python benchmarks/simulator_fidelity.py measure h200 FOLDER [OVERRIDE …]` runs AsyncLLM and records its steps: loads
to calibrate on, and others to predict (`cpu` in place of `h200`: the same in small). OVERRIDE are llmexp's, such as
`model=qwen2_5_7b model.load_format=dummy gpu=h200`.

`python benchmarks/simulator_fidelity.py predict FOLDER` calibrates on the ones, simulates the others, and prints both
beside each other. Goals: throughput within 5%, latencies within 10%, hits exactly.

The six loads of `predict` were looked at while the simulator was made. Those of `blind` were not: `measure --loads
calibrate blind`, then `predict --loads blind`, once.
"""

import argparse
import copy
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from llmexp.compose import compose
from llmexp.engines.lease import EngineLease
from llmexp.execute import run
from llmexp.models import locate
from llmexp.results import RunResult
from llmexp.schema.config import Config
from llmexp.simulate.calibration import load, save
from llmexp.simulate.engine import engine_of
from llmexp.simulate.measured import calibrated, recorded_runs
from llmexp.workloads.build import build

GOALS = {
    "throughput (req/s)": 0.05,
    "TTFT p50 (ms)": 0.1,
    "TTFT p95 (ms)": 0.1,
    "e2e p50 (ms)": 0.1,
    "e2e p95 (ms)": 0.1,
    "hit tokens": 0.0,
}
STUDIES = ["calibrate", "predict", "blind"]
UNIQUE, SHARED = "workload=unique_prefix", "workload=shared_prefix"


def loads(prompt: int, output: int, requests: int, concurrency: int, rate: float, limit: int) -> dict[str, list[str]]:
    """The cells by study/name, sized by a middling prompt and output, a number of requests and of places, and a rate;
    `limit` is the longest prompt and output that the engine takes."""

    def closed(kind: str, *lengths: int, requests: int, concurrency: int) -> list[str]:
        names = ("prefix_tokens", "suffix_tokens", "output_tokens")
        return [
            kind,
            *(f"workload.{name}={max(tokens, 1)}" for name, tokens in zip(names, lengths, strict=True)),
            f"workload.num_requests={max(requests, 4)}",
            f"load.concurrency={max(concurrency, 2)}",
        ]

    n, c, p, o = requests, concurrency, prompt, output
    long = min(7 * p, limit - p // 2 - o // 2 - 8)
    open_loop = [f"workload.num_requests={n}"]

    def poisson(kind: str, rate: float, median: int, sigma: float, *rest: str) -> list[str]:
        suffix = f"{{distribution: lognormal, median: {median}, sigma: {sigma}, min: 4, max: {2 * p}}}"
        return [kind, f"workload.suffix_tokens={suffix}", "load=poisson", f"load.rate={rate}", *rest]

    return {
        "calibrate/few_long_answers": closed(UNIQUE, p // 2, p // 16, 2 * o, requests=n // 16, concurrency=c // 16),
        "calibrate/many_short_prompts": closed(UNIQUE, p // 5, p // 16, o, requests=n, concurrency=c),
        "calibrate/long_prompts": closed(UNIQUE, long, p // 2, o // 2, requests=n // 16, concurrency=c // 32),
        "calibrate/middling": closed(UNIQUE, 2 * p, p // 20, o // 2, requests=n // 2, concurrency=c // 4),
        "calibrate/shared": [
            *closed(SHARED, 3 * p, p // 16, o // 2, requests=n // 2, concurrency=c // 2),
            "workload.num_prefixes=4",
        ],
        "calibrate/arrivals": poisson(
            *(UNIQUE, rate / 2, p // 2, 0.6, f"workload.prefix_tokens={p // 8}", f"workload.output_tokens={o // 2}"),
            f"workload.num_requests={n // 2}",
        ),
        "predict/unique": closed(UNIQUE, p, p // 10, o, requests=n // 4, concurrency=c // 8),
        "predict/shared": closed(SHARED, 3 * p + p // 2, p // 100 + 1, o // 12, requests=n, concurrency=c),
        "predict/rag": [
            *closed(SHARED, p + p // 2, p // 10, o // 2, requests=n // 2, concurrency=c // 5),
            "workload.num_prefixes=8",
            "workload.zipf=1.0",
        ],
        "predict/poisson": poisson(
            *(UNIQUE, rate, p // 4, 0.8, f"workload.prefix_tokens={p // 2}", f"workload.output_tokens={o}", *open_loop)
        ),
        "predict/turns": [
            "workload=multi_turn",
            f"workload.num_conversations={max(n // 8, 4)}",
            f"workload.system_tokens={p // 2}",
            f"workload.user_tokens={p // 8}",
            f"workload.output_tokens={o // 2}",
            "workload.think_s=0.2",
            f"load.concurrency={max(c // 4, 2)}",
        ],
        "predict/bursts": [
            "workload=short_chat",
            "load=trace",
            f"workload.rate_per_s={rate}",
            *open_loop,
            "workload.bursts={every_s: 3.0, duration_s: 0.5, factor: 6.0}",
            f"workload.classes.short_chat.prefix_tokens={p // 2}",
            *(f"workload.classes.short_chat.suffix_tokens.{key}" for key in (f"median={p // 4}", f"max={2 * p}")),
            *(f"workload.classes.short_chat.output_tokens.{key}" for key in (f"median={o}", "min=2", f"max={4 * o}")),
        ],
        "blind/long_answers": closed(UNIQUE, p // 3, p // 12, 3 * o, requests=n // 3, concurrency=c // 6),
        "blind/long_context": closed(UNIQUE, 3 * p, p // 3, o, requests=n // 8, concurrency=c // 16),
        "blind/crowd": [
            *closed(SHARED, 2 * p, p // 5, o // 3, requests=n, concurrency=2 * c // 3),
            "workload.num_prefixes=12",
        ],
        "blind/slow_arrivals": poisson(
            *(UNIQUE, rate / 3, p, 0.5, f"workload.prefix_tokens={p // 3}", f"workload.output_tokens={2 * o}"),
            f"workload.num_requests={n // 2}",
        ),
        "blind/fast_arrivals": poisson(
            *(SHARED, 1.2 * rate, p // 8, 1.0, f"workload.prefix_tokens={p}", f"workload.output_tokens={o // 2}"),
            *("workload.num_prefixes=6", *open_loop),
        ),
        "blind/turns": [
            "workload=multi_turn",
            f"workload.num_conversations={max(n // 6, 4)}",
            f"workload.system_tokens={p}",
            f"workload.user_tokens={p // 5}",
            f"workload.output_tokens={o // 3}",
            "workload.think_s=0.5",
            f"load.concurrency={max(c // 5, 2)}",
        ],
        "blind/cache_off": [
            *closed(SHARED, p + p // 3, p // 6, o // 2, requests=n // 2, concurrency=c // 6),
            "cache=off",  # another launch
        ],
    }


SIZES = {
    "h200": loads(prompt=1024, output=96, requests=192, concurrency=128, rate=30.0, limit=8192),
    "cpu": loads(prompt=64, output=12, requests=24, concurrency=8, rate=20.0, limit=1024),
}


def measure(size: str, folder: Path, overrides: list[str], chosen: list[str]) -> None:
    """All cells of the studies ``chosen``, in one launch where they share an engine."""
    lease = EngineLease(keep=True)
    try:
        for name, asked in SIZES[size].items():
            study, _, cell = name.partition("/")
            if study not in chosen:
                continue
            place = [f"runs_dir={folder}", f"study.name={study}", f"run.name={cell}", "tracking=off", "rounds=2"]
            engine = ["engine=vllm_async", "engine.record_steps=true"]
            result = run(compose([*engine, *place, *asked, *overrides]), lease)
            print(f"{name}: {result.measures['throughput_req_per_s']:.2f} req/s, {result.invalid_reasons or 'valid'}")
    finally:
        lease.close()


def predict(folder: Path, model_path: str | None, chosen: list[str]) -> None:
    """Calibrates on the runs in `calibrate`, simulates those of the studies ``chosen``, and prints both sides."""
    calibration, _ = calibrated(recorded_runs([folder / "calibrate"]))
    file = folder / "calibration.json"
    save(calibration, file)
    console = Console(width=100)
    console.print(
        f"{calibration.model} on {calibration.gpu}, vLLM {calibration.engine_version}: {calibration.steps:,} steps"
    )
    for kind, missed in calibration.residuals.items():
        console.print(f"  {kind}: {missed.steps:,} steps, sum {missed.bias:+.1%}, one step p95 {missed.error_p95:.1%}")
    table = Table("run", "what", "round 1", "round 2", "simulated", "error", "goal", box=SIMPLE_HEAD)
    beside = 0
    for measured in recorded_runs([folder / study for study in chosen]):
        simulated = figures(simulate_again(measured.run, file, model_path))
        rounds = [figures(trace) for _, trace in measured.requests.groupby("round")]
        for what, value in simulated.items():
            seen = [each[what] for each in rounds]
            mean = sum(seen) / len(seen)
            error = value / mean - 1 if mean else float(value != mean)
            goal = GOALS[what]
            beside += abs(error) > goal
            mark = f"missed ({goal:.0%})" if abs(error) > goal else ""
            table.add_row(
                measured.run.name if what == "throughput (req/s)" else "",
                what,
                *(f"{each:,.4g}" for each in seen),
                f"{value:,.4g}",
                f"{error:+.1%}",
                mark,
            )
        table.add_section()
    console.print(table)
    console.print(f"{beside} of {len(table.rows)} beside the goal")


def simulate_again(measured: RunResult, calibration: Path, model_path: str | None) -> pd.DataFrame:
    """The trace that the calibrated simulator gives for a measured run's config."""
    values = copy.deepcopy(dict(measured.config))
    values["engine"] = {"kind": "simulator", "calibration": str(calibration)}
    values["kv"] = {"num_blocks": measured.engine["num_gpu_blocks"], "block_size": measured.engine["block_size"]}
    if model_path is not None:
        values["model"]["path"] = model_path
    config = Config.model_validate(values)
    model = locate(config.model)
    workload = build(config.workload, model)
    assert workload.sha256 == measured.workload_sha256, f"{measured.name}: the workload cannot be made again"
    engine = engine_of(config, model, load(calibration))
    return engine.serve(config, workload, 0).trace.to_pandas()


def figures(trace: pd.DataFrame) -> dict[str, float]:
    """What is compared, of one round."""
    ttft_ms, e2e_ms = (1e3 * (trace[end] - trace["intended_s"]) for end in ("first_token_s", "end_s"))
    return {
        "throughput (req/s)": len(trace) / (trace["end_s"].max() - trace["sent_s"].min()),
        "TTFT p50 (ms)": ttft_ms.quantile(0.5),
        "TTFT p95 (ms)": ttft_ms.quantile(0.95),
        "e2e p50 (ms)": e2e_ms.quantile(0.5),
        "e2e p95 (ms)": e2e_ms.quantile(0.95),
        "hit tokens": trace["cached_tokens"].sum(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("size", choices=SIZES)
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("overrides", nargs="*")
    measuring.add_argument("--loads", nargs="+", choices=STUDIES, default=STUDIES[:2])
    predicting = commands.add_parser("predict")
    predicting.add_argument("folder", type=Path)
    predicting.add_argument("--loads", nargs="+", choices=STUDIES, default=["predict"])
    predicting.add_argument("--model-path", help="the model's folder here, if it was elsewhere there")
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.size, options.folder, options.overrides, options.loads)
    else:
        predict(options.folder, options.model_path, options.loads)
