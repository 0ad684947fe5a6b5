"""The reference transport: the `openai` package, one task a request. Slow and independent of the lean one."""

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Literal

import openai

from llmexp.client.call import Call
from llmexp.client.reading import Reading
from llmexp.client.sse import shown

_DIRECT: Mapping[str, None] = {"http://": None, "https://": None}  # as the lean one goes, whatever proxy is set


class OpenAITransport:
    """See `llmexp.client.call.Transport`. `make_fields(index)` gives a request's fields."""

    def __init__(
        self,
        base_url: str,
        *,
        api: Literal["completions", "chat"],
        api_key: str | None,
        keep_text: bool,
        make_fields: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._api = api
        self._keep_text = keep_text
        self._make_fields = make_fields
        no_limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=None)
        self._client = openai.AsyncOpenAI(
            base_url=base_url.rstrip("/") + "/v1",
            api_key=api_key or "none",
            max_retries=0,
            timeout=None,
            http_client=openai.DefaultAsyncHttpxClient(limits=no_limits, mounts=_DIRECT),
        )
        resource = self._client.completions if api == "completions" else self._client.chat.completions
        self._post: Callable[..., Any] = resource.create
        self._finished: Callable[[Call], None] = lambda call: None
        self._tasks: dict[int, tuple[asyncio.Task[None], Call]] = {}

    async def open(self, connections: int, finished: Callable[[Call], None]) -> None:
        self._finished = finished  # the package connects when it must

    def body(self, index: int) -> Mapping[str, Any]:
        return self._make_fields(index)

    def send(self, call: Call, body: Mapping[str, Any]) -> None:
        call.sent = monotonic()
        self._tasks[call.index] = asyncio.get_running_loop().create_task(self._exchange(call, body)), call

    def cancel(self, call: Call, error: str) -> None:
        self._tasks[call.index][0].cancel()
        self._settle(call, error)

    async def close(self) -> None:
        await self._client.close()

    async def _exchange(self, call: Call, fields: Mapping[str, Any]) -> None:
        named = {name: fields[name] for name in ("model", "prompt", "messages") if name in fields}
        extra = {name: value for name, value in fields.items() if name not in named and name != "stream"}
        reading = Reading(call, self._api, self._keep_text)
        error = None
        try:
            async with await self._post(**named, stream=True, extra_body=extra) as stream:
                async for chunk in stream:
                    reading.chunk(chunk.model_dump(), monotonic())
            reading.end()
        except openai.APIStatusError as status:
            error = f"HTTP {status.status_code}: {shown(status.response.content)}"
        except openai.APIError as failure:
            error = f"{type(failure).__name__}: {failure}"
        except Exception as failure:  # the package passes on what httpx and its own JSON parser raise
            error = f"{type(failure).__name__}: {failure}"
        self._settle(call, error)

    def _settle(self, call: Call, error: str | None) -> None:
        if self._tasks.pop(call.index, None) is not None:
            call.error = error or call.error
            call.end = monotonic()
            self._finished(call)
