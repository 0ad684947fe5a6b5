"""What a run needs of an engine, whichever it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmexp.engines.counters import Counters
from llmexp.engines.host import Host
from llmexp.engines.target import Target
from llmexp.errors import EngineError


class NoMemoryError(EngineError):
    """An engine that did not start because its memory does not suffice. Bytes are None where it did not say.

    `needed_bytes` is the smallest KV cache that would do, as the engine rounds it, `available_bytes` what was left.
    """

    def __init__(self, message: str, needed_bytes: int | None, available_bytes: int | None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


@dataclass(frozen=True)
class EngineFacts:
    """What a running engine says of itself; None where it does not say.

    `gpus` are the UUIDs of the devices it runs on. `links` is how they are connected, as `nvidia-smi topo -m`
    names it (`NV18`, `PIX`, `SYS`; joined by commas where they differ), and `all_reduce` what adds up
    their partial sums. `open_ports` are those of its TCP ports that other machines reach. `unknown` says what a
    measurement cannot know there, and what that weakens.
    """

    version: str | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    kv_capacity_tokens: int | None = None
    attention_backend: str | None = None
    prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    model_memory_bytes: int | None = None  # on each device
    gpus: tuple[str, ...] = ()
    links: str | None = None
    all_reduce: str | None = None
    nccl_version: str | None = None
    open_ports: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()


class Engine(Protocol):
    """An engine that answers. `destination` is where the client sends requests: an address, or a process that
    holds the engine and takes the client in. `launch_s` is the time from launch to readiness."""

    @property
    def destination(self) -> Target | Host: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def launch_s(self) -> float: ...

    @property
    def log(self) -> Path | None:
        """The file that it writes its log to, if it is ours."""

    @property
    def steps(self) -> Path | None:
        """The file with a line for each of its steps, if it records them."""

    @property
    def alive(self) -> bool: ...

    def counters(self) -> Counters:
        """A reading of its own counters and gauges; empty where they cannot be known. Raises EngineError."""

    def reset_cache(self) -> bool | None:
        """Empties the prefix cache; whether the engine confirms it, None if it does not say."""

    def stop(self) -> None:
        """Ends whatever of it is ours, and waits until device memory is back."""
