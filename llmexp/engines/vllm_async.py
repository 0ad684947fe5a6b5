"""vLLM's AsyncLLM in a process of ours that takes the client in: the engine without HTTP."""

import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.engines import async_host, vllm
from llmexp.engines.counters import Counters, parse
from llmexp.engines.engine import EngineFacts
from llmexp.engines.host import Host
from llmexp.engines.vllm import Launched
from llmexp.errors import ConfigError
from llmexp.models import Model
from llmexp.schema.config import Config

_ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class VllmAsync:
    """An AsyncLLM that answers. See `llmexp.engines.engine.Engine`."""

    destination: Host
    facts: EngineFacts
    _launched: Launched

    @property
    def launch_s(self) -> float:
        return self._launched.launch_s

    @property
    def log(self) -> Path:
        return self._launched.process.log

    @property
    def steps(self) -> Path | None:
        return self._launched.steps

    @property
    def alive(self) -> bool:
        return self._launched.process.exit_code is None

    def counters(self) -> Counters:
        return parse(self._launched.answer(lambda: _answer(self.destination, async_host.metrics)))[0]

    def reset_cache(self) -> bool | None:
        return bool(self._launched.answer(lambda: _answer(self.destination, async_host.reset)))

    def stop(self) -> None:
        self._launched.resources.close()


def check(config: Config, here: bool = True) -> None:
    """Refuses what vLLM would refuse only after its start, and what needs an HTTP server.

    Raises ConfigError with the key, its value and what is accepted.
    """
    vllm.check(config, here)
    accepted = {"transport": "lean", "api": "completions", "prompt": "ids"}
    for key, value in accepted.items():
        if getattr(config.client, key) != value:
            raise ConfigError(
                f"client.{key}: got {getattr(config.client, key)!r}; accepted with engine=vllm_async is {value!r}"
            )
    if config.client.workers not in (1, "auto"):
        raise ConfigError(
            f"client.workers: got {config.client.workers}; with engine=vllm_async the client is in the engine's process"
        )


def arguments(config: Config, model: Model) -> list[str]:
    """What determines the engine beside its section of the config."""
    return vllm.arguments(config, model)


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None]) -> VllmAsync:
    """Launches a process that holds an AsyncLLM and waits until it answers.

    Raises EngineError with the root cause from its log, which stays in `folder`.
    """
    home = tempfile.TemporaryDirectory(prefix="llmexp-async-")  # only its owner may enter
    host = Host(Path(home.name) / "socket")
    python = vllm.section(config).python or sys.executable
    command = [python, "-m", "llmexp.engines.async_host", str(host.path), *vllm.arguments(config, model)]
    environment = vllm.finds_us()
    try:
        launched = vllm.launch(config, folder, command, environment, lambda: _answers(host), while_starting)
    except BaseException:
        home.cleanup()
        raise
    launched.resources.callback(home.cleanup)
    try:
        version = launched.answer(lambda: _answer(host, async_host.version))
        page = launched.answer(lambda: _answer(host, async_host.metrics))
        return VllmAsync(host, vllm.facts(page, version, launched), launched)
    except BaseException:
        launched.resources.close()
        raise


def _answer(host: Host, function: Callable[..., Awaitable[None]]) -> Any:
    with host.calling(function, _ANSWER_TIMEOUT_S) as talk:
        return talk.receive()


def _answers(host: Host) -> bool:
    try:
        _answer(host, async_host.version)
    except (OSError, EOFError):
        return False
    return True
