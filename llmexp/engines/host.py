"""The way into a process that holds an engine: a socket on which a function is sent to it and talked with."""

import contextlib
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Host:
    """The process behind the Unix socket `path` runs whatever is sent there; only its owner can reach it."""

    path: Path

    @contextlib.contextmanager
    def calling(self, function: Callable[..., Awaitable[None]], timeout_s: float | None = None) -> Iterator["Talk"]:
        """Runs `function(engine, talk)` there, found by its name, for as long as the talk lasts.

        Raises OSError if nobody listens, or if an answer takes longer than `timeout_s`.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
            talk = Talk(connection)
            talk.send(function)
            yield talk


class Talk:
    """Our end of a talk, in any picklable values."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """For a selector."""
        return self._connection.fileno()

    def send(self, value: Any) -> None:
        """Raises OSError if the other end is gone."""
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._connection.sendall(LENGTH.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """The next value, once it comes. Raises EOFError if the other end has finished or died."""
        return pickle.loads(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))

    def wait_at_most(self, wait_s: float) -> None:
        """From now on an answer that takes longer raises OSError."""
        self._connection.settimeout(wait_s)

    def _read(self, size: int) -> bytes:
        # Exactly so many bytes and none beyond, so that what still lies there wakes a selector.
        read = bytearray()
        while len(read) < size:
            if not (part := self._connection.recv(min(size - len(read), 1 << 20))):
                raise EOFError
            read += part
        return bytes(read)
