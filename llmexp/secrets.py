"""What must never be kept or shown: keys, tokens and passwords.

Secrets reach llmexp and its engines by the environment alone. A config is kept with every run, so one that holds a
secret is refused (`named_in`, `held_in`); and what others say, in errors and logs, is cleaned of those that the
environment holds (`redacted`, `mask_file`).
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

HIDDEN = "<secret>"
_SHORTEST = 8  # a shorter value, such as "1", stands in many places for other reasons
_LAST_WORDS = frozenset(
    ["key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth", "pat"]
)  # tokens are counted: VLLM_MAX_TOKENS and long_prefill_token_threshold hold no secret
_ANYWHERE = ("secret", "password", "passwd", "access_key", "private_key", "connection_string")
_KEYS_OF_OURS = frozenset({"study.search_key"})
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)?\s*|\bbearer\s+)[^\s'\",]{4,}")


def is_secret(name: str) -> bool:
    """Whether a variable, argument or key of that name holds a secret, by its words: HF_TOKEN, engine.args.api_key."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower())
    last = plain.rstrip("_").rpartition("_")[2]
    return name not in _KEYS_OF_OURS and (last in _LAST_WORDS or any(part in plain for part in _ANYWHERE))


def of_environment() -> dict[str, str]:
    """The secrets that this process was given, by the names of their variables."""
    return {name: value for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name)}


def redacted(text: str) -> str:
    """The text without the environment's secrets, without users and passwords in URLs, and without credentials in HTTP
    headers."""
    for value in sorted(of_environment().values(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _HEADER.sub(rf"\1{HIDDEN}", _USER_INFO.sub(HIDDEN, text))


def mask_file(path: Path) -> None:
    """Overwrites the environment's secrets in a file by as many asterisks, while others may be appending to it."""
    secrets = [value.encode() for value in of_environment().values()]
    if not secrets or not path.is_file():
        return
    content = path.read_bytes()
    with path.open("r+b") as handle:
        for secret in secrets:
            for found in re.finditer(re.escape(secret), content):
                handle.seek(found.start())
                handle.write(b"*" * len(secret))


def named_in_overrides(overrides: Sequence[str]) -> str | None:
    """The first key on a command line that names a secret; None if none does."""
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if equals and is_secret(key) and value not in ("", "null"):
            return key
    return None


def named_in(settings: Mapping[str, Any]) -> str | None:
    """The first key of a config that names a secret; None if none does."""
    return next((key for key, value in _leaves(settings, "") if is_secret(key) and value not in (None, "")), None)


def held_in(settings: Mapping[str, Any]) -> str | None:
    """Why a config cannot be kept: the first key whose value holds a secret; None if none does."""
    known = of_environment()
    for key, value in _leaves(settings, ""):
        if not isinstance(value, str):
            continue
        for name, secret in known.items():
            if secret in value:
                return f"{key}: holds the value of the environment variable {name}; {KEPT}"
        if _of_url(value):
            return f"{key}: holds a user or password in a URL; {KEPT}: {_ELSEWHERE}"
    return None


KEPT = "a config is kept with every run, so it takes no secret"
_ELSEWHERE = (
    "for an endpoint set engine.api_key_env; for MLflow export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
    "or for its database what that client reads, such as PGPASSWORD"
)


def _of_url(value: str) -> bool:
    if "://" not in value:
        return False
    try:
        url = urlsplit(value)
        asked = parse_qsl(url.query)
    except ValueError:
        return False
    return url.password is not None or any(is_secret(name) for name, _ in asked)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{i}")
    else:
        yield key, value
