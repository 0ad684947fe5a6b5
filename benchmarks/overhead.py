"""What llmexp itself costs a run: before the engine is launched, and after the last round, beside the engine's start.

usage: python benchmarks/overhead.py [--repeat N] [KEY=VALUE …]     (by default the tiny random model)
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import llmexp


def measure(overrides: list[str]) -> dict[str, float]:
    """Seconds of one run, part by part."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "llmexp", *overrides], cwd=folder, check=True, capture_output=True)
        total_s = time.monotonic() - began
        (summary,) = Path(folder, "runs").glob("*/*/summary.json")
        parts = llmexp.load_run(summary.parent).timings_s
    known = {name: parts[name] for name in ("process_to_launch", "engine_start", "warm_up", "rounds")}
    return {**known, "last_round_to_exit": total_s - sum(known.values()), "total": total_s}


def main() -> None:
    """Prints the median of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    options, overrides = parser.parse_known_args()
    runs = [
        measure(overrides or ["model=tiny_random", "max_num_seqs=4", "client.lag_limit_ms=1000"])
        for _ in range(options.repeat)
    ]
    for part in runs[0]:
        values = sorted(run[part] for run in runs)
        print(f"{part:20} {statistics.median(values):7.2f} s   ({values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    main()
