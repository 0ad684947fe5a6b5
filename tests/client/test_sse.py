import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.client.sse import EventStream, MalformedEventError


def read(pieces: list[bytes]) -> list[bytes]:
    stream = EventStream()
    payloads = [payload for piece in pieces for payload in stream.feed(piece)]
    return payloads + stream.end()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


payloads = st.one_of(
    st.text(st.characters(exclude_characters="\r\n"), max_size=20),
    st.text(max_size=20).map(lambda text: json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)),
)
blocks = st.one_of(
    payloads.map(lambda payload: (["data: " + payload], [payload])),
    payloads.map(lambda payload: (["data:" + payload], [payload.removeprefix(" ")])),
    payloads.map(lambda payload: (["event: chunk", "id: 1", "data: " + payload, "retry: 10"], [payload])),
    st.tuples(payloads, payloads).map(lambda two: (["data: " + two[0], "data: " + two[1]], ["\n".join(two)])),
    st.sampled_from([([": keep-alive"], []), ([":"], []), (["event: ping"], []), ([], []), (["data"], [""])]),
)


@given(st.lists(blocks, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(
    given_blocks: list[tuple[list[str], list[str]]], end: str, places: list[int]
) -> None:
    data = "".join("".join(line + end for line in lines) + end for lines, _ in given_blocks).encode()
    expected = [payload.encode() for _, found in given_blocks for payload in found]
    assert read([data]) == expected
    assert read(cut(data, places)) == expected
    assert read([data[i : i + 1] for i in range(len(data))]) == expected


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n") == []
    assert stream.feed(b"\n") == [b"a"]


def test_a_last_event_without_a_blank_line_is_read_at_the_end() -> None:
    assert read([b"data: a\n\ndata: [DONE]"]) == [b"a", b"[DONE]"]


@pytest.mark.parametrize("garbage", [b"<html>", b"\x00\x01", b'{"text":"a"}', b"datum: a"])
def test_a_line_of_no_field_is_refused_with_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(MalformedEventError, match="no server-sent event") as caught:
        read([b"data: fine\n\n" + garbage + b" " * 500 + b"\n\n"])
    assert repr(garbage)[2:-1] in str(caught.value)
    assert len(str(caught.value)) < 600
