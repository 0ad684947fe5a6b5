"""What an engine's log says: the root cause of a failure, and facts that no endpoint gives."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# vLLM prefixes a line with its process, and a logger's line with level, time and place.
_PREFIX = re.compile(r"^(\([\w.-]+ pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
# An exception's own line; a bare `Error in …` is a logger's, above the trace of one.
_ERROR = re.compile(
    r"^((?:\w+\.)*(?:\w+(?:Error|Exception|Interrupt|Exit)|(?:Error|Exception)(?=:))|[\w./-]+: error"
    r"|Worker proc \S+ died unexpectedly)\b:? ?(.*)$"
)
# Errors that only say that another one came before.
_WRAPPERS = (
    "Engine core initialization failed",
    "See root cause above",
    "WorkerProc initialization failed",
    "cancelled",
    "EngineDeadError",
    "Executor failed",
)
_CORE_GONE = "EngineDeadError"  # what the front end says where its core has said nothing


def lines(log: Path) -> Iterator[str]:
    """The log's lines without colours and prefixes."""
    with log.open(errors="replace") as handle:
        for line in handle:
            yield _PREFIX.sub("", _ESCAPES.sub("", line.rstrip("\n")))


def root_cause(log: Path) -> str:
    """The first error in the log that is not a wrapper round another one, else the log's last line."""
    last = "the log is empty"
    core_gone = False
    for line in lines(log):
        core_gone = core_gone or _CORE_GONE in line
        if line.strip():
            last = line.strip()
    if core_gone:
        last = "its core process had ended without a word (killed? out of memory? see dmesg)"
    return first_error(log) or last


def first_error(log: Path) -> str | None:
    """The first error in the log that is not a wrapper round another one."""
    for line in lines(log):
        error = _ERROR.match(line.strip())
        if error and error[2] and not any(wrapper in line for wrapper in _WRAPPERS):
            return line.strip()
    return None


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


def max_num_batched_tokens(log: Path) -> int | None:
    """The scheduler's token budget, where the log tells it."""
    return _number(log, r"max_num_batched_tokens=(\d+)")


def model_memory_bytes(log: Path) -> int | None:
    """What the weights take on each device, where the log tells it."""
    return _bytes(log, r"Model loading took (-?[\d.]+) GiB")


def nccl_version(log: Path) -> str | None:
    """NCCL's version, where vLLM loaded it."""
    return _first(log, r"vLLM is using nccl==([\w.]+)")


def all_reduce(log: Path) -> str | None:
    """What adds up the partial sums of tensor parallelism: vLLM's own kernel or NCCL, with the reason.

    vLLM 0.24 to 0.32 takes its kernel unless it is disabled, by argument or on finding the GPUs unfit, which it
    logs (`vllm/distributed/device_communicators/custom_all_reduce.py`); from a message size on it takes NCCL.
    """
    if reason := _first(log, r"Custom allreduce is disabled (?:because|due to)[ of]* (.*?)(?:\.|$)"):
        return f"nccl ({reason})"
    switched_off = _first(log, r"disable_custom_all_reduce=(True|False)")
    if switched_off is None:
        return None
    return "nccl (vLLM's kernel is switched off)" if switched_off == "True" else "custom"


ROUNDING_BYTES = round(0.005 * 2**30)  # vLLM gives GiB with two decimals, so its figures may be so much too small


@dataclass(frozen=True)
class Shortage:
    """Too little memory for the KV cache, in the engine's own words. `beyond_device`: the budget was more than the
    device has free."""

    line: str
    needed_bytes: int | None
    available_bytes: int | None
    beyond_device: bool = False


def memory_shortage(log: Path) -> Shortage | None:
    """Why an engine had too little memory to start; None if that is not what happened."""
    available = _bytes(log, r"Available KV cache memory: (-?[\d.]+) GiB")
    for line in lines(log):
        if found := re.search(r"([\d.]+) GiB KV cache is needed.*?KV cache memory \((-?[\d.]+) GiB\)", line):
            return Shortage(_cause(line), _gib(found[1]), _gib(found[2]))
        if found := re.search(r"requested memory for kv \((-[\d.]+)/", line):  # the CPU: none is left
            return Shortage(_cause(line), None, _gib(found[1]))
        if found := re.search(
            r"(?:Free memory on device|Available memory on node).*?\((-?[\d.]+)/.*?is less than", line
        ):
            return Shortage(_cause(line), None, _gib(found[1]), beyond_device=True)
        if "No available memory for the cache blocks" in line or "OutOfMemoryError" in line:
            return Shortage(_cause(line), None, available)
    return None


def _cause(line: str) -> str:
    return line.strip().partition(" See https://")[0]


def _first(log: Path, pattern: str) -> str | None:
    for line in lines(log):
        if found := re.search(pattern, line):
            return found[1]
    return None


def _number(log: Path, pattern: str) -> int | None:
    found = _first(log, pattern)
    return None if found is None else int(found)


def _bytes(log: Path, pattern: str) -> int | None:
    found = _first(log, pattern)
    return None if found is None else _gib(found)


def _gib(text: str) -> int:
    return round(float(text) * 2**30)
