"""An engine as a group of processes: started apart from ours, watched, and ended to the last one."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmexp.engines import keeper

_KILL_GRACE_S = 10.0  # for the keeper to reap what it has killed


@dataclass(frozen=True)
class EngineProcess:
    """A running engine. Its keeper leads a process group and session of its own, and dies with this process."""

    popen: subprocess.Popen[bytes]
    log: Path
    stop_timeout_s: float

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.popen.poll()

    def ends_within(self, timeout_s: float) -> bool:
        """Waits that long for it to end; whether it has."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pids(self) -> list[int]:
        """The living processes of the engine, its keeper included."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):  # it may end at any moment
                if _group_of(process.pid) == self.popen.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def listening(self) -> set[tuple[str, int]]:
        """The addresses and ports at which processes of the engine listen."""
        found = set()
        for pid in self.pids():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                for socket in psutil.Process(pid).net_connections(kind="tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        found.add((str(socket.laddr.ip), int(socket.laddr.port)))
        return found

    def stop(self) -> None:
        """Ends the group: SIGTERM, then SIGKILL. Returns once no process of it is left."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(self.stop_timeout_s + _KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    stop_timeout_s: float,
    niceness: int = 0,
    locks: Sequence[int] = (),
) -> EngineProcess:
    """Starts `command` under a keeper, with all its output in `log`, at a lower priority by `niceness`.

    The keeper inherits the descriptors `locks`: what they lock stays locked until the engine has ended, even if this
    process is killed.
    """
    with log.open("ab") as output:
        popen = subprocess.Popen(
            [sys.executable, keeper.__file__, str(stop_timeout_s), str(niceness), "--", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=tuple(locks),
        )
    return EngineProcess(popen, log, stop_timeout_s)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def was_killed(code: int) -> bool:
    """Whether a process had no time to say why it ended, by its exit code."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def ending(code: int) -> str:
    """How a process ended, in words, by its exit code: a shell's 128 and the signal's number, or Python's minus."""
    number = code - 128 if code > 128 else -code
    if number not in set(signal.Signals):
        return f"ended with exit code {code}"
    name = signal.Signals(number).name
    return f"was ended by {name}" + (" (out of memory? see dmesg)" if name == "SIGKILL" else "")
