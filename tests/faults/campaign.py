"""The fault campaign: `python -m tests.faults.campaign OUT.jsonl [--only NAME…] [--times N] [--seconds S] [--vllm]`.

Injects every fault at every stage into real processes, and puts a line an injection into OUT.jsonl, to which a later
call adds; `--table` prints what it holds. All of llmexp is real; the engine is a stand-in in vLLM's shape
(`tests/faults/engine.py`), or with `--vllm` a vLLM with a tiny random model. It takes a minute to start: there, up to
`--chain` faults of a kind hit one study, each as it goes on after the one before, before it may come to its end.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import psutil

from llmexp import tracking
from llmexp.schema.config import TrackingConfig
from tests.faults.case import KEEPER, REQUESTS, ROOT, RUNS, Case, Found, plain
from tests.faults.nursery import Nursery

Stage = Callable[[Case], bool]


def _started(case: Case) -> bool:
    return any(case.fresh(log) and "Initializing" in log.read_text() for log in case.runs.glob("*/engine.log"))


def _in_round(case: Case) -> bool:
    if case.vllm:
        return f"{RUNS[0]}: warm-up" in case.said() and (case.runs / RUNS[0] / ".room").exists()
    return case.notes.exists() and sum(line[0] != "0" for line in case.notes.read_text().splitlines()) >= 2


def _in_second_run(case: Case) -> bool:
    return case.fresh(case.runs / RUNS[1] / "config.yaml")


STAGES: dict[str, Stage] = {
    "start": _started,
    "warm-up": lambda case: f"{RUNS[0]}: engine" in case.said(),
    "round": _in_round,
    "record": lambda case: any(map(case.fresh, (case.runs / RUNS[0]).glob("requests*.parquet"))),
    "logging": lambda case: case.fresh(case.runs / RUNS[0] / "summary.json"),
    "second run": _in_second_run,
    "report": lambda case: case.fresh(case.runs / RUNS[1] / "summary.json"),
}
# How long a stage of a real engine lasts at least: a fault hits anywhere in it.
LASTS_S = {"start": 15.0, "round": 5.0}


@dataclass(frozen=True)
class Fault:
    """`inject` starts a case's study and brings the fault about; `times` is how often the campaign does so.

    `on` says which engine it can hit.
    """

    name: str
    stage: str
    inject: Callable[[Case], None]
    times: int = 5
    on: Literal["stand-in", "vllm", "both"] = "stand-in"

    @property
    def needs_mount(self) -> bool:
        return self.name.startswith(("disk", "folder"))

    @property
    def key(self) -> str:
        return f"{self.name} | {self.stage}"


def _jitter(case: Case, stage: str) -> None:
    """Somewhere in a stage, not only at its beginning."""
    case.until(STAGES[stage])
    time.sleep(random.random() * (LASTS_S.get(stage, 0.05) if case.vllm else 0.05))


def _signal_llmexp(stage: str, *numbers: int, pause_s: float = 0.1) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        pid = case.start()
        _jitter(case, stage)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                case.kill(pid, number)
            time.sleep(pause_s)

    return inject


def _signal_all(stage: str, number: int, group: bool = False) -> Callable[[Case], None]:
    """To llmexp and its process group, or to whatever it has started, as a scheduler ends a job."""

    def inject(case: Case) -> None:
        pid = case.start()
        _jitter(case, stage)
        others = [] if group else case.processes()
        case.kill(-pid if group else pid, number)
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return inject


def _signal_engine(stage: str, name: str, number: int) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        hangs = f"engine.stall_timeout_s={8 if case.vllm else 1.5}"
        case.answers_slowly()
        case.start(*([hangs] if number == signal.SIGSTOP else []))
        _jitter(case, stage)
        while case.hit_at == float("inf"):
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile; another one will come
                case.kill(case.process(name), number)

    return inject


def _behaving(**behaviour: object) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.environment["FAULT_BEHAVIOUR"] = json.dumps(behaviour)
        case.arguments.append("client.timeout_s=2")
        case.start("engine.stall_timeout_s=1.5")

    return inject


def _engine(fault: str, *more: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.environment["FAULT_ENGINE"] = fault
        case.start(*more)

    return inject


def _mount(folder: Path, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "no small file system can be mounted here")


def _fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def _full(stage: str | None, place: str) -> Callable[[Case], None]:
    """A file system of 8 MiB under `runs`, `mlruns` or `tmp` that somebody fills, before the start or at a stage."""

    def inject(case: Case) -> None:
        disk = case.folder / place
        if place == "tmp":  # where a round's journal is to need more than what a page has left
            case.arguments.append("workload.output_tokens=300")
            case.environment["FAULT_BEHAVIOUR"] = json.dumps({"itl_s": 0.001})
        stored = disk / "mlflow.db"
        kept = stored.read_bytes() if stored.exists() else None
        _mount(disk, "8m")
        if kept is not None:
            stored.write_bytes(kept)
        if stage is None:
            _fill(disk)
        case.start()
        if stage is not None:
            case.until(STAGES[stage])
            _fill(disk)
        case.ended()
        (disk / "filler").unlink()

    return inject


def _read_only(stage: str) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        runs = str(case.folder / "runs")
        case.start()
        case.until(STAGES[stage])
        # A mount over it, because a file system on which files are open for writing does not turn read-only.
        for options in (["--bind", runs, runs], ["-o", "remount,bind,ro", runs]):
            subprocess.run(["mount", *options], check=True)
        case.ended()
        subprocess.run(["umount", runs], check=True)

    return inject


def _locked(stage: str | None) -> Callable[[Case], None]:
    """Another program writes into the SQLite store, and does not end its transaction."""

    def inject(case: Case) -> None:
        def lock() -> sqlite3.Connection:
            other = sqlite3.connect(case.folder / "mlruns" / "mlflow.db", timeout=30, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            return other

        held = lock() if stage is None else None
        case.start()
        if stage is not None:
            case.until(STAGES[stage])
            held = lock()
        case.ended()
        assert held is not None
        held.close()

    return inject


def _broken_store(case: Case) -> None:
    case.answers_slowly()  # so that nobody writes into it meanwhile
    case.start()
    case.until(STAGES["round"])
    database = case.folder / "mlruns" / "mlflow.db"
    kept = database.read_bytes()
    database.write_bytes(b"no database" * 1000)
    case.ended()
    database.write_bytes(kept)


def _server_away(stage: str, comes_back: bool) -> Callable[[Case], None]:
    """MLflow's own server holds the store, and is killed; it comes back in time, or only for the resumption."""

    def inject(case: Case) -> None:
        from llmexp.engines.vllm_server import _free_port

        port = _free_port()
        uri = f"http://127.0.0.1:{port}"
        case.tracking = TrackingConfig(uri=uri)
        case.arguments.append(f"tracking.uri={uri}")
        case.environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "3"

        def serve() -> subprocess.Popen[bytes]:
            store = f"sqlite:///{case.folder / 'mlruns' / 'mlflow.db'}"
            command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
            command += ["--artifacts-destination", str(case.folder / "mlruns" / "a"), "--workers", "1"]
            server = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
            case.servers.append(server)
            import urllib.request

            for _ in range(1200):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{uri}/health", timeout=5)
                    return server
                time.sleep(0.1)
            raise AssertionError("mlflow server does not answer")

        server = serve()
        case.start()
        case.until(STAGES[stage])
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        if comes_back:
            serve()
            case.ended()
        else:
            case.ended()
            serve()

    return inject


def _clock(jump_s: float) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.environment["FAULT_CLOCK"] = str(jump_s)
        case.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "faults" / "clock"), str(ROOT)])
        case.start()
        case.ended()
        for run in case.results().values():
            assert run.valid, run.invalid_reasons
            assert 0 < run.timings_s["rounds"] < 60 and 0 < run.timings_s["warm_up"] < 60, run.timings_s
            latencies_s = [row["end_s"] - row["sent_s"] for row in run.trace().to_pylist()]
            assert all(0.1 < latency_s < 30 for latency_s in latencies_s), latencies_s

    return inject


def _edited(case: Case) -> None:
    """The file that the workload is made of changes while the study runs: the second run is not the planned one."""
    prompts = case.folder / "prompts.jsonl"
    line = '{"token_ids": [%d, 6, 7, 8], "output_tokens": 4}\n'
    prompts.write_text("".join(line % i for i in range(5, 5 + REQUESTS)))
    before = prompts.read_text()
    case.arguments = [argument for argument in case.arguments if not argument.startswith("workload")]
    case.arguments += ["workload=custom", f"workload.path={prompts}"]
    case.start()
    case.until(STAGES["round"])
    prompts.write_text(line % 9)
    case.ended()
    prompts.write_text(before)


FRONT, CORE, DEVICE, CLIENT = "vllm.entrypoints.openai.api_server", "EngineCore", "VLLM::Worker", "client.worker"
_ONCE = ("start", "warm-up", "round", "record", "logging", "second run", "report")

FAULTS = [
    *(Fault("SIGKILL of llmexp", stage, _signal_llmexp(stage, signal.SIGKILL), 6, "both") for stage in _ONCE),
    *(Fault("SIGTERM", stage, _signal_llmexp(stage, signal.SIGTERM), 3, "both") for stage in _ONCE),
    *(Fault("SIGINT", stage, _signal_llmexp(stage, signal.SIGINT), 3, "both") for stage in _ONCE),
    *(Fault("SIGINT twice", stage, _signal_llmexp(stage, signal.SIGINT, signal.SIGINT), 4) for stage in _ONCE),
    *(
        Fault(f"{name} three times", stage, _signal_llmexp(stage, *[number] * 3), 6 if stage == "round" else 3, "both")
        for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM))
        for stage in (_ONCE if name == "SIGINT" else ("round",))
    ),
    Fault("SIGINT three times at once", "round", _signal_llmexp("round", *[signal.SIGINT] * 3, pause_s=0.0), 6),
    Fault("SIGINT, then SIGKILL of llmexp", "round", _signal_llmexp("round", signal.SIGINT, signal.SIGKILL), 4),
    Fault("SIGKILL of llmexp's process group", "round", _signal_all("round", signal.SIGKILL, group=True), 4),
    Fault("SIGTERM to every process", "round", _signal_all("round", signal.SIGTERM), 4),
    Fault("SIGKILL of every process", "round", _signal_all("round", signal.SIGKILL), 4),
    *(
        Fault(f"SIGKILL of the {name}", stage, _signal_engine(stage, word, signal.SIGKILL), 4, "both")
        for name, word in (("engine's front end", FRONT), ("engine's core", CORE), ("engine's keeper", KEEPER))
        for stage in ("start", "warm-up", "round")
        if not (word == CORE and stage == "start")  # it may have none yet
    ),
    Fault("SIGKILL of the engine's worker", "round", _signal_engine("round", DEVICE, signal.SIGKILL), 4, "vllm"),
    Fault("SIGKILL of a client worker", "round", _signal_engine("round", CLIENT, signal.SIGKILL), 8, "both"),
    Fault("SIGSTOP of a client worker", "round", _signal_engine("round", CLIENT, signal.SIGSTOP), 3, "both"),
    Fault("SIGSTOP of the engine's core", "round", _signal_engine("round", CORE, signal.SIGSTOP), 5, "both"),
    Fault("SIGSTOP of the engine's front end", "round", _signal_engine("round", FRONT, signal.SIGSTOP), 5, "both"),
    Fault("engine never answers", "start", _engine("deaf", "engine.ready_timeout_s=2"), 2),
    Fault("out of memory", "start", _engine("no_memory"), 3),
    Fault("port taken before it is bound", "start", _engine("port"), 3),
    Fault("HTTP 500 for one request in ten", "all", _behaving(fault="500", fault_requests=[*range(1, 999, 10)]), 3),
    Fault("HTTP 429 for one request in ten", "all", _behaving(fault="429", fault_requests=[*range(1, 999, 10)]), 2),
    Fault("closes mid-stream", "all", _behaving(fault="close", fault_requests=[*range(1, 999, 10)]), 3),
    Fault("sends garbage", "all", _behaving(fault="garbage", fault_requests=[*range(1, 999, 10)]), 3),
    Fault("sends half an event", "all", _behaving(fault="malformed", fault_requests=[*range(1, 999, 10)]), 2),
    Fault("never ends one answer in ten", "all", _behaving(fault="stall", fault_requests=[*range(3, 999, 10)]), 3),
    Fault("never ends any answer", "all", _behaving(fault="stall"), 3),
    Fault("disk of runs full", "before", _full(None, "runs"), 3),
    *(Fault("disk of runs full", stage, _full(stage, "runs"), 3) for stage in ("start", "round", "record", "logging")),
    *(Fault("disk of temporary files full", stage, _full(stage, "tmp"), 3) for stage in ("start", "round", "record")),
    Fault("disk of temporary files full", "before", _full(None, "tmp"), 2),
    *(Fault("disk of MLflow full", stage, _full(stage, "mlruns"), 2) for stage in ("start", "round", "second run")),
    Fault("disk of MLflow full", "before", _full(None, "mlruns"), 2),
    *(Fault("folder turns read-only", stage, _read_only(stage), 2) for stage in ("round", "logging", "second run")),
    Fault("SQLite locked by another", "before", _locked(None), 1),
    *(Fault("SQLite locked by another", stage, _locked(stage), 1) for stage in ("round", "second run")),
    Fault("SQLite overwritten by another", "round", _broken_store, 2),
    Fault("mlflow server killed, back at once", "round", _server_away("round", True), 1),
    Fault("mlflow server killed, back later", "round", _server_away("round", False), 1),
    Fault("mlflow server killed, back later", "second run", _server_away("second run", False), 1),
    Fault("wall clock jumps a day on", "all", _clock(86400.0), 3),
    Fault("wall clock jumps a day back", "all", _clock(-86400.0), 3),
    Fault("workload's file edited", "round", _edited, 3),
]


class Site:
    """Where injections are made: one nursery, one migrated store to copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nursery = Nursery()
        self.store = folder / "mlflow.db"
        tracking.open_store(TrackingConfig(dir=str(folder / "template")))  # sets MLflow up
        tracking._make_database(self.store, folder / "artifacts")
        try:
            _mount(folder / "disk", "1m")
            subprocess.run(["umount", str(folder / "disk")], check=True)
            self.can_mount = True
        except OSError:
            self.can_mount = False

    def inject(self, fault: Fault) -> Found:
        """One injection, from an empty folder to the resumed study."""
        return self.inject_all([fault])[0]

    def inject_all(self, faults: Sequence[Fault], vllm: bool = False) -> list[Found]:
        """Faults that hit one study one after the other, until it is complete; then it is resumed to its end."""
        case = Case(self.nursery, self.folder / f"case-{time.monotonic_ns()}", self.store, vllm)
        all_found: list[Found] = []
        try:
            for fault in faults:
                all_found.append(found := Found(fault.name, fault.stage))
                fault.inject(case)
                case.look(found)
                if vllm and found.exit_code != -signal.SIGKILL and "three times" not in fault.name:
                    found.running = case.running()
                if found.exit_code == 0:
                    break
            case.resume(found)
        except Exception as error:  # of the injection itself: it shows in the table, and the others go on
            found.message.append(f"FAILED: {type(error).__name__}: {error}")
        finally:
            case.close()
            for disk in ("runs", "mlruns", "tmp"):
                subprocess.run(["umount", "-l", str(case.folder / disk)], capture_output=True, check=False)
            for earlier in all_found[:-1]:
                earlier.resumed = found.resumed
            if not any(one.problems for one in all_found):
                shutil.rmtree(case.folder, ignore_errors=True)
        return all_found

    def close(self) -> None:
        self.nursery.close()


@contextlib.contextmanager
def site() -> Iterator[Site]:
    """A place under the folder for temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="llmexp-faults-"))
    made = Site(folder)
    try:
        yield made
    finally:
        made.close()
        with contextlib.suppress(OSError):
            if not [*folder.glob("case-*"), *folder.glob("shared-*")]:
                shutil.rmtree(folder)


def parallel_studies(made: Site, count: int) -> list[Found]:
    """So many studies at once, each of a process of its own, that all log into one store."""
    shared = made.folder / f"shared-{time.monotonic_ns()}"
    cases = []
    for k in range(count):
        case = Case(made.nursery, shared / f"case-{k}", None)
        case.tracking = TrackingConfig(dir=str(shared / "mlruns"))
        url = f"tracking.dir={shared / 'mlruns'}"
        case.arguments += [url, f"study.name=s{k}"]
        case.runs = case.folder / "runs" / f"s{k}"
        cases.append(case)
    found = []
    try:
        for case in cases:
            case.start()
        for case in cases:
            one = Found("so many studies log into one store", f"{count} at once")
            try:
                case.look(one)
            except AssertionError as error:
                one.message.append(f"FAILED: {error}")
            one.resumed = one.exit_code == 0 and len(case.results()) == len(RUNS)
            found.append(one)
    finally:
        for case in cases:
            case.close()
    client, experiment = tracking.open_store(TrackingConfig(dir=str(shared / "mlruns")))
    states = [run.info.status for run in client.search_runs([experiment], max_results=10000)]
    if states != ["FINISHED"] * count * (len(RUNS) + 1):
        found[0].message.append(f"the store shows {states}")
        found[0].resumed = False
    if not any(one.problems for one in found):
        shutil.rmtree(shared)
    return found


def table(lines: list[dict[str, object]]) -> str:
    """The campaign's table, in Markdown."""
    rows = ["| fault | stage | times | lost | orphans | left RUNNING | resumed | exit | message |"]
    rows.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    ordered = sorted(lines, key=lambda line: _place(line))
    for (fault, stage), group in groupby(ordered, key=lambda line: (line["fault"], line["stage"])):
        of = list(group)
        codes = "/".join(sorted({str(line["exit_code"]) for line in of}))
        messages = sorted({plain([str(part) for part in line["message"]]) for line in of if line["message"]}, key=len)  # type: ignore[attr-defined]
        sums = [sum(int(line[key]) for line in of) for key in ("lost", "orphans")]  # type: ignore[call-overload]
        left = sum(len(line["running"]) for line in of)  # type: ignore[arg-type]
        resumed = sum(bool(line["resumed"]) for line in of)
        said = messages[0].replace("|", "\\|") if messages else ""
        rows.append(
            f"| {fault} | {stage} | {len(of)} | {sums[0]} | {sums[1]} | {left} | {resumed} | {codes} | {said} |"
        )
    return "\n".join([*rows, "", f"{len(lines)} injections."])


def _place(line: dict[str, object]) -> tuple[int, str, str]:
    keys = [(fault.name, fault.stage) for fault in FAULTS]
    key = (str(line["fault"]), str(line["stage"]))
    return keys.index(key) if key in keys else len(keys), *key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--times", type=int)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--chain", type=int, default=4, help="with --vllm, faults that hit one study")
    parser.add_argument("--jobs", type=int, default=1, help="injections at a time")
    parser.add_argument("--parallel", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        print(table(done))
        return
    began = time.monotonic()
    with site() as made, asked.out.open("a", buffering=1) as out:

        def keep(found: Found) -> None:
            out.write(json.dumps({**asdict(found), "vllm": asked.vllm}) + "\n")
            print(
                f"{time.monotonic() - began:5.0f} s  {found.fault} | {found.stage}: {found.problems or 'held'}",
                flush=True,
            )

        if asked.parallel:
            for found in parallel_studies(made, asked.parallel):
                keep(found)
            return
        to_do: list[tuple[int, Fault]] = []
        for fault in FAULTS:
            chosen = any(word in fault.key for word in asked.only) if asked.only else True
            if chosen and fault.on in ("both", "vllm" if asked.vllm else "stand-in"):
                before = sum((line["fault"], line["stage"]) == (fault.name, fault.stage) for line in done)
                to_do += [(k, fault) for k in range(before, asked.times or fault.times)]
        to_do.sort(key=lambda item: item[0])  # the first of every fault, then the second, however far it gets
        chains = _chains([fault for _, fault in to_do], asked.chain if asked.vllm else 1)

        def inject(chain: list[Fault]) -> None:
            while chain and time.monotonic() - began < asked.seconds:
                all_found = made.inject_all(chain, asked.vllm)
                for found in all_found:
                    keep(found)
                chain = chain[len(all_found) :]

        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(inject, chains))


def _chains(faults: Sequence[Fault], longest: int) -> list[list[Fault]]:
    """Faults of one name after each other, whose stages come one after the other."""
    chains: list[list[Fault]] = []
    for fault in faults:
        if chains and chains[-1][-1].name == fault.name and len(chains[-1]) < longest:
            chains[-1].append(fault)
        else:
            chains.append([fault])
    return chains


if __name__ == "__main__":
    main()
