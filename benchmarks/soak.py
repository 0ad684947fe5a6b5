"""Soak: many short rounds in one process against a server that stands in, watching what must stay flat.

    python benchmarks/soak.py OUT [--runs 200] [--rounds 10] [--seconds S]

A run is `--rounds` rounds of 4 requests against the golden server (`tests/golden`), recorded and logged to one MLflow
store in SQLite as any other. After each: this process's resident memory, open files, threads and children, and how long
MLflow took to open, fill and close the run. Writes `soak.csv`, `soak.png` and the slopes over the second half.
"""

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from llmexp import tracking
from llmexp.compose import compose
from llmexp.execute import run
from tests.golden.server import golden_server

FIELDS = {
    "rss_mib": "resident memory, MiB",
    "open_files": "open files",
    "threads": "threads",
    "mlflow_s": "MLflow, seconds a run",
    "run_s": "whole run, seconds",
}
REQUESTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = soak(asked.out, asked.runs, asked.rounds, asked.seconds)
    with (asked.out / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, asked.rounds, asked.out / "soak.png")
    print(f"{len(rows) * asked.rounds:,} rounds in {len(rows)} runs, {sum(row['run_s'] for row in rows):.0f} s")
    second = rows[len(rows) // 2 :]
    for name, label in FIELDS.items():
        values = np.array([row[name] for row in second])
        slope = np.polyfit(np.arange(len(values)) * asked.rounds / 1000, values, 1)[0] if len(values) > 2 else np.nan
        print(f"{label:26} median {np.median(values):8.2f}   slope {slope:+8.3f} per 1,000 rounds")


def soak(out: Path, runs: int, rounds: int, seconds: float) -> list[dict[str, float]]:
    """A row a run."""
    mlflow_s = _timed(("start_run", "finish_run"))
    own = psutil.Process()
    began = time.monotonic()
    rows: list[dict[str, float]] = []
    with golden_server() as server:
        for k in range(runs):
            if time.monotonic() - began > seconds:
                break
            config = compose(
                [
                    "engine=endpoint", f"engine.url={server.url}", "model=tiny_random", "gpu=cpu", "kv.block_size=16",
                    f"rounds={rounds}", "workload=unique_prefix", f"workload.num_requests={REQUESTS}",
                    "workload.prefix_tokens=64", "workload.suffix_tokens=16", "workload.output_tokens=4",
                    "max_num_seqs=4", "client.lag_limit_ms=100000", f"study.name=soak-{k}",
                    f"runs_dir={out / 'runs'}", f"tracking.dir={out / 'mlruns'}",
                ]
            )  # fmt: skip
            mlflow_s.clear()
            before = time.monotonic()
            result = run(config)
            assert result.status == "complete" and len(result.rounds) == rounds, result.error
            server.seen.clear()  # the server's own notes are not what is looked at
            rows.append(
                {
                    "run": k,
                    "rss_mib": own.memory_info().rss / 2**20,
                    "open_files": own.num_fds(),
                    "threads": own.num_threads(),
                    "children": len(own.children()),
                    "mlflow_s": sum(mlflow_s),
                    "run_s": time.monotonic() - before,
                }
            )
    return rows


def _timed(names: tuple[str, ...]) -> list[float]:
    """Lets functions of `llmexp.tracking` note the seconds that they take."""
    taken: list[float] = []

    def timed(function: Any) -> Any:
        def wrapper(*values: Any) -> Any:
            before = time.monotonic()
            try:
                return function(*values)
            finally:
                taken.append(time.monotonic() - before)

        return wrapper

    for name in names:
        setattr(tracking, name, timed(getattr(tracking, name)))
    return taken


def plot(rows: list[dict[str, float]], rounds: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(FIELDS), 1, figsize=(8, 9), sharex=True, layout="constrained")
    for axis, (name, label) in zip(axes, FIELDS.items(), strict=True):
        axis.plot([(row["run"] + 1) * rounds for row in rows], [row[name] for row in rows], linewidth=1)
        axis.set_ylim(0, 1.15 * max(row[name] for row in rows))
        axis.set_title(label, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("rounds")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
