"""The golden server with a notebook that outlives it: a line `RESETS END_S` for each request it has answered whole."""

import asyncio
import threading
import time
from pathlib import Path

from tests.golden.server import Behaviour, GoldenServer, Seen


class Watched(GoldenServer):
    """Serves on `port`, and puts its notes into a file."""

    def __init__(self, behaviour: Behaviour, port: int, notes: Path) -> None:
        self._notes = notes.open("a", buffering=1)
        super().__init__(behaviour, port)

    def hold(self, gate: threading.Event) -> None:
        """Answers nobody until the gate opens."""
        self._loop.call_soon_threadsafe(gate.wait)

    def _plain(self, method: str, path: str) -> tuple[str, str, str]:
        if path == "/version":
            return "200 OK", "application/json", '{"version": "0.32.0"}'
        return super()._plain(method, path)

    async def _complete(
        self, seen: Seen, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        goes_on = await super()._complete(seen, number, reader, writer)
        if len(seen.sent_s) == seen.body["max_tokens"]:
            self._notes.write(f"{self.resets} {time.monotonic()}\n")
        return goes_on
