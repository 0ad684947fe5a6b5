"""The lean transport: HTTP/1.1 on uvloop, parsed by llhttp; one protocol object a connection, and no task a
request."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools

from llmexp.client.call import Call
from llmexp.client.reading import Reading
from llmexp.client.sse import EventStream, MalformedEventError, shown

# Servers close a connection that idles (uvicorn under vLLM: 5 s). One about to be closed is not reused.
REUSE_WITHIN_S = 2.0
_SHOWN_BYTES = 4096  # of a body that is no event stream


class LeanTransport:
    """See `llmexp.client.call.Transport`. `make_body(index)` gives a request's JSON."""

    def __init__(
        self,
        base_url: str,
        *,
        api: Literal["completions", "chat"],
        api_key: str | None,
        keep_text: bool,
        make_body: Callable[[int], bytes],
    ) -> None:
        url = urlsplit(base_url)
        path = url.path.rstrip("/") + ("/v1/completions" if api == "completions" else "/v1/chat/completions")
        secret = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n{secret}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nAccept-Encoding: identity\r\n"
            "Content-Length: "
        ).encode()
        self.api = api
        self.keep_text = keep_text
        self.base_url = base_url
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._tls else 80)
        self._make_body = make_body
        self._address: Any = None
        self._family = socket.AF_INET
        self._idle: list[_Connection] = []
        self._busy: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: Callable[[Call], None] = lambda call: None

    async def open(self, connections: int, finished: Callable[[Call], None]) -> None:
        self._finished = finished
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise OSError(f"cannot find the host of {self.base_url}: {error.strerror}") from None
        for self._family, _, _, _, self._address in found:
            if len(found) == 1 or await self._answers():  # a name may have addresses that nobody listens on
                break
        fresh = [_Connection(self, None) for _ in range(connections)]
        await asyncio.gather(*(self._connect(connection) for connection in fresh))

    def body(self, index: int) -> bytes:
        body = self._make_body(index)
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    def send(self, call: Call, body: bytes) -> None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if monotonic() - connection.idle_since < REUSE_WITHIN_S:
                self._busy[call.index] = connection
                connection.start(call, body)
                return
            connection.drop()
        call.sent = monotonic()
        connection = self._busy[call.index] = _Connection(self, call)
        task = asyncio.get_running_loop().create_task(self._connect(connection, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, call: Call, error: str) -> None:
        self._busy[call.index].fail(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for connection in [*self._idle, *self._busy.values()]:
            connection.drop()
        self._idle.clear()

    def idle(self, connection: "_Connection") -> None:
        """Takes a connection back for reuse."""
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def lost(self, connection: "_Connection") -> None:
        """Forgets a connection that has closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def settled(self, call: Call) -> None:
        """Reports a call whose outcome is known."""
        call.end = monotonic()
        del self._busy[call.index]
        self._finished(call)

    async def _answers(self) -> bool:
        with socket.socket(self._family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, self._address)
            except OSError:
                return False
            return True

    async def _connect(self, connection: "_Connection", body: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, self._address)
            connection.sock = None if self._tls else sock
            tls_host = self._host if self._tls else None
            await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=tls_host)
        except OSError as error:
            sock.close()
            connection.fail(f"cannot connect to {self.base_url}: {error.strerror or error}")
        else:
            if connection.call is not None:
                connection.write(body)
            elif not connection.closed:
                self.idle(connection)


class _Connection(asyncio.Protocol):
    """One connection: sends a request, reads its response, then goes back to the idle ones."""

    def __init__(self, owner: LeanTransport, call: Call | None) -> None:
        self.call = call
        self.sock: socket.socket | None = None  # set where bytes may go straight to the kernel (no TLS)
        self.idle_since = 0.0
        self.closed = False
        self._owner = owner
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._reset(call)

    def _reset(self, call: Call | None) -> None:
        self.call = call
        self._now = 0.0
        self._status = 0
        self._ended = False
        self._reusable = False
        self._content_type = b"unknown content"
        self._refusal = ""  # why the body is no event stream that we read
        self._refused_body = b""
        self._delimited = False  # the body has a length or chunks; else it ends with the connection
        if call is not None:
            self._events = EventStream()
            self._reading = Reading(call, self._owner.api, self._owner.keep_text)

    def start(self, call: Call, body: bytes) -> None:
        """Sends a request on this idle connection."""
        self._reset(call)
        call.sent = monotonic()
        self.write(body)

    def write(self, body: bytes) -> None:
        """Hands bytes to the kernel at once if possible; the loop would first serve other connections."""
        sent = 0
        if self.sock is not None and self._transport.get_write_buffer_size() == 0:
            try:
                sent = self.sock.send(body)
            except BlockingIOError:
                pass
            except OSError as error:
                self.fail(f"cannot send: {error.strerror or error}")
                return
        if sent < len(body):
            self._transport.write(body[sent:] if sent else body)

    def fail(self, error: str) -> None:
        """Ends the call with an error, and the connection with it."""
        call, self.call = self.call, None
        self.drop()
        if call is not None:
            call.error = error
            self._owner.settled(call)

    def drop(self) -> None:
        """Closes the connection, without a goodbye."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self.closed:  # given up while connecting
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._now = monotonic()
        if self.call is None:
            self._owner.lost(self)
            self.drop()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.closed = True
            if not self._ended:
                self.fail(f"no HTTP response ({error}): {shown(data)}")
        if self._ended and self.call is not None:
            self._complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._owner.lost(self)
        call = self.call
        if call is None:
            return
        if exc is None and self._status and not self._delimited:
            self._complete()
        else:
            why = f" ({exc})" if exc else ""
            stage = f"{len(call.chunks)} token chunks into its answer" if self._status else "before it answered"
            self.fail(f"the server closed the connection {stage}{why}")

    # httptools. What follows a complete answer is not ours: it costs the connection.

    def on_message_begin(self) -> None:
        self.closed = self.closed or self._ended

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._ended:
            return
        name = name.lower()
        if name == b"content-type":
            self._content_type = value
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._refusal = f"compressed answer ({shown(value)}), although identity was asked for"
        elif name in (b"content-length", b"transfer-encoding"):
            self._delimited = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._ended:  # an interim answer
            return
        self._status = status
        if status != 200:
            self._refusal = f"HTTP {status}"
        elif not self._refusal and not self._content_type.startswith(b"text/event-stream"):
            self._refusal = f"{self._owner.base_url} answered with {shown(self._content_type)}, no event stream"

    def on_body(self, body: bytes) -> None:
        if self._ended:
            return
        if self._refusal:
            if len(self._refused_body) < _SHOWN_BYTES:
                self._refused_body += body
            return
        if self.call is None:  # failed earlier in this very read
            return
        event, now = self._reading.event, self._now
        try:
            for payload in self._events.feed(body):
                event(payload, now)
        except MalformedEventError as error:
            self.fail(str(error))

    def on_message_complete(self) -> None:
        if self._status and not self._ended:
            self._ended = True
            self._reusable = self._parser.should_keep_alive()

    def _complete(self) -> None:
        call = self.call
        assert call is not None
        if self._refusal:
            self.fail(f"{self._refusal}: {shown(self._refused_body)}")
            return
        try:
            for payload in self._events.end():
                self._reading.event(payload, self._now)
        except MalformedEventError as error:
            self.fail(str(error))
            return
        self._reading.end()
        self.call = None
        if self.closed or not self._reusable:
            self.drop()
        else:
            self._owner.idle(self)
        self._owner.settled(call)
