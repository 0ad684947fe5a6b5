"""An OpenAI-compatible streaming server that does exactly what it is told, and remembers when it did it.

It answers `/v1/completions` and `/v1/chat/completions` with a known time to first token, a known time between
tokens, known counts and known usage, or with one of `FAULTS`. Every other route of a vLLM server that llmexp
uses is there too, with vLLM's names.
"""

import asyncio
import json
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Fault = Literal[
    "role_only",  # chat: the first chunk has only a role, and comes half of the TTFT early
    "empty_first",  # the first chunk has empty text, and comes half of the TTFT early
    "keep_alive",  # comments between the chunks
    "bundled",  # `bundle` tokens a chunk
    "reasoning",  # chat: the first half of the tokens is reasoning
    "textless_end",  # the last token has no text: it comes with the finish reason
    "finish_apart",  # the finish reason comes in a chunk of its own, without a token
    "missing_usage",
    "stall",  # nothing more after half of the tokens, and the connection stays open
    "close",  # the connection closes after half of the tokens
    "no_done",  # neither a finish reason nor [DONE], though the response ends in order
    "error_event",  # an error event after half of the tokens
    "malformed",  # an event that is no JSON after half of the tokens
    "garbage",  # bytes that are no event after half of the tokens
    "no_http",  # an answer that is no HTTP
    "429",
    "500",
    "html",  # 200 with a page
    "json",  # 200 with one JSON object: streaming is not supported
    "gzip",  # compressed although identity was asked for
    "crlf",  # lines end with CR LF
    "shredded",  # every byte is sent by itself
    "one_write",  # the whole response in one piece, with its length instead of chunks
    "until_close",  # neither length nor chunks: the body ends with the connection
    "connection_close",  # every response ends its connection
    "slow_accept",  # connections are accepted `accept_delay_s` late
]


@dataclass(frozen=True)
class Behaviour:
    """What the server does. `fault_requests`: which requests have the fault, by arrival (None: all).

    Nothing is answered before `together` requests were in flight at once: what holds then is no matter of speed.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    together: int = 1
    fault: Fault | None = None
    fault_requests: frozenset[int] | None = None
    bundle: int = 2
    accept_delay_s: float = 0.2
    cached_tokens: int = 0
    model: str = "golden"
    reset_succeeds: bool = True
    num_gpu_blocks: int = 1000
    block_size: int = 16
    queue_s: float = 0.0  # what the histogram of queue times reports for each request


@dataclass
class Seen:
    """A request as the server saw it: times of CLOCK_MONOTONIC."""

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    received_s: float
    sent_s: list[float] = field(default_factory=list)  # one a chunk that carried a token
    ended_s: float | None = None


class GoldenServer:
    """Runs in a thread of the test's process; see `golden_server`."""

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        self.behaviour = behaviour
        self.seen: list[Seen] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.connections = 0
        self.resets = 0
        self._socket = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._socket.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _accept(self) -> None:
        serving = set()
        while True:
            if self.behaviour.fault == "slow_accept":
                await asyncio.sleep(self.behaviour.accept_delay_s)
            connection, _ = await self._loop.sock_accept(self._socket)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader, writer = await asyncio.open_connection(sock=connection)
            task = self._loop.create_task(self._serve(reader, writer))
            serving.add(task)
            task.add_done_callback(serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request; whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received_s = time.monotonic()
        request_line, *lines = head.strip().split("\r\n")
        method, path, _ = request_line.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            seen = Seen(path, headers, json.loads(content), received_s)
            number = len(self.seen)
            self.seen.append(seen)
            self.in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            try:
                return await self._complete(seen, number, reader, writer)
            finally:
                self.in_flight -= 1
                seen.ended_s = time.monotonic()
        status, kind, answer = self._plain(method, path)
        writer.write(_response(status, kind, answer.encode()))
        await writer.drain()
        return True

    def _plain(self, method: str, path: str) -> tuple[str, str, str]:
        match method, path:
            case "GET", "/health":
                return "200 OK", "text/plain", ""
            case "GET", "/v1/models":
                model = {"id": self.behaviour.model, "object": "model", "max_model_len": 1 << 20}
                return "200 OK", "application/json", json.dumps({"object": "list", "data": [model]})
            case "POST", "/reset_prefix_cache":
                self.resets += 1
                return "200 OK", "application/json", json.dumps({"success": self.behaviour.reset_succeeds})
            case "GET", "/metrics":
                return "200 OK", "text/plain; version=0.0.4", self._metrics()
        return "404 Not Found", "application/json", json.dumps({"detail": "Not Found"})

    def _metrics(self) -> str:
        b = self.behaviour
        queries = sum(_prompt_tokens(seen) for seen in self.seen)
        hits = b.cached_tokens * len(self.seen)
        label = f'{{engine="0",model_name="{b.model}"}}'
        n = sum(seen.ended_s is not None for seen in self.seen)
        lines = [
            f"vllm:prefix_cache_queries_total{label} {queries}",
            f"vllm:prefix_cache_hits_total{label} {hits}",
            f"vllm:kv_cache_usage_perc{label} {min(self.in_flight / b.num_gpu_blocks, 1.0)}",
            f"vllm:num_requests_running{label} {self.in_flight}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:num_preemptions_total{label} 0",
            f'vllm:cache_config_info{{block_size="{b.block_size}",num_gpu_blocks="{b.num_gpu_blocks}"}} 1',
            *(
                f'vllm:request_queue_time_seconds_bucket{{engine="0",le="{le}",model_name="{b.model}"}} '
                f"{n if b.queue_s <= float(le) else 0}"
                for le in ("0.3", "0.5", "0.8", "1.0", "+Inf")
            ),
            f"vllm:request_queue_time_seconds_count{label} {n}",
            f"vllm:request_queue_time_seconds_sum{label} {n * b.queue_s}",
        ]
        return "\n".join([*lines, ""])

    async def _complete(
        self, seen: Seen, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        b = self.behaviour
        while self.max_in_flight < b.together:
            await asyncio.sleep(0.001)
        affected = b.fault_requests is None or number in b.fault_requests
        fault = b.fault if affected else None
        if fault in _WHOLE_ANSWERS:
            writer.write(_WHOLE_ANSWERS[fault])
            await writer.drain()
            return fault != "no_http"
        body = _Body(writer, fault)
        body.open()
        async for token, event in self._events(seen, fault):
            if token:
                seen.sent_s.append(time.monotonic())  # before, since afterwards another process may run first
            await body.write(event)
        if fault == "stall":
            await reader.read()  # until the client gives up
            return False
        if fault == "close":
            writer.close()
            return False
        await body.close()
        return fault not in ("until_close", "connection_close")

    async def _events(self, seen: Seen, fault: Fault | None) -> AsyncIterator[tuple[bool, bytes]]:
        """The answer's events when they are due, and whether each carries a token."""
        b = self.behaviour
        chat = "chat" in seen.path
        n = int(seen.body["max_tokens"])
        halfway = (n + 1) // 2
        per_chunk = b.bundle if fault == "bundled" else 1
        if fault == "role_only" or fault == "empty_first":
            await _until(seen.received_s + b.ttft_s / 2)
            yield False, self._chunk(chat, "", role=fault == "role_only")
        for k, at in enumerate(range(0, n, per_chunk)):
            await _until(seen.received_s + b.ttft_s + k * b.itl_s)
            if fault == "keep_alive":
                yield False, b": keep-alive\n\n"
            if at >= halfway and fault in ("stall", "close"):
                return
            if at >= halfway and fault in _INTERRUPTIONS:
                yield False, _INTERRUPTIONS[fault]
                if fault == "error_event":
                    return
            last = at + per_chunk >= n
            text = "".join(f' t"{i}' for i in range(at, min(at + per_chunk, n)))
            if last and fault == "textless_end":
                text = ""
            finish = "length" if last and fault not in ("finish_apart", "no_done") else None
            yield (
                True,
                self._chunk(chat, text, finish=finish, reasoning=fault == "reasoning" and at < halfway),
            )
        if fault == "no_done":
            return
        if fault == "finish_apart":
            yield False, self._chunk(chat, "", finish="length")
        if fault != "missing_usage":
            yield False, self._chunk(chat, None, usage=(_prompt_tokens(seen), n))
        yield False, b"data: [DONE]\n\n"

    def _chunk(
        self,
        chat: bool,
        text: str | None,
        *,
        role: bool = False,
        finish: str | None = None,
        reasoning: bool = False,
        usage: tuple[int, int] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if chat:
            delta: dict[str, Any] = {"reasoning_content": text} if reasoning else {"content": text}
            choice["delta"] = {"role": "assistant", **delta} if role else delta
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish}
        chunk = {
            "id": "cmpl-0",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 0,
            "model": self.behaviour.model,
            "choices": [] if text is None else [choice],
            "usage": None,
        }
        if usage is not None:
            prompt, output = usage
            details = {"cached_tokens": self.behaviour.cached_tokens}
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": details,
            }
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


@contextmanager
def golden_server(**behaviour: Any) -> Iterator[GoldenServer]:
    """Serves with this `Behaviour` while the context lasts."""
    server = GoldenServer(Behaviour(**behaviour))
    try:
        yield server
    finally:
        server.stop()


class _Body:
    """A response to a streaming request, on its way out in the manner that the fault asks for."""

    def __init__(self, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        self._writer = writer
        self._fault = fault
        self._held = b""

    def open(self) -> None:
        if self._fault != "one_write":
            framing = "" if self._fault == "until_close" else "Transfer-Encoding: chunked\r\n"
            end = "Connection: close\r\n" if self._fault in ("until_close", "connection_close") else ""
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n{framing}{end}\r\n"
            self._writer.write(head.encode())

    async def write(self, event: bytes) -> None:
        if self._fault == "crlf":
            event = event.replace(b"\n", b"\r\n")
        if self._fault == "one_write":
            self._held += event
            return
        if self._fault != "until_close":
            event = b"%x\r\n%b\r\n" % (len(event), event)
        await self._send(event)

    async def close(self) -> None:
        if self._fault == "one_write":
            await self._send(_response("200 OK", "text/event-stream", self._held))
        elif self._fault != "until_close":
            await self._send(b"0\r\n\r\n")

    async def _send(self, data: bytes) -> None:
        for piece in [data[i : i + 1] for i in range(len(data))] if self._fault == "shredded" else [data]:
            self._writer.write(piece)
            await self._writer.drain()
            if self._fault == "shredded":
                await asyncio.sleep(0)


def _response(status: str, kind: str, content: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


_GZIPPED = zlib.compress(b"data: [DONE]\n\n", wbits=31)
_WHOLE_ANSWERS = {
    "429": _response("429 Too Many Requests", "application/json", b'{"error":{"message":"slow down"}}'),
    "500": _response("500 Internal Server Error", "text/plain", b"the engine is dead"),
    "html": _response("200 OK", "text/html", b"<!doctype html><title>A login page</title>"),
    "json": _response("200 OK", "application/json", b'{"choices":[{"text":"all at once"}]}'),
    "gzip": _response("200 OK", "text/event-stream", _GZIPPED, "Content-Encoding: gzip\r\n"),
    "no_http": b"SSH-2.0-OpenSSH_9.2\r\n",
}
_INTERRUPTIONS = {
    "error_event": b'data: {"error":{"message":"the engine gave up","code":500}}\n\n',
    "malformed": b'data: {"choices":[{"index":0,"text":" half a chu\n\n',
    "garbage": b"\x00\x01 not an event\n\n",
}


def _prompt_tokens(seen: Seen) -> int:
    prompt = seen.body.get("prompt", seen.body.get("messages"))
    return len(prompt) if isinstance(prompt, list) and "prompt" in seen.body else len(str(prompt).split())


async def _until(at: float) -> None:
    delay = at - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)
