import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.client.call import Call
from llmexp.client.reading import Reading
from llmexp.client.sse import MalformedEventError

Api = Literal["completions", "chat"]


def read(api: Api, *payloads: Any, keep_text: bool = False) -> Call:
    """The call after these payloads, which arrive at 1, 2, 3, …"""
    call = Call(0, 0.0, 0.0)
    reading = Reading(call, api, keep_text)
    for now, payload in enumerate(payloads, start=1):
        content = payload if isinstance(payload, bytes) else json.dumps(payload, separators=(",", ":")).encode()
        reading.event(content, float(now))
    reading.end()
    return call


def completion(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, **more}
    return {
        "id": "c",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": None,
    }


def chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return {"id": "c", "choices": [], "usage": counts}


DONE = b"[DONE]"


def test_a_plain_completion() -> None:
    call = read("completions", completion(" a"), completion(" b", "length"), usage(7, 2, 4), DONE)
    assert (call.chunks, call.finish_reason, call.error) == ([1.0, 2.0], "length", None)
    assert (call.prompt_tokens, call.output_tokens, call.cached_tokens) == (7, 2, 4)


def test_chunks_that_carry_no_token() -> None:
    call = read(
        "chat",
        chat({"role": "assistant", "content": ""}),
        chat({"role": "assistant"}),
        chat({"content": ""}),
        chat({"content": None}),
        chat({}),
        chat({"content": "a"}),
        chat({"content": "b"}),
        chat({}, "stop"),
        usage(1, 2),
        DONE,
    )
    assert call.chunks == [6.0, 7.0]


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"role": "assistant", "content": "x"},
        {"reasoning": "x"},
        {"reasoning_content": "x", "content": None},
        {"refusal": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]},
    ],
)
def test_deltas_that_carry_a_token(delta: dict[str, Any]) -> None:
    assert read("chat", chat(delta), chat({"content": "b"}, "stop"), usage(1, 2), DONE).chunks == [1.0, 2.0]


def test_token_ids_show_a_token_without_text() -> None:
    assert read("completions", completion("", token_ids=[5]), completion("b", "stop"), DONE).chunks == [
        1.0,
        2.0,
    ]


def test_usage_tells_that_the_last_chunk_carried_a_token_without_text() -> None:
    assert read("completions", completion("a"), completion("", "length"), usage(1, 2), DONE).chunks == [
        1.0,
        2.0,
    ]
    assert read("completions", completion("", "length"), usage(1, 1), DONE).chunks == [1.0]
    # Without a token to account for, it carried none.
    assert read("completions", completion("a"), completion("", "stop"), usage(1, 1), DONE).chunks == [1.0]
    assert read("completions", completion("a"), completion("", "stop"), DONE).chunks == [1.0]


def test_empty_text_carries_a_token_where_the_usage_counts_one_for_each() -> None:
    """vLLM sends a chunk for every token; one that completes no character has no text."""
    half = [completion(""), completion("é"), completion(""), completion(""), completion("c", "length")]
    assert read("completions", *half, usage(1, 5), DONE).chunks == [1.0, 2.0, 3.0, 4.0, 5.0]
    # Bundled tokens beside an empty chunk: the usage does not tell which chunk carried what.
    assert read("completions", *half, usage(1, 9), DONE).chunks == [2.0, 5.0]
    spoken = [chat({"role": "assistant", "content": ""}), chat({"content": ""}), chat({"content": "é"}, "stop")]
    assert read("chat", *spoken, usage(1, 2), DONE).chunks == [2.0, 3.0]


def test_usage_may_come_with_every_chunk() -> None:
    chunks = [
        completion(text) | {"usage": {"prompt_tokens": 3, "completion_tokens": n}} for n, text in ((1, "a"), (2, "b"))
    ]
    call = read("completions", *chunks, DONE)
    assert (call.chunks, call.output_tokens, call.prompt_tokens) == ([1.0, 2.0], 2, 3)


@given(st.text(min_size=1))
def test_no_generated_text_is_mistaken_for_structure(text: str) -> None:
    for hostile in (
        text,
        text + '"text":"',
        '"finish_reason":"stop"' + text,
        '"usage":{' + text,
        '"error":{}',
    ):
        call = read("completions", completion(hostile), completion("", None), completion("z", "stop"), DONE)
        assert (call.chunks, call.finish_reason, call.error) == ([1.0, 3.0], "stop", None)
        call = read("chat", chat({"content": hostile}), chat({"content": ""}), chat({}, "stop"), DONE)
        assert (call.chunks, call.error) == ([1.0], None)


def test_spaced_json_is_read_as_well() -> None:
    spaced = json.dumps(completion("a")).encode(), json.dumps(completion("")).encode()
    assert read("completions", *spaced, json.dumps(completion("b", "stop")).encode(), DONE).chunks == [
        1.0,
        3.0,
    ]


def test_text_and_the_first_tokens_alternatives_are_kept_where_asked() -> None:
    logprobs = [{"tokens": [t], "top_logprobs": [{t: -0.5, "other": -2.0}]} for t in "ab"]
    call = read(
        "completions",
        completion("a", logprobs=logprobs[0]),
        completion("b", "length", logprobs=logprobs[1]),
        DONE,
        keep_text=True,
    )
    assert call.text == "ab"
    assert json.loads(call.logprobs or "") == {"a": -0.5, "other": -2.0}
    assert read("completions", completion("a", "stop"), DONE).text is None


def test_chat_alternatives_are_kept_too() -> None:
    chunk = chat({"content": "a"}, "stop")
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    chunk["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}
    assert json.loads(read("chat", chunk, DONE, keep_text=True).logprobs or "") == {"a": -0.5, "b": -1.5}


def test_an_error_in_the_stream_is_the_calls() -> None:
    call = read("completions", completion("a"), {"error": {"message": "out of memory"}})
    assert call.error is not None and "out of memory" in call.error


def test_a_stream_without_an_end_is_an_error() -> None:
    call = read("completions", completion("a"), completion("b"))
    assert call.error is not None and "2 chunks" in call.error


@pytest.mark.parametrize(
    "payload",
    [
        b"nonsense",
        b"{}",
        b"[]",
        b"7",
        b'{"choices":[{"index":0,"text":"',
        b'{"choices":[{"index":0,"text":"a","finish_reason":null',
        b'{"choices":7}',
        b'{"choices":[],"usage":{"x":1}}',
    ],
)
def test_what_is_no_chunk_is_refused_with_its_first_bytes(payload: bytes) -> None:
    with pytest.raises(MalformedEventError, match="no chunk of a completion") as caught:
        read("completions", payload)
    assert repr(payload)[2:-1] in str(caught.value)


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [], "usage": {"prompt_tokens": 10**12}},
        {"choices": [], "usage": {"prompt_tokens": "many"}},
        {"choices": [], "usage": {"prompt_tokens": -1}},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2**40}},
        {"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": "all"}}},
        completion("a", finish={"reason": "stop"}),  # type: ignore[arg-type]
        completion(7),  # type: ignore[arg-type]
        completion("a", logprobs={"top_logprobs": [{"a": "likely"}]}),
    ],
)
def test_values_that_no_trace_can_hold_are_refused(chunk: dict[str, Any]) -> None:
    with pytest.raises(MalformedEventError):
        read("completions", chunk, keep_text=True)
