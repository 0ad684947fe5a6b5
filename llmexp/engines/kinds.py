"""The engines by the value of `engine.kind`, in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmexp.engines import endpoint, simulator, vllm_async, vllm_server
from llmexp.engines.engine import Engine
from llmexp.engines.simulator import Simulator
from llmexp.models import Model
from llmexp.schema.config import Config


@dataclass(frozen=True)
class Kind:
    """`check` refuses a config before anything starts (ConfigError), this machine's devices included if the run is
    to be made here; `start` returns once the engine answers,
    having called its last argument meanwhile (EngineError); `arguments` are equal for equal engines."""

    check: Callable[[Config, bool], None]
    start: Callable[[Config, Model, Path, Callable[[], None]], Engine | Simulator]
    arguments: Callable[[Config, Model], list[str]]


_KINDS = {
    "vllm_server": Kind(vllm_server.check, vllm_server.start, vllm_server.arguments),
    "vllm_async": Kind(vllm_async.check, vllm_async.start, vllm_async.arguments),
    "endpoint": Kind(endpoint.check, endpoint.start, endpoint.arguments),
    "simulator": Kind(simulator.check, simulator.start, simulator.arguments),
}


def kind_of(config: Config) -> Kind:
    """How the engine of a config is checked and started."""
    return _KINDS[config.engine.kind]
