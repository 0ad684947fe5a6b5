"""One request on its way, and what carries it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True, eq=False)
class Call:
    """One request: the driver starts it, a transport fills in what came back, the ledger keeps it.

    Times are absolute seconds of CLOCK_MONOTONIC. `ready` is when nothing but the client itself kept the
    request back: it was due, and a place under the cap on requests in flight was free.
    """

    index: int
    intended: float
    ready: float
    sent: float = 0.0
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)  # chunks that carried a token
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str | None = None
    logprobs: str | None = None
    engine_times: tuple[float, float, float, float] | None = None  # queued, scheduled, first and last token


class Transport(Protocol):
    """Carries requests. It sets `sent` and all that follows it in a call, and reports each call once."""

    async def open(self, connections: int, finished: Callable[[Call], None]) -> None:
        """Gets ready to carry calls, `connections` of them without the delay of connecting."""

    def body(self, index: int) -> Any:
        """What `send` takes for this request, made ahead of time to keep the work off the critical path."""

    def send(self, call: Call, body: Any) -> None:
        """Sends now, without blocking; `finished(call)` follows, possibly before this returns."""

    def cancel(self, call: Call, error: str) -> None:
        """Ends a call that is under way, with this error; `finished(call)` follows before this returns."""

    async def close(self) -> None:
        """Drops every connection."""
