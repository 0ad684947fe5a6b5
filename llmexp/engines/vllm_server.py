"""vLLM's OpenAI server as a subprocess of ours, on loopback, from launch to the last of its processes."""

import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from llmexp.engines import vllm
from llmexp.engines.counters import Counters, parse
from llmexp.engines.engine import EngineFacts
from llmexp.engines.process import EngineProcess
from llmexp.engines.target import Target
from llmexp.engines.vllm import POLL_S, Launched
from llmexp.errors import ConfigError, EngineError
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.engine import VllmServer as VllmServerConfig

_PORT_ATTEMPTS = 3
_RESET_TIMEOUT_S = 10.0  # blocks of a request that has just ended come free a step later


@dataclass(frozen=True)
class VllmServer:
    """A server that answers. See `llmexp.engines.engine.Engine`."""

    destination: Target
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
        return parse(self._launched.answer(lambda: self.destination.get("/metrics").decode()))[0]

    def reset_cache(self) -> bool | None:
        """From vLLM 0.26 the answer's body tells; before it is empty, and the engine's log tells."""
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while True:
            seen = self.log.stat().st_size
            answer = reset_answer(self._launched.answer(lambda: self.destination.post("/reset_prefix_cache")))
            while answer is None and time.monotonic() < deadline:
                time.sleep(POLL_S)  # the engine core logs on its own time
                answer = _logged_answer(self.log, seen)
            if answer is not False or time.monotonic() > deadline:
                return answer
            time.sleep(POLL_S)

    def stop(self) -> None:
        self._launched.resources.close()


def check(config: Config, here: bool = True) -> None:
    """Refuses what vLLM would refuse only after its start.

    Raises ConfigError with the key, its value and what is accepted.
    """
    vllm.check(config, here)
    port = _section(config).port
    if here and port is not None and not _is_free(port):
        raise ConfigError(f"engine.port: got {port}, which is in use; null takes a free one")


def arguments(config: Config, model: Model) -> list[str]:
    """vLLM's command-line arguments for a config, without the port. Equal arguments mean equal engines."""
    server = {
        "host": "127.0.0.1",
        "middleware": "llmexp_guard.Guard",  # the dev endpoints run code, and vLLM asks for no key there
        "enable_prompt_tokens_details": True,
        "uvicorn_log_level": "warning",
    }
    return [*vllm.flags(server), *vllm.arguments(config, model)]


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None]) -> VllmServer:
    """Launches a server and waits until it answers; `while_starting` runs in the meantime.

    Raises EngineError with the root cause from the server's log, which stays in `folder`.
    """
    for attempt in range(_PORT_ATTEMPTS):
        try:
            begin = while_starting if attempt == 0 else lambda: None
            return _start(config, model, folder, _section(config).port or _free_port(), begin)
        except EngineError as error:
            # Somebody may take the port that was free before the server does.
            if _section(config).port is not None or "address already in use" not in str(error):
                raise
    raise EngineError(f"{_PORT_ATTEMPTS} free ports were taken before the server had them; set engine.port to another")


def _start(config: Config, model: Model, folder: Path, port: int, while_starting: Callable[[], None]) -> VllmServer:
    engine = _section(config)
    target = Target(f"http://127.0.0.1:{port}", model.name, secrets.token_urlsafe(24))
    command = [
        engine.python or sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *arguments(config, model),
        "--port",
        str(port),
    ]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoint that resets the prefix cache
        "VLLM_API_KEY": target.api_key or "",
        **vllm.finds(vllm.GUARD),
    }
    launched = vllm.launch(config, folder, command, environment, lambda: _answers(target), while_starting)
    try:
        _require_own_loopback(launched.process, port)
        version = launched.answer(lambda: orjson.loads(target.get("/version")).get("version"))
        page = launched.answer(lambda: target.get("/metrics").decode())
        return VllmServer(target, vllm.facts(page, version, launched), launched)
    except BaseException:
        launched.resources.close()
        raise


def _require_own_loopback(engine: EngineProcess, port: int) -> None:
    """Raises EngineError if the engine does not listen at the port, or also where others reach it."""
    addresses = {address for address, number in engine.listening() if number == port}
    if not addresses:
        if engine.ends_within(vllm.DYING_SILENT_S):
            raise vllm.died(engine)
        raise EngineError(f"port {port} is served by a process that is not ours; set engine.port to another")
    if addresses != {"127.0.0.1"}:
        raise EngineError(f"the engine listens at {', '.join(sorted(addresses))}, where others reach it; it was ended")


def _section(config: Config) -> VllmServerConfig:
    assert isinstance(config.engine, VllmServerConfig)
    return config.engine


def _answers(target: Target) -> bool:
    try:
        target.get("/health")
        served = orjson.loads(target.get("/v1/models"))
    except (OSError, ValueError, EngineError):
        return False
    return any(entry.get("id") == target.model for entry in served.get("data", []))


def reset_answer(body: bytes) -> bool | None:
    """What the answer to a reset says; None where it says nothing."""
    try:
        return bool(orjson.loads(body)["success"])
    except (ValueError, KeyError, TypeError):
        return None


def _logged_answer(log_file: Path, seen_bytes: int) -> bool | None:
    with log_file.open("rb") as handle:
        handle.seek(seen_bytes)
        news = handle.read()
    if b"Successfully reset prefix cache" in news:
        return True
    return False if b"Failed to reset prefix cache" in news else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
