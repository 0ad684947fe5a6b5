"""Fuzzes readers at length, guided by coverage: `python -m tests.fuzz [--seconds N] [TARGET …]`; needs `atheris`.

Each target has a process of its own. What it found lies in the folder that its last lines name; a crash ends it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import atheris

OURS = ["llmexp.workloads", "llmexp.client", "llmexp.engines", "llmexp.results", "llmexp.models", "llmexp.schema"]

with atheris.instrument_imports(include=OURS):
    from tests.fuzz.targets import targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--one", action="store_true", help="in this process, with libFuzzer's output")
    options, rest = parser.parse_known_args()
    names = options.names or sorted(targets())
    if options.one:
        one(names[0], options.seconds, rest)
    print("| target | executions | seconds | found |\n|---|---:|---:|---|", flush=True)
    for name in names:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz", "--one", name, "--seconds", str(options.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        said = done.stdout + done.stderr
        counts = re.findall(r"(?m)^#(\d+)", said) + re.findall(r"number_of_executed_units: (\d+)", said)
        executions = max(map(int, counts), default=0)
        errors = re.findall(r"(?m)^(?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*$", said)
        found = "nothing" if done.returncode == 0 else (errors or said.strip().splitlines() or ["died"])[-1][:200]
        print(f"| {name} | {executions} | {time.monotonic() - began:.0f} | {found} |", flush=True)
        if done.returncode:
            (Path(tempfile.gettempdir()) / f"fuzz-{name}.txt").write_text(said)


def one(name: str, seconds: int, rest: list[str]) -> None:
    """Fuzzes one target until its time is over; ends the process."""
    target = targets()[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for i, seed in enumerate(target.seeds):
        (corpus / f"seed-{i}").write_bytes(seed)
    arguments = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096"]
    arguments += ["-max_len=20000", "-print_final_stats=1", f"-artifact_prefix={corpus}/", *rest]
    atheris.Setup(arguments, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
