"""Somebody else's OpenAI-compatible server: it is asked what it knows, and what it does not tell stays unknown."""

import json
import os
import urllib.error
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmexp.engines import vllm
from llmexp.engines.counters import Counters, parse
from llmexp.engines.engine import EngineFacts
from llmexp.engines.target import Target
from llmexp.engines.vllm_server import reset_answer
from llmexp.errors import ConfigError, EngineError
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.engine import Endpoint as EndpointConfig


@dataclass(frozen=True)
class Endpoint:
    """A server that answers. See `llmexp.engines.engine.Engine`."""

    destination: Target
    facts: EngineFacts
    launch_s: float = 0.0
    log: Path | None = None
    steps: Path | None = None
    alive: bool = True

    def counters(self) -> Counters:
        page = _metrics(self.destination)
        return Counters() if page is None else parse(page)[0]

    def reset_cache(self) -> bool | None:
        try:
            return reset_answer(self.destination.post("/reset_prefix_cache"))
        except (EngineError, OSError):
            return None  # most servers have no such endpoint

    def stop(self) -> None:
        """Nothing of it is ours."""


def check(config: Config, here: bool = True) -> None:
    """Refuses what cannot be an address, and a key that is not there. Raises ConfigError."""
    _target(_section(config), "")


def arguments(config: Config, model: Model) -> list[str]:
    """Nothing beside its section of the config determines it."""
    return []


def start(config: Config, model: Model, folder: Path, while_starting: Callable[[], None]) -> Endpoint:
    """Asks the server what it serves and whether it streams.

    Raises EngineError if nothing answers there, if it is no such server or does not stream, ConfigError if it serves
    another model.
    """
    while_starting()
    target = _target(_section(config), _section(config).model or "")
    served = _served(target)
    if not target.model:
        if len(served) != 1:
            raise ConfigError(f"engine.model: got null; {target.base_url} serves {', '.join(served) or 'nothing'}")
        target = replace(target, model=served[0])
    elif served and target.model not in served:
        raise ConfigError(f"engine.model: got {target.model!r}; {target.base_url} serves {', '.join(served)}")
    _require_stream(target, config)
    return Endpoint(target, _facts(target))


def _section(config: Config) -> EndpointConfig:
    assert isinstance(config.engine, EndpointConfig)
    return config.engine


def _target(engine: EndpointConfig, model: str) -> Target:
    url = urllib.parse.urlsplit(engine.url)
    try:
        sound = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # a port that is no number
        sound = False
    sound = sound and engine.url.isprintable() and " " not in engine.url
    if not sound or url.query or url.fragment or url.username is not None:
        raise ConfigError(f"engine.url: got {engine.url!r}; accepted is http://HOST:PORT or https://HOST")
    key = None
    if engine.api_key_env is not None:
        key = os.environ.get(engine.api_key_env)
        if not key:
            raise ConfigError(f"engine.api_key_env: got {engine.api_key_env}; there is no such environment variable")
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"engine.api_key_env: the value of {engine.api_key_env} cannot stand in an HTTP header")
    return Target(engine.url.rstrip("/").removesuffix("/v1"), model, key)


def _served(target: Target) -> list[str]:
    """The names of its models; empty where it has no such list."""
    try:
        body = target.get("/v1/models")
    except EngineError as error:
        if "answered 404" in str(error):
            return []
        raise
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"engine.url: nothing answers at {target.base_url} ({reason})") from None
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        raise EngineError(
            f"engine.url: {target.base_url}/v1/models answers with {_start(body)}; is it an OpenAI-compatible API?"
        ) from None


def _require_stream(target: Target, config: Config) -> None:
    """Asks for one token as a stream, the way that the load will."""
    asked: dict[str, Any] = {"model": target.model, "max_tokens": 1, "stream": True}
    if config.client.api == "chat":
        path = "/v1/chat/completions"
        asked["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        path = "/v1/completions"
        asked["prompt"] = "Hello" if config.client.prompt == "text" else [1]
    try:
        body = target.post(path, json.dumps(asked).encode())
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"engine.url: {target.base_url}{path} gives no answer ({reason})") from None
    if not body.lstrip().startswith((b"data:", b":", b"event:")):
        raise EngineError(f"engine.url: {target.base_url}{path} does not stream; it answers with {_start(body)}")


def _start(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    kind = "HTML" if text[:1] == "<" else "JSON" if text[:1] in ("{", "[") else "text"
    return f"{kind}: {text[:100]!r}"


def _metrics(target: Target) -> str | None:
    """vLLM's page of metrics, where it is one and can be read."""
    try:
        page = target.get("/metrics").decode(errors="replace")
    except (EngineError, OSError):
        return None
    return page if "vllm:" in page else None


def _facts(target: Target) -> EngineFacts:
    page = _metrics(target)
    known = EngineFacts() if page is None else vllm.facts_of_page(page)
    if known.block_size and known.num_gpu_blocks:
        known = replace(known, kv_capacity_tokens=known.block_size * known.num_gpu_blocks)
    unknown = []
    if page is None:
        unknown.append("cache hits: no metrics of vLLM there, so only the requests' own usage can tell of them")
        unknown.append("KV capacity: whether the workload fits is not known, so hits have an upper bound only")
    if not _resets(target):
        unknown.append("cache state: no reset there, so a round may begin with what an earlier one has cached")
    return replace(known, version=_version(target), unknown=tuple(unknown))


def _resets(target: Target) -> bool:
    try:
        target.post("/reset_prefix_cache")
    except (EngineError, OSError):
        return False
    return True


def _version(target: Target) -> str | None:
    try:
        return str(json.loads(target.get("/version"))["version"])
    except (EngineError, OSError, ValueError, KeyError, TypeError):
        return None
