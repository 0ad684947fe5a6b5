"""vLLM's OpenAI server as a subprocess of ours, on loopback, from launch to the last of its processes."""

import json
import os
import secrets
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.engines import devices, log, process
from llmexp.engines.counters import Counters, parse
from llmexp.engines.process import EngineProcess
from llmexp.engines.target import Target
from llmexp.errors import ConfigError, EngineError
from llmexp.hardware import Gpu
from llmexp.models import Model
from llmexp.schema.config import Config

_POLL_S = 0.25
_HTTP_TIMEOUT_S = 30.0
_RESET_TIMEOUT_S = 10.0  # blocks of a request that has just ended come free a step later
_CLAIM_TIMEOUT_S = 3600.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever proxy is set
_BLOCK_MULTIPLE = {"cpu": 32, "cuda": 16}  # what vLLM's CPU attention and FlashAttention take


@dataclass(frozen=True)
class EngineFacts:
    """What a running engine says of itself; None where it does not say."""

    version: str | None
    block_size: int | None
    num_gpu_blocks: int | None
    kv_capacity_tokens: int | None
    attention_backend: str | None
    prefix_caching: bool | None


@dataclass(frozen=True)
class VllmServer:
    """A server that answers. `stop` ends it; `launch_s` is the time from launch to readiness."""

    process: EngineProcess
    target: Target
    facts: EngineFacts
    launch_s: float
    _resources: ExitStack

    def counters(self) -> Counters:
        """A reading of the server's own counters and gauges."""
        self._check_alive()
        return parse(_get(self.target, "/metrics").decode())[0]

    def reset_cache(self) -> bool | None:
        """Empties the prefix cache; whether the server confirms it, None if it does not say.

        From vLLM 0.26 the answer's body tells; before it is empty, and the engine's log tells.
        """
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while True:
            self._check_alive()
            seen = self.process.log.stat().st_size
            answer = _reset_answer(_post(self.target, "/reset_prefix_cache"), self.process.log, seen)
            if answer is not False or time.monotonic() > deadline:
                return answer
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends every process of the server and waits until device memory is back."""
        self._resources.close()

    def _check_alive(self) -> None:
        if self.process.exit_code is not None:
            raise _died(self.process)


def check(config: Config) -> None:
    """Refuses what vLLM would refuse only after its start.

    Raises ConfigError with the key, its value and what is accepted.
    """
    multiple = _BLOCK_MULTIPLE["cpu" if config.gpu.device == "cpu" else "cuda"]
    if config.kv.block_size is not None and config.kv.block_size % multiple:
        raise ConfigError(
            f"kv.block_size: got {config.kv.block_size}; accepted on gpu={config.gpu.name} is a multiple of {multiple}"
        )
    if config.gpu.device == "cuda":
        present = len(devices.visible_gpus())
        if config.gpu.tensor_parallel_size > present:
            raise ConfigError(
                f"gpu.tensor_parallel_size: got {config.gpu.tensor_parallel_size}; {present} GPUs are visible here"
            )
    if config.engine.port is not None and not _is_free(config.engine.port):
        raise ConfigError(f"engine.port: got {config.engine.port}, which is in use; null takes a free one")


def arguments(config: Config, model: Model) -> list[str]:
    """vLLM's command-line arguments for a config, without the port. Equal arguments mean equal engines."""
    kv, gpu, scheduler = config.kv, config.gpu, config.scheduler
    no_kv_budget = kv.gpu_memory_utilization is None and kv.cache_memory_bytes is None
    values: dict[str, Any] = {
        "model": str(model.path),
        "served_model_name": model.name,
        "host": "127.0.0.1",
        "load_format": config.model.load_format,
        "trust_remote_code": config.model.trust_remote_code or None,
        "dtype": gpu.dtype or "auto",
        "tensor_parallel_size": gpu.tensor_parallel_size,
        "enforce_eager": gpu.enforce_eager or None,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold or None,
        "scheduling_policy": scheduler.policy,
        "async_scheduling": scheduler.async_scheduling,
        "gpu_memory_utilization": kv.gpu_memory_utilization,
        "kv_cache_memory_bytes": gpu.kv_cache_bytes if no_kv_budget else kv.cache_memory_bytes,
        "num_gpu_blocks_override": kv.num_blocks,
        "block_size": kv.block_size,
        "kv_cache_dtype": kv.dtype,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
        "enable_prompt_tokens_details": True,
        "generation_config": "vllm",  # the model's own would change sampling, e.g. by a repetition penalty
        "seed": config.seed,
        "uvicorn_log_level": "warning",
        **config.engine.args,
    }
    return [argument for name, value in values.items() for argument in _argument(name, value)]


def _argument(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None] | None = None) -> VllmServer:
    """Launches a server and waits until it answers; `while_starting` runs in the meantime.

    Raises EngineError with the root cause from the server's log, which stays in `folder`.
    """
    with ExitStack() as resources:
        gpus = resources.enter_context(
            devices.claim(config.gpu.device, config.gpu.tensor_parallel_size, _CLAIM_TIMEOUT_S)
        )
        if gpus:
            resources.callback(devices.wait_until_free, gpus)
        port = config.engine.port or _free_port()
        target = Target(f"http://127.0.0.1:{port}", model.name, secrets.token_urlsafe(24))
        python = config.engine.python or sys.executable
        command = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *arguments(config, model),
            "--port",
            str(port),
        ]
        launched = time.monotonic()
        engine = process.start(
            command, _environment(config, target, gpus), folder / "engine.log", config.engine.stop_timeout_s
        )
        resources.callback(engine.stop)
        if while_starting is not None:
            while_starting()
        _wait_until_ready(engine, target, port, launched + config.engine.ready_timeout_s)
        launch_s = time.monotonic() - launched
        return VllmServer(engine, target, _facts(target, engine.log), launch_s, resources.pop_all())


def _environment(config: Config, target: Target, gpus: tuple[Gpu, ...]) -> dict[str, str]:
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoint that resets the prefix cache
        "VLLM_API_KEY": target.api_key or "",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in gpus)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment | dict(config.engine.env)


def _wait_until_ready(engine: EngineProcess, target: Target, port: int, deadline: float) -> None:
    while True:
        if engine.exit_code is not None:
            raise _died(engine)
        if time.monotonic() > deadline:
            raise EngineError(
                "the engine did not answer within engine.ready_timeout_s; "
                f"in its log {engine.log}: {log.root_cause(engine.log)}"
            )
        if _answers(target):
            break
        time.sleep(_POLL_S)
    if not engine.listens_on(port):
        raise EngineError(f"port {port} is served by a process that is not ours; set engine.port to another")


def _answers(target: Target) -> bool:
    try:
        _get(target, "/health")
        served = json.loads(_get(target, "/v1/models"))
    except (OSError, ValueError, EngineError):
        return False
    return any(entry.get("id") == target.model for entry in served.get("data", []))


def _died(engine: EngineProcess) -> EngineError:
    return EngineError(
        f"the engine ended with exit code {engine.popen.wait()}: {log.root_cause(engine.log)}\n"
        f"Its whole log: {engine.log}"
    )


def _facts(target: Target, log_file: Path) -> EngineFacts:
    cache: Mapping[str, str] = parse(_get(target, "/metrics").decode())[1]
    block_size, blocks = _int(cache.get("block_size")), _int(cache.get("num_gpu_blocks"))
    capacity = log.kv_capacity_tokens(log_file)
    if capacity is None and block_size and blocks:
        capacity = block_size * blocks
    caching = cache.get("enable_prefix_caching")
    return EngineFacts(
        version=json.loads(_get(target, "/version")).get("version"),
        block_size=block_size,
        num_gpu_blocks=blocks,
        kv_capacity_tokens=capacity,
        attention_backend=log.attention_backend(log_file),
        prefix_caching=None if caching is None else caching == "True",
    )


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _reset_answer(body: bytes, log_file: Path, seen_bytes: int) -> bool | None:
    if body.strip():
        try:
            return bool(json.loads(body)["success"])
        except (ValueError, KeyError, TypeError):
            return None
    time.sleep(_POLL_S)  # the engine core logs on its own time
    with log_file.open("rb") as handle:
        handle.seek(seen_bytes)
        news = handle.read()
    if b"Successfully reset prefix cache" in news:
        return True
    return False if b"Failed to reset prefix cache" in news else None


def _get(target: Target, path: str) -> bytes:
    return _ask(target, path, None)


def _post(target: Target, path: str) -> bytes:
    return _ask(target, path, b"")


def _ask(target: Target, path: str, data: bytes | None) -> bytes:
    request = urllib.request.Request(
        target.base_url + path, data=data, headers={"Authorization": f"Bearer {target.api_key}"}
    )
    try:
        with _DIRECT.open(request, timeout=_HTTP_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise EngineError(f"{path}: the server answered {error.code} {error.reason}") from None


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
