"""One injection: a study is started, a fault hits it, what is left behind is looked at, and the study resumes."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from llmexp import tracking
from llmexp.client import journal
from llmexp.engines.target import Target
from llmexp.errors import ResultError
from llmexp.results import RunResult, load_run
from llmexp.schema.config import TrackingConfig
from tests.faults.nursery import MARK, Nursery

ROOT = Path(__file__).parents[2]
REQUESTS = 6
STUDY = [
    "-m", "arm=a,b", "study.name=s", "model=tiny_random", "gpu=cpu", "max_num_seqs=2", "rounds=1", "kv.block_size=32",
    "workload=unique_prefix", f"workload.num_requests={REQUESTS}", "workload.prefix_tokens=64",
    "workload.suffix_tokens=16", "workload.output_tokens=4", "client.lag_limit_ms=10000", "engine.stop_timeout_s=2",
]  # fmt: skip
# A real engine takes its time to start, so more is asked of it: rounds of some seconds, and two of them.
ON_VLLM = ["rounds=2", "workload.num_requests=24", "workload.output_tokens=64", "kv.cache_memory_bytes=134217728"]
RUNS = ("arm-a.trial-0", "arm-b.trial-0")
KEEPER = "keeper.py"
# A request that ends so shortly before a kill may not have reached the journal: a heartbeat, on a loaded machine.
GRACE_S = 0.06
PATIENCE_S = 400.0
PARTING_S = 120.0  # what was orphaned ends by itself, but not before it has seen to what it holds
CLOCK_TICK_S = 0.02  # by which a file's time may lie behind the clock


@dataclass
class Found:
    """What an injection has left behind."""

    fault: str
    stage: str
    exit_code: int | None = None
    lost: int = 0
    unreadable: int = 0
    orphans: int = 0
    litter: list[str] = field(default_factory=list)  # among the temporary files
    running: list[str] = field(default_factory=list)  # runs that MLflow shows as running though nothing runs
    resumed: bool = False
    message: list[str] = field(default_factory=list)
    traceback: bool = False

    @property
    def problems(self) -> list[str]:
        """What did not hold."""
        held = {
            f"{self.lost} requests lost": self.lost == 0,
            f"{self.unreadable} traces unreadable": self.unreadable == 0,
            f"{self.orphans} processes left": self.orphans == 0,
            f"left among the temporary files: {self.litter}": not self.litter,
            f"MLflow shows as running: {self.running}": not self.running,
            "it does not resume": self.resumed,
            "a traceback": not self.traceback,
            f"a message of {len(self.message)} lines": len(self.message) <= 3,
            "no message": bool(self.message) or self.exit_code in (0, -signal.SIGKILL),
        }
        return [problem for problem, holds in held.items() if not holds]


class Case:
    """A study's place: its folder, store and engine, which is a stand-in unless `vllm` is asked for."""

    def __init__(self, nursery: Nursery, folder: Path, store: Path | None, vllm: bool = False) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.notes = folder / "notes"
        self.runs = folder / "runs" / "s"
        self.tracking = TrackingConfig(dir=str(folder / "mlruns"))
        self.arguments = list(STUDY)
        self._temporary = folder / "tmp"
        self.environment = {"FAULT_NOTES": str(self.notes), "PYTHONPATH": str(ROOT), "TMPDIR": str(self._temporary)}
        self.hit_at = float("inf")
        self.vllm = vllm
        self._began = 0.0
        self._owed = ("", 0)  # the run that was hit in a round, and how many of its requests a vLLM had finished
        self.servers: list[subprocess.Popen[bytes]] = []
        self._nursery = nursery
        self._mark = ""
        self._groups: set[int] = set()
        self._pid = 0
        self._temporary.mkdir(parents=True)
        if store is not None:
            (folder / "mlruns").mkdir()
            shutil.copy(store, folder / "mlruns" / "mlflow.db")
        if vllm:
            self.arguments += ON_VLLM
        else:
            python = folder / "python"
            python.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.faults.engine "$@"\n')
            python.chmod(python.stat().st_mode | stat.S_IXUSR)
            self.arguments.append(f"engine.python={python}")

    def close(self) -> None:
        """Ends what the case itself has started, and whatever the fault has left."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        if self._pid and self._nursery.poll(self._pid) is None:
            os.kill(self._pid, signal.SIGKILL)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def answers_slowly(self) -> None:
        """Makes a round of the stand-in last some seconds, for a fault that takes a while to be brought about."""
        self.environment["FAULT_BEHAVIOUR"] = json.dumps({"itl_s": 0.2})

    def start(self, *more: str) -> int:
        """Starts the study and returns its PID."""
        self._mark = uuid.uuid4().hex
        self._began = time.time()
        self.hit_at, self._owed = float("inf"), ("", 0)
        self.out.write_text("")
        environment = {**self.environment, MARK: self._mark}
        self._pid = self._nursery.start([*self.arguments, *more], self.folder, self.out, environment)
        return self._pid

    def until(self, stage: Callable[["Case"], bool]) -> None:
        """Waits until the study has come to a stage, or has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not stage(self):
            if self._nursery.poll(self._pid) is not None:
                raise AssertionError(f"it ended before that stage: {self.said()}")
            assert time.monotonic() < deadline, f"it did not come to that stage: {self.said()}"
            time.sleep(0.003)

    def fresh(self, path: Path) -> bool:
        """Whether the command that was started last has written a file."""
        with contextlib.suppress(FileNotFoundError):  # the parts of a trace go once they are joined
            return path.stat().st_mtime > self._began - CLOCK_TICK_S
        return False

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal; the fault has hit."""
        if self.vllm and self.hit_at == float("inf"):
            self._owed = self._finished_by_vllm()
            time.sleep(GRACE_S)
        now = time.monotonic()
        os.kill(pid, number)  # of a negative PID: its process group
        self.hit_at = min(self.hit_at, now)

    def ended(self) -> int:
        """Waits for the end, and returns the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while (code := self._nursery.poll(self._pid)) is None:
            assert time.monotonic() < deadline, f"it does not end: {self.said()}"
            time.sleep(0.01)
        return code

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The living processes that the command has started, by a word in their command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                group = os.getpgid(process.pid)
                ours = group in self._groups
                if not ours and self._has_mark(process):
                    ours = True
                    if KEEPER in " ".join(process.cmdline()):
                        self._groups.add(group)  # whose other members may hide their environment, as vLLM's do
                living = ours and process.pid != self._pid and process.status() != psutil.STATUS_ZOMBIE
                if living and name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _has_mark(self, process: psutil.Process) -> bool:
        return process.environ().get(MARK) == self._mark

    def process(self, name: str) -> int:
        """The PID of one of them. The keeper's command line holds the engine's, and is not meant by that."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for process in self.processes(name):
                with contextlib.suppress(psutil.Error):
                    if name == KEEPER or KEEPER not in " ".join(process.cmdline()):
                        return process.pid
            assert self._nursery.poll(self._pid) is None, f"it ended without {name}: {self.said()}"
            assert time.monotonic() < deadline, f"no {name} comes up: {self.said()}"
            time.sleep(0.005)

    def results(self) -> dict[str, RunResult]:
        found = {}
        for name in RUNS:
            try:
                found[name] = load_run(self.runs / name)
            except ResultError:
                continue
        return found

    def answered(self) -> int:
        """How many requests of measured rounds the engine had answered whole when the fault hit."""
        count = 0
        for line in self.notes.read_text().splitlines() if self.notes.exists() else ():
            resets, place, end_s = line.split()
            # Before the first reset, and from the workload's length on, requests warm up.
            count += int(resets) > 0 and int(place) < REQUESTS and float(end_s) < self.hit_at - GRACE_S
        return count

    def _finished_by_vllm(self) -> tuple[str, int]:
        """The run that has a round under way, and how many of its measured requests its vLLM has finished."""
        for name in RUNS:
            if (self.runs / name / ".room").exists() and f"{name}: warm-up" in self.said():
                before = [path for path in self.runs.glob("*/requests*.parquet") if self.fresh(path)]
                of_others = sum(pq.read_metadata(path).num_rows for path in before if path.parent.name != name)
                return name, self._counted_by_vllm() - of_others
        return "", 0

    def _counted_by_vllm(self) -> int:
        """How many requests with more than 50 output tokens, as only measured ones have, its metrics count."""
        keeper = psutil.Process(self.process(KEEPER))
        line = keeper.cmdline()
        target = Target(f"http://127.0.0.1:{line[line.index('--port') + 1]}", "", keeper.environ().get("VLLM_API_KEY"))
        page = target.get("/metrics").decode()
        found = re.findall(r"^vllm:request_generation_tokens_(count|bucket)\{([^}]*)\} (\S+)$", page, re.MULTILINE)
        count = sum(float(value) for kind, _, value in found if kind == "count")
        return int(count - sum(float(value) for _, labels, value in found if 'le="50.0"' in labels))

    def lost(self) -> int:
        """How many requests had been answered whole when the fault hit, of which no trace on disk holds anything."""
        if self.vllm:
            name, finished = self._owed
            return max(finished - self.traced(name)[0], 0) if name else 0
        return max(self.answered() - self.traced()[0], 0)

    def traced(self, run: str = "*") -> tuple[int, int]:
        """How many ended requests the traces on disk hold, and how many files of them cannot be read."""
        rows = unreadable = 0
        saved = [Path(folder) for folder in re.findall(r"is in (\S*llmexp-saved-\w+) instead", self.said())]
        for path in [
            *self.runs.glob(f"{run}/requests*.parquet"),
            *(path for folder in saved for path in folder.iterdir()),
        ]:
            try:
                rows += pq.read_table(path)["error"].null_count
            except (OSError, pa.ArrowInvalid):
                unreadable += 1
        return rows, unreadable

    def in_mlflow(self) -> dict[str, str]:
        """The status of every run of the store, by name."""
        client, experiment = tracking.open_store(self.tracking)
        return {run.info.run_name: run.info.status for run in client.search_runs([experiment])}

    def running(self) -> list[str]:
        """The runs that MLflow shows as running."""
        return [name for name, status in self.in_mlflow().items() if status == "RUNNING"]

    def look(self, found: Found) -> None:
        """Notes what the fault has left behind."""
        found.exit_code = self.ended()
        deadline = time.monotonic() + PARTING_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        found.orphans = len(left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path, _ in journal.left_over(self._temporary):  # as `llmexp doctor --mend` does
            journal.preserve(path)
        found.litter = [path.name for path in self._temporary.glob("llmexp-[!s]*")]  # not what was saved there
        found.unreadable = self.traced()[1]
        found.lost = self.lost()
        found.traceback = "Traceback (most recent call last)" in self.said()
        found.message = message(self.said())

    def resume(self, found: Found) -> None:
        """Starts the study again, undisturbed, and notes whether it comes to its whole result."""
        for name in ("FAULT_ENGINE", "FAULT_BEHAVIOUR", "FAULT_CLOCK"):
            self.environment.pop(name, None)
        self.start()
        code = self.ended()
        results = self.results()
        whole = code == 0 and sorted(results) == sorted(RUNS)
        whole = whole and all(run.status in ("complete", "refused") for run in results.values())
        shown = self.in_mlflow()
        found.running += self.running()
        found.resumed = whole and {shown.get(name) for name in (*RUNS, "s")} == {"FINISHED"}
        if not found.resumed:
            found.message += [f"RESUME {code}: {self.said()[-1500:]}", str(shown)]


def message(said: str) -> list[str]:
    """What the command said last: its error, with the lines that belong to it."""
    lines = said.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("llmexp: ")]
    return lines[starts[-1] :] if starts else []


def plain(message: list[str]) -> str:
    """A message without what differs from one injection to the next."""
    text = " / ".join(message)
    text = re.sub(r"/[\w./-]*/(mlruns|runs|tmp)\b", r"\1", text)
    text = re.sub(r"(llmexp-saved-)\w+", r"\1…", text)
    return re.sub(r"(port|pid|\(') ?\d+", r"\1 N", text)
