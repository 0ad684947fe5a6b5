"""The golden server with a notebook that outlives it: a line for each request it has answered whole."""

import asyncio
import threading
import time
from pathlib import Path

from tests.golden.server import Behaviour, GoldenServer, Seen


class Watched(GoldenServer):
    """Serves on `port`. A line of `notes` has the number of resets before a request, its place since, and its end."""

    def __init__(self, behaviour: Behaviour, port: int, notes: Path) -> None:
        self._first = 0
        self._notes = notes.open("a", buffering=1)
        super().__init__(behaviour, port)

    def hold(self, gate: threading.Event) -> None:
        """Answers nobody until the gate opens."""
        self._loop.call_soon_threadsafe(gate.wait)

    def _plain(self, method: str, path: str) -> tuple[str, str, str]:
        if path == "/version":
            return "200 OK", "application/json", '{"version": "0.32.0"}'
        if path == "/reset_prefix_cache":
            self._first = len(self.seen)
        return super()._plain(method, path)

    async def _complete(
        self, seen: Seen, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        goes_on = await super()._complete(seen, number, reader, writer)
        if len(seen.sent_s) == seen.body["max_tokens"]:
            self._notes.write(f"{self.resets} {number - self._first} {time.monotonic()}\n")
        return goes_on
