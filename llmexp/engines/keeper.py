"""Runs an engine so that none of it outlives its owner: `python keeper.py STOP_S NICENESS -- COMMAND…`.

The keeper leads a process group of its own and starts the engine in it. Standard input is a pipe from the owner:
when it closes, because the owner said stop or died in any way, or when the engine's first process ends, the whole
group gets SIGTERM, and SIGKILL after STOP_S seconds. The keeper exits with the engine's own exit code, or with 128
and the signal's number, as a shell does, if a signal ended it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(stop_timeout_s: float, niceness: int, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group's SIGTERM is meant for the engine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _prepare(niceness))
    owner = select.poll()
    owner.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    owner.register(pidfd := os.pidfd_open(engine.pid), select.POLLIN)
    owner.poll()
    os.close(pidfd)
    _end_group(stop_timeout_s)
    code = engine.wait()
    return code if code >= 0 else 128 - code


def _prepare(niceness: int) -> None:
    os.nice(niceness)
    if niceness:
        # Where the kernel groups processes by session, niceness weighs only within one, and each group has its own.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_group(stop_timeout_s: float) -> None:
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGCONT)  # one that was stopped could not end itself
    deadline = time.monotonic() + stop_timeout_s
    while rest := _others_in_group():
        if time.monotonic() > deadline:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _others_in_group() -> list[int]:
    """Living processes of this group apart from the keeper."""
    group, own = os.getpgrp(), os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != own:
            try:
                state, _, pgrp = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    split = sys.argv.index("--")
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[split + 1 :]))
