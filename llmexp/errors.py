"""Errors that a user can act on. Each message says what was wrong, what was found and what is accepted."""

import errno
import os

from llmexp.secrets import redacted

# How the command ends, but for signals (llmexp.interrupt).
FAILED, WRONG_INPUT, NOT_VALID = 1, 2, 3
_LONGEST_LINE = 1000  # characters; what was found may be anything


class LlmexpError(Exception):
    """A failure with a message meant for the user; printed without a traceback.

    Messages are shown, logged and kept, and quote what others said: secrets are taken out, long lines cut.
    `exit_code`: with what the command ends.
    """

    exit_code = FAILED

    def __init__(self, message: object = "") -> None:
        super().__init__("\n".join(map(_cut, redacted(str(message)).splitlines())))


class ConfigError(LlmexpError):
    """A key of the config, or an option, has a value that cannot be used."""

    exit_code = WRONG_INPUT


class WorkloadError(LlmexpError):
    """A workload cannot be built or sent as asked (file, line and what is wrong with it)."""

    exit_code = WRONG_INPUT


class EngineError(LlmexpError):
    """The engine did not start, died or refused a request of ours."""


class StorageError(LlmexpError):
    """A disk is full or a folder cannot be written; what was written before is kept."""

    def __init__(self, place: object, number: int) -> None:
        super().__init__(
            f"{place}: {os.strerror(number)}; what was written before is kept\n"
            f"{_ADVICE[number]}, then give the same command again; with study.name=NAME a study goes on"
        )


_ROOM, _RIGHT = "Free some space there (df -h tells), or set runs_dir and tracking.dir elsewhere", "Make it writable"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EROFS: _RIGHT,
    errno.EACCES: _RIGHT,
    errno.EPERM: _RIGHT,
    errno.EIO: "See to the disk (dmesg tells)",
}


def storage_error(error: OSError, place: object = None) -> StorageError | None:
    """A disk's refusal in plain words; None for an error of another kind. `place` stands in for the file's name."""
    if error.errno not in _ADVICE:
        return None
    return StorageError(place or error.filename or "the disk", error.errno)


class TrackingError(LlmexpError):
    """MLflow could not be reached, read or written; what was measured is on disk all the same."""


class ResultError(LlmexpError):
    """A run or study that was named is missing, broken or not comparable."""

    exit_code = WRONG_INPUT


def _cut(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} … ({len(line) - _LONGEST_LINE} characters left out) … {line[-half:]}"
