"""Whether the process that began something is still there: told from a mark that it leaves, without asking it."""

import os
import socket
from pathlib import Path


def mark() -> str:
    """This process among all: host, boot, PID namespace, PID and when it began, in clock ticks since the boot."""
    began = _began(os.getpid())
    return " ".join((socket.gethostname(), _boot(), _namespace(), str(os.getpid()), began or "?"))


def is_gone(mark: str) -> bool | None:
    """Whether the process that left a mark has ended; None where that cannot be told from here."""
    try:
        host, boot, namespace, pid, began = mark.split()
    except ValueError:
        return None
    if host != socket.gethostname():
        return None
    if boot != _boot():
        return True
    if namespace != _namespace():
        return None
    return _began(int(pid)) != began


def _began(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # proc(5): state is field 3, starttime field 22


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())
