"""Every fault of the golden server, through both transports where both can meet it."""

from typing import Any

import pytest

from llmexp.schema.load import ClosedLoop
from tests.client.sending import CLOSE_S, by_request, lateness_s, numbered, said, send
from tests.golden.server import golden_server

# Faults that leave the answer whole.
HARMLESS = [
    "empty_first",
    "keep_alive",
    "finish_apart",
    "textless_end",
    "crlf",
    "shredded",
    "one_write",
    "until_close",
    "connection_close",
    "slow_accept",
]
# Faults that fail their request alone, and what its error says.
FATAL = {
    "close": "closed the connection 2 token chunks into its answer",
    "no_done": "ended without a finish reason",
    "error_event": "the engine gave up",
    "malformed": 'no chunk of a completion: \'{"choices":[{"index":0,"text":" half a chu',
    "garbage": r"no server-sent event: '\x00\x01 not an event'",
    "no_http": "no HTTP response",
    "429": 'HTTP 429: \'{"error":{"message":"slow down"}}',
    "500": "HTTP 500: 'the engine is dead'",
    "html": "answered with 'text/html', no event stream: '<!doctype html><title>A login page",
    "json": "answered with 'application/json', no event stream",
    "gzip": "compressed answer ('gzip')",
}


@pytest.mark.parametrize("fault", HARMLESS)
def test_a_harmless_fault_changes_nothing_in_the_trace(fault: Any) -> None:
    load = ClosedLoop(concurrency=1 if fault == "shredded" else 3)  # 800 writes take the server a while
    with golden_server(fault=fault, ttft_s=0.04, itl_s=0.02, accept_delay_s=0.1) as server:
        found = send(server, numbered(3, output_tokens=4), load)
    trace = found.trace
    assert trace["error"].to_pylist() == [None] * 3
    assert trace["output_tokens"].to_pylist() == [4] * 3
    assert trace["finish_reason"].to_pylist() == ["length"] * 3
    late_s = lateness_s(found, by_request(server))
    assert late_s.shape == (3, 4)
    assert (late_s > 0).all()
    if fault != "one_write":  # which sends all at the end
        assert (late_s.min(axis=0) < CLOSE_S).all()


@pytest.mark.parametrize("fault", FATAL)
def test_a_fatal_fault_fails_its_request_alone(fault: Any) -> None:
    with golden_server(fault=fault, fault_requests=frozenset({1, 4})) as server:
        found = send(server, numbered(7))
    errors = found.trace["error"].to_pylist()
    assert [i for i, error in enumerate(errors) if error] == [1, 4]
    assert FATAL[fault] in errors[1] and FATAL[fault] in errors[4]
    assert len(server.seen) == 7  # nothing was sent a second time


@pytest.mark.parametrize("fault", ["close", "no_done", "error_event", "malformed", "429", "500"])
def test_the_reference_fails_the_same_requests(fault: Any) -> None:
    with golden_server(fault=fault, fault_requests=frozenset({1})) as server:
        found = send(server, numbered(3), client={"transport": "openai"})
    errors = found.trace["error"].to_pylist()
    assert [i for i, error in enumerate(errors) if error] == [1]
    assert len(server.seen) == 3


@pytest.mark.parametrize("transport", ["lean", "openai"])
def test_a_role_is_no_token_and_reasoning_is(transport: str) -> None:
    workload = numbered(2, columns={"messages": [said("a"), said("b")]})
    client = {"api": "chat", "transport": transport}
    for fault in ("role_only", "reasoning"):
        with golden_server(fault=fault, ttft_s=0.2) as server:
            found = send(server, workload, client=client)
        for row, seen in zip(found.trace.to_pylist(), server.seen, strict=True):
            assert row["error"] is None
            assert len(row["chunk_s"]) == 4
            assert row["first_token_s"] + found.origin_monotonic_s > seen.sent_s[0]
            assert row["first_token_s"] - row["sent_s"] > 0.19


@pytest.mark.parametrize("transport", ["lean", "openai"])
def test_bundled_tokens_are_known_from_usage(transport: str) -> None:
    with golden_server(fault="bundled", bundle=3) as server:
        row = send(server, numbered(1, output_tokens=9), client={"transport": transport}).trace.to_pylist()[0]
    assert len(row["chunk_s"]) == 3
    assert row["output_tokens"] == 9


@pytest.mark.parametrize("transport", ["lean", "openai"])
def test_missing_usage_is_unknown_and_no_count_of_chunks(transport: str) -> None:
    with golden_server(fault="missing_usage") as server:
        row = send(server, numbered(1), client={"transport": transport}).trace.to_pylist()[0]
    assert (row["error"], row["finish_reason"]) == (None, "length")
    assert row["output_tokens"] is row["prompt_tokens"] is row["cached_tokens"] is None


@pytest.mark.parametrize("transport", ["lean", "openai"])
def test_a_stalled_request_times_out_alone(transport: str) -> None:
    with golden_server(fault="stall", fault_requests=frozenset({1})) as server:
        client = {"timeout_s": 3.0, "transport": transport}
        found = send(server, numbered(3), client=client)
    rows = found.trace.to_pylist()
    assert [row["error"] for row in rows] == [None, rows[1]["error"], None]
    assert "client.timeout_s=3" in rows[1]["error"]
    assert len(rows[1]["chunk_s"]) == 2  # what came before is kept
    assert 3.0 <= rows[1]["end_s"] - rows[1]["intended_s"] < 6.0


def test_a_request_that_waits_too_long_in_the_client_is_not_sent() -> None:
    from llmexp.schema.load import Constant

    with golden_server(fault="stall") as server:
        load = Constant(rate=1000.0, max_in_flight=1)
        found = send(server, numbered(3), load, {"timeout_s": 2.0})
    errors = found.trace["error"].to_pylist()
    assert "no complete answer" in errors[0]
    assert len(server.seen) < 3
    assert sum("not sent" in error for error in errors) == 3 - len(server.seen)


def test_a_server_that_is_not_there_fails_every_request_by_its_url() -> None:
    errors = send("http://127.0.0.1:9", numbered(3)).trace["error"].to_pylist()
    assert all("cannot connect to http://127.0.0.1:9" in error for error in errors)


def test_connections_are_reused_and_replaced() -> None:
    with golden_server(ttft_s=0.01) as server:
        send(server, numbered(20), ClosedLoop(concurrency=4))
        assert server.connections == 4
    with golden_server(fault="connection_close") as server:
        send(server, numbered(5))
        assert server.connections == 5
