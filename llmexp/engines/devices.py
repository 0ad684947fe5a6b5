"""One engine a device: locks that keep every llmexp process of this host off a device in use."""

import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmexp import hardware, words
from llmexp.errors import EngineError
from llmexp.hardware import Gpu

_POLL_S = 0.5
_PATIENCE_S = 5.0  # before it says what it waits for
FOREIGN_MEMORY_BYTES = 1 << 30  # a driver and a display take less; an engine of somebody else takes more
_RELEASE_TIMEOUT_S = 60.0
# One folder for all users of a host, whatever their TMPDIR, or two of them could take the same device.
_LOCKS = Path("/tmp")


@dataclass(frozen=True)
class Claim:
    """The GPUs that are held, none for the CPU. A process that inherits the descriptors `locks` holds them too."""

    gpus: tuple[Gpu, ...]
    locks: tuple[int, ...]


@contextmanager
def claim(device: str, count: int, wait_s: float) -> Iterator[Claim]:
    """Holds `count` free GPUs (device "cuda"), or the CPU, for one engine; waits while others hold them.

    Raises EngineError after `wait_s`, or if a GPU is in use by a process that holds no claim.
    """
    usable: dict[str, Gpu | None] = {"cpu": None}
    if device == "cuda":
        usable = {gpu.uuid: gpu for gpu in visible_gpus()}
        if reason := lacking(device, count):
            raise EngineError(reason)
    else:
        count = 1
    began = time.monotonic()
    told = False
    while True:
        with ExitStack() as held:
            taken: dict[str, int] = {}
            for name in usable:
                if len(taken) < count and (lock := _take(held, name)) is not None:
                    taken[name] = lock
            if len(taken) == count:
                gpus = tuple(gpu for name in taken if (gpu := usable[name]) is not None)
                _refuse_foreign_use(gpus)
                yield Claim(gpus, tuple(taken.values()))
                return
        waited_s = time.monotonic() - began
        if waited_s > wait_s:
            raise EngineError(f"{device}: {len(taken)} of {count} free after {wait_s:.0f} s; {_holders(usable)}")
        if waited_s > _PATIENCE_S and not told:
            print(f"Waiting for {device}: one engine a device, and {_holders(usable)}", file=sys.stderr, flush=True)
            told = True
        time.sleep(_POLL_S)


def lacking(device: str, count: int) -> str | None:
    """What this machine lacks for an engine on `count` devices, None if nothing."""
    present = len(visible_gpus()) if device == "cuda" else count
    if present >= count:
        return None
    if not present:
        return f"gpu.device: got {device}; no GPU is visible here"
    return f"gpu.tensor_parallel_size: got {count}; {words.count(present, 'GPU')} visible here"


def _holders(names: Iterable[str]) -> str:
    pids = set()
    for name in names:
        with suppress(OSError):  # swept away, or of another user
            pids.add(_lock_file(name).read_text())
    pids -= {""}
    return f"llmexp runs in process {', '.join(sorted(pids)) or 'of another user'}"


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all of them where it is unset."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return hardware.gpus()
    by_name = {key: gpu for gpu in hardware.gpus() for key in (str(gpu.index), gpu.uuid)}
    return tuple(by_name[key] for part in chosen.split(",") if (key := part.strip()) in by_name)


def holders() -> dict[str, str]:
    """The devices that are held at the moment, each with the process that holds it. Raises EngineError."""
    held: dict[str, str] = {}
    for path in sorted(_LOCKS.glob(_lock_file("*").name)):
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            held[path.stem.removeprefix("llmexp-")] = os.pread(lock, 32, 0).decode(errors="replace")
        finally:
            os.close(lock)
    return held


def _lock_file(name: str) -> Path:
    return _LOCKS / f"llmexp-{name}.lock"


def _take(held: ExitStack, name: str) -> int | None:
    """The descriptor of a device's lock, None if another process holds it."""
    path = _lock_file(name)
    lock = _open(path)
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    if not _is_named(lock, path):
        return None  # swept away by somebody who tidies /tmp; the next look makes a new one
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _is_named(lock: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), path.stat(follow_symlinks=False))
    return False


def _open(path: Path) -> int:
    """Opens a lock file, or makes it for everybody.

    Anybody may put something else in its place, so links are not followed; and no O_CREAT on a file that is there,
    which Linux refuses in /tmp where another user owns it (fs.protected_regular). Raises EngineError.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(lock, 0o666)  # whatever the umask
        except FileExistsError:
            lock = os.open(path, flags)
    except OSError as error:
        raise EngineError(
            f"{path}, by which users share a device, cannot be opened ({error.strerror}); remove it"
        ) from None
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise EngineError(f"{path}, by which users share a device, is no plain file; remove it")
    return lock


def _refuse_foreign_use(gpus: Sequence[Gpu]) -> None:
    deadline = time.monotonic() + _PATIENCE_S  # the memory of an engine whose owner died is freed after its lock
    for gpu in gpus:
        while (used := hardware.used_memory_bytes(gpu)) > FOREIGN_MEMORY_BYTES and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if used > FOREIGN_MEMORY_BYTES:
            raise EngineError(
                f"GPU {gpu.index} ({gpu.name}): {used / 2**30:.1f} GiB are in use by another process; "
                "end it, or choose another device with CUDA_VISIBLE_DEVICES"
            )


def wait_until_free(gpus: Sequence[Gpu]) -> None:
    """Waits until the memory of an engine that has ended is back.

    Raises EngineError if it is not back within a minute.
    """
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while any(hardware.used_memory_bytes(gpu) > FOREIGN_MEMORY_BYTES for gpu in gpus):
        if time.monotonic() > deadline:
            raise EngineError(f"GPU memory is still in use {_RELEASE_TIMEOUT_S:.0f} s after the engine ended")
        time.sleep(_POLL_S)
