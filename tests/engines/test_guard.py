"""Who gets past the guard of a server's endpoints."""

import asyncio
import sys
from typing import Any

import pytest

from llmexp.engines import vllm

KEY = "the-key-of-this-launch"


def status(path: str, *headers: tuple[bytes, bytes], kind: str = "http", monkeypatch: pytest.MonkeyPatch) -> int:
    """What a request gets; 200 from the application behind the guard."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.syspath_prepend(str(vllm.GUARD))
    sys.modules.pop("llmexp_guard", None)
    from llmexp_guard import Guard  # type: ignore[import-not-found]

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    asyncio.run(Guard(application)({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("path", ["/metrics", "/reset_prefix_cache", "/", "/v", "//v1/models", "/V1/models"])
def test_what_vllm_leaves_open_needs_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(path, monkeypatch=monkeypatch) == 401
    assert status(path, (b"authorization", b"Bearer wrong"), monkeypatch=monkeypatch) == 401
    assert status(path, (b"authorization", KEY.encode()), monkeypatch=monkeypatch) == 401
    assert status(path, (b"authorization", f"Bearer {KEY}".encode()), monkeypatch=monkeypatch) == 200


def test_what_vllm_guards_itself_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status("/v1/completions", monkeypatch=monkeypatch) == 200
    assert status("", kind="lifespan", monkeypatch=monkeypatch) == 200


def test_the_users_modules_are_found_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ours = vllm.finds(vllm.GUARD)
    assert vllm._with_own(ours, {"PYTHONPATH": "/theirs", "A": "b"}) == {
        "PYTHONPATH": f"{vllm.GUARD}:/theirs",
        "A": "b",
    }
    assert vllm._with_own({"A": "a"}, {"A": "b"}) == {"A": "b"}
