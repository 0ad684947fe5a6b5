"""The lean transport's reading of HTTP, fed byte streams that are cut anywhere."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmexp.client.call import Call
from llmexp.client.lean import LeanTransport, _Connection

TEXTS = [" a", "", ' "text":"', "é", " \r\n\n", " z"]
EVENTS = b"".join(
    [
        b": hello\n\n",
        *(
            b"data: "
            + json.dumps(
                {"choices": [{"index": 0, "text": text, "finish_reason": "stop" if text == " z" else None}]},
                separators=(",", ":"),
                ensure_ascii=False,
            ).encode()
            + b"\n\n"
            for text in TEXTS
        ),
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n',
        b"data: [DONE]\n\n",
    ]
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


class _Socket:
    """In the place of uvloop's transport."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


def receive(pieces: list[bytes], *, close: bool = False) -> tuple[Call, bool, int]:
    """The call after these reads, whether its connection is kept, and how often it was reported."""
    reports: list[Call] = []
    owner = LeanTransport("http://h", api="completions", api_key=None, keep_text=False, make_body=lambda i: b"")
    owner._finished = reports.append
    call = Call(0, 0.0, 0.0)
    connection = owner._busy[0] = _Connection(owner, call)
    socket: Any = _Socket()
    connection.connection_made(socket)
    for piece in pieces:
        connection.data_received(piece)
    if close:
        connection.connection_lost(None)
    return call, connection in owner._idle and not socket.aborted, len(reports)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds) if b > a]


def chunked(data: bytes, places: list[int]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(data, places)) + b"0\r\n\r\n"


places = st.lists(st.integers(0), max_size=20)


@given(
    framing=st.sampled_from(["chunked", "length", "close", "connection: close"]),
    chunks=places,
    reads=places,
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    interim=st.booleans(),
)
def test_an_answer_reads_the_same_however_it_is_framed_and_cut(
    framing: str, chunks: list[int], reads: list[int], line_end: bytes, interim: bool
) -> None:
    events = EVENTS.replace(b"\n", line_end)
    if framing in ("chunked", "connection: close"):
        closing = b"Connection: close\r\n" if framing == "connection: close" else b""
        data = HEAD + closing + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(events, chunks)
    elif framing == "length":
        data = HEAD + b"Content-Length: %d\r\n\r\n" % len(events) + events
    else:
        data = HEAD + b"\r\n" + events
    if interim:
        data = b"HTTP/1.1 100 Continue\r\n\r\n" + data
    call, kept, reports = receive(cut(data, reads), close=framing == "close")
    assert call.error is None
    assert len(call.chunks) == 5  # all texts but the empty one
    assert (call.prompt_tokens, call.output_tokens, call.finish_reason) == (9, 5, "stop")
    assert kept == (framing in ("chunked", "length"))
    assert reports == 1


@given(whole=st.sampled_from(["chunked", "length"]), at=st.integers(0), reads=places)
def test_an_answer_cut_short_is_an_error_wherever_it_ends(whole: str, at: int, reads: list[int]) -> None:
    if whole == "chunked":
        data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, [50, 100, 333])
    else:
        data = HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS
    call, kept, reports = receive(cut(data[: at % len(data)], reads), close=True)
    assert call.error is not None and "closed the connection" in call.error
    assert not kept and reports == 1


@given(st.binary(min_size=1, max_size=300), places)
def test_no_bytes_break_the_client(data: bytes, reads: list[int]) -> None:
    for head in (b"", HEAD + b"\r\n"):
        call, kept, reports = receive(cut(head + data, reads), close=True)
        assert reports == 1
        assert call.error is not None
        assert not kept


def test_bytes_after_an_answer_cost_the_connection_and_not_the_answer() -> None:
    answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS
    for more in (b"garbage", answer):
        call, kept, reports = receive([answer + more])
        assert (call.error, len(call.chunks), reports) == (None, 5, 1)
        assert not kept
        call, kept, reports = receive([answer, more])
        assert (call.error, len(call.chunks), reports) == (None, 5, 1)
        assert not kept
