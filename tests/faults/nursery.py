"""Forks llmexp commands off a process that has imported everything: real processes, in a tenth of their usual time.

`python -m tests.faults.nursery` reads a JSON line an order from standard input and answers with one; both
begin with the order's number.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "LLMEXP_FAULT"  # an environment variable by which all processes of a command are found


class Nursery:
    """Starts commands, each with device locks of its own, so that it waits for no other work on the machine."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MPLBACKEND": "Agg"},
        )

    def close(self) -> None:
        self._process.communicate()

    def start(self, arguments: list[str], folder: Path, out: Path, environment: Mapping[str, str]) -> int:
        """The PID of `llmexp ARGUMENTS…`, begun in `folder` with its output in `out`, in a session of its own."""
        return int(self._ask(argv=arguments, folder=str(folder), out=str(out), environment=dict(environment)))

    def poll(self, pid: int) -> int | None:
        """The exit code of a command, as of `subprocess.Popen.poll`; None while it runs."""
        code = self._ask(poll=pid)
        return None if code is None else int(code)

    def _ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._asking:
            self._asked += 1
            self._process.stdin.write(json.dumps([self._asked, order]) + "\n")
            self._process.stdin.flush()
            answered, answer = 0, None
            while answered != self._asked:  # a test's timeout may have come between a question and its answer
                answered, answer = json.loads(self._process.stdout.readline())
            return answer


def main() -> None:
    _import_all()
    answers = os.fdopen(os.dup(1), "w")
    codes: dict[int, int] = {}
    for line in sys.stdin:
        number, order = json.loads(line)
        if "poll" in order:
            if order["poll"] not in codes:
                pid, status = os.waitpid(order["poll"], os.WNOHANG)
                codes |= {pid: os.waitstatus_to_exitcode(status)} if pid else {}
            answer = codes.get(order["poll"])
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _become(order)
            codes.pop(answer, None)  # of an earlier process with this PID
        answers.write(json.dumps([number, answer]) + "\n")
        answers.flush()


def _become(order: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(order["folder"])
        null = os.open(os.devnull, os.O_RDONLY)
        out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        os.environ.update(order["environment"])
        tempfile.tempdir = None  # what it was found to be before
        sys.argv = ["llmexp", *order["argv"]]
        if "FAULT_CLOCK" in os.environ:
            from tests.faults.clock import sitecustomize  # noqa: F401 - the clock of this process jumps too
        from llmexp.__main__ import main as llmexp
        from llmexp.engines import devices

        devices._LOCKS = Path(order["folder"])

        llmexp()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


_ALL = (
    "matplotlib.pyplot",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.tracking",
    "scipy.stats",
    "llmexp.commands",
    "llmexp.analyze.study",
    "llmexp.engines.kinds",
    "llmexp.report.report",
    "llmexp.execute",
    "llmexp.study",
    "llmexp.workloads.build",
)


def _import_all() -> None:
    for name in _ALL:
        importlib.import_module(name)
    from llmexp.compose import compose

    compose(["gpu=cpu", "model=tiny_random"])  # Hydra finds its plugins


if __name__ == "__main__":
    main()
