"""What an engine's log says: the root cause of a failure, and facts that no endpoint gives."""

import re
from collections.abc import Iterator
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# vLLM prefixes a line with its process, and a logger's line with level, time and place.
_PREFIX = re.compile(r"^(\([\w.-]+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)|[\w./-]+: error)\b:? ?(.*)$")
# Errors that only say that another one came before.
_WRAPPERS = (
    "Engine core initialization failed",
    "See root cause above",
    "WorkerProc initialization failed",
    "cancelled",
)


def lines(log: Path) -> Iterator[str]:
    """The log's lines without colours and prefixes."""
    with log.open(errors="replace") as handle:
        for line in handle:
            yield _PREFIX.sub("", _ESCAPES.sub("", line.rstrip("\n")))


def root_cause(log: Path) -> str:
    """The first error in the log that is not a wrapper round another one, else the log's last line."""
    last = "the log is empty"
    for line in lines(log):
        if line.strip():
            last = line.strip()
        error = _ERROR.match(line.strip())
        if error and error[2] and not any(wrapper in line for wrapper in _WRAPPERS):
            return line.strip()
    return last


def attention_backend(log: Path) -> str | None:
    """The attention backend that vLLM chose, where its log names one."""
    for line in lines(log):
        if found := re.search(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", line):
            return found[1]
        if found := re.search(r"Using (Flash Attention|FlashAttention)", line):
            return "FLASH_ATTN"
    return None


def kv_capacity_tokens(log: Path) -> int | None:
    """The size of the KV cache in tokens, where the log tells it."""
    for line in lines(log):
        if found := re.search(r"KV cache size: ([\d,]+) tokens", line):
            return int(found[1].replace(",", ""))
    return None
