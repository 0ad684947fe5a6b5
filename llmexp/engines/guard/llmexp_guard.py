"""Keeps others off a server's endpoints beside /v1: vLLM asks there for no key, and with them code can be run.

vLLM imports this as `--middleware llmexp_guard.Guard`, from a folder that holds nothing else, by any interpreter.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: what does not begin with /v1, which vLLM guards itself, needs the launch's key too."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/v1") or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def _has_key(self, scope: Message) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
