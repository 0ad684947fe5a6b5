import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from llmexp.client.records import TRACE_SCHEMA
from llmexp.errors import ConfigError, EngineError
from llmexp.schema.load import ClosedLoop, Constant, Poisson, Trace
from tests.client.sending import CLOSE_S, by_request, lateness_s, numbered, said, send
from tests.family import command_line, descendants, left
from tests.golden.server import GoldenServer, golden_server
from tests.waiting import PATIENCE_S, meanwhile, until

TRANSPORTS = ("lean", "openai")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_trace_tells_what_the_server_did(transport: str, api: str) -> None:
    workload = numbered(6, columns={"messages": [said(f"request {i}") for i in range(6)]})
    with golden_server(ttft_s=0.03, itl_s=0.01, together=2, cached_tokens=3) as server:
        client = {"transport": transport, "api": api}
        found = send(server, workload, ClosedLoop(concurrency=2), client, stall_timeout_s=PATIENCE_S)
    trace = found.trace
    assert trace.schema == TRACE_SCHEMA
    assert found.complete
    assert trace["request"].to_pylist() == list(range(6))
    assert trace["error"].to_pylist() == [None] * 6
    assert trace["finish_reason"].to_pylist() == ["length"] * 6
    assert trace["output_tokens"].to_pylist() == [4] * 6
    assert trace["cached_tokens"].to_pylist() == [3] * 6
    if api == "completions":
        assert trace["prompt_tokens"].to_pylist() == [5] * 6
        seen = by_request(server)
    else:
        seen = {int(s.body["messages"][0]["content"].split()[1]): s for s in server.seen}
    late_s = lateness_s(found, seen)
    assert late_s.shape == (6, 4)
    assert (late_s > 0).all() and (late_s.min(axis=0) < CLOSE_S).all()
    for row in trace.to_pylist():
        assert row["first_token_s"] == row["chunk_s"][0]
        assert row["last_token_s"] == row["chunk_s"][-1]
        assert row["intended_s"] <= row["sent_s"] <= row["first_token_s"] <= row["last_token_s"] <= row["end_s"]
    assert server.max_in_flight == 2
    assert found.check.max_in_flight == 2


def test_a_request_holds_what_the_workload_and_the_config_say() -> None:
    workload = numbered(3, columns={"priority": [2, 0, 1]}, request_fields={"logprobs": 5})
    options = {"seed": 11, "temperature": 0.5, "ignore_eos": False}
    with golden_server() as server:
        send(server, workload, client=options)
    assert [seen.body for seen in server.seen] == [
        {
            "model": "golden",
            "prompt": [i] * 5,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "seed": 11,
            "ignore_eos": False,
            "priority": priority,
            "logprobs": 5,
        }
        for i, priority in enumerate([2, 0, 1])
    ]


def test_a_prompt_larger_than_the_sockets_buffers_arrives_whole() -> None:
    with golden_server() as server:
        found = send(server, numbered(2, prompt_tokens=2_000_000))
    assert found.trace["error"].to_pylist() == [None, None]
    assert [seen.body["prompt"] == [i] * 2_000_000 for i, seen in enumerate(server.seen)] == [True, True]


def test_a_name_with_an_address_that_nobody_listens_on_is_reached() -> None:
    # `localhost` is often ::1 first, where a server on 127.0.0.1 does not listen.
    with golden_server() as server:
        found = send(server.url.replace("127.0.0.1", "localhost"), numbered(1))
    assert found.trace["error"].to_pylist() == [None]


def test_both_transports_send_the_same() -> None:
    bodies = {}
    for transport in TRANSPORTS:
        with golden_server() as server:
            send(server, numbered(2, columns={"priority": [1, 2]}), client={"transport": transport})
            bodies[transport] = [seen.body for seen in server.seen]
    assert bodies["lean"] == bodies["openai"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_proxy_of_the_shell_is_not_asked(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with golden_server() as server:
        found = send(server, numbered(1), client={"transport": transport})
    assert found.trace["error"].to_pylist() == [None]


def test_text_is_sent_where_asked_and_refused_where_there_is_none() -> None:
    with golden_server() as server:
        send(server, numbered(1, columns={"prompt_text": ["hello"]}), client={"prompt": "text"})
        assert server.seen[0].body["prompt"] == "hello"
        for options in ({"prompt": "text"}, {"api": "chat"}):
            with pytest.raises(ConfigError, match="numbered has none; mmlu with"):
                send(server, numbered(1), client=options)


def test_chat_sends_the_messages_as_they_are_and_asks_for_logprobs_in_its_own_way() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    workload = numbered(1, columns={"messages": [json.dumps(messages)]}, request_fields={"logprobs": 5})
    with golden_server() as server:
        send(server, workload, client={"api": "chat"})
    (seen,) = server.seen
    assert seen.body["messages"] == messages
    assert (seen.body["logprobs"], seen.body["top_logprobs"]) == (True, 5)
    assert "prompt" not in seen.body


def test_salts_differ_between_requests_and_rounds() -> None:
    with golden_server() as server:
        for index in range(2):
            send(server, numbered(4), round_index=index, salted=True)
    salts = [seen.body["cache_salt"] for seen in server.seen]
    assert len(set(salts)) == 8


def test_the_key_is_sent_and_the_path_kept() -> None:
    from llmexp.client.replay import replay
    from llmexp.engines.target import Target
    from llmexp.schema.load import ClientConfig

    with golden_server() as server:
        target = Target(server.url, "golden", api_key="secret")
        replay(target, numbered(1), ClosedLoop(concurrency=1), ClientConfig(), round_index=0)
        assert server.seen[0].headers["authorization"] == "Bearer secret"
        found = send(server.url + "/prefix/", numbered(1))
    assert "HTTP 404" in found.trace["error"].to_pylist()[0]


def test_text_and_logprobs_reach_the_trace_where_asked() -> None:
    with golden_server() as server:
        kept = send(server, numbered(2, output_tokens=2, keep_text=True)).trace
        plain = send(server, numbered(1)).trace
    assert kept["text"].to_pylist() == [' t"0 t"1'] * 2
    assert plain["text"].to_pylist() == [None]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_closed_loop_keeps_its_concurrency_and_order(workers: int) -> None:
    with golden_server(ttft_s=0.02, together=5) as server:
        found = send(server, numbered(40), ClosedLoop(concurrency=5), {"workers": workers}, stall_timeout_s=PATIENCE_S)
    assert server.max_in_flight == 5
    assert found.check.asked_in_flight == found.check.max_in_flight == 5
    assert found.trace["request"].to_pylist() == list(range(40))
    assert len(set(found.trace["worker"].to_pylist())) == workers
    # Requests start in the workload's order. Of those before one that arrives, only such may be to come as a place is
    # free for (it has one itself), and one that each worker holds ready.
    arrived = np.array([seen.body["prompt"][0] for seen in server.seen])
    to_come = [request - (arrived[:i] < request).sum() for i, request in enumerate(arrived)]
    assert max(to_come) <= 4 + workers
    # A worker's own count begins as it takes a request, somewhere between when it was due and when it was sent.
    sent, end = (found.trace[name].to_numpy() for name in ("sent_s", "end_s"))
    waited_s = (sent - found.trace["intended_s"].to_numpy()).sum()
    assert 1 - 1e-9 <= found.check.littles_law_ratio <= 1 + waited_s / (end - sent).sum()


def test_open_loop_requests_go_when_due_and_count_from_then() -> None:
    with golden_server(together=10) as server:
        found = send(server, numbered(10), Constant(rate=50.0), {"workers": 2}, stall_timeout_s=PATIENCE_S)
    assert found.trace["intended_s"].to_numpy() == pytest.approx(np.arange(10) / 50)
    sent = found.trace["sent_s"].to_numpy()
    assert (sent >= found.trace["intended_s"].to_numpy()).all()
    assert server.max_in_flight == 10  # none waited for another's answer
    assert found.check.intended_rate_per_s == pytest.approx(50)


def test_the_cap_holds_and_the_wait_for_it_is_latency_but_not_lag() -> None:
    with golden_server(ttft_s=0.1, itl_s=0.0) as server:
        found = send(server, numbered(6), Constant(rate=1000.0, max_in_flight=2))
    assert server.max_in_flight == 2
    assert found.check.capped_requests == 4
    assert found.check.asked_in_flight == 2
    waits = found.trace["sent_s"].to_numpy() - found.trace["intended_s"].to_numpy()
    assert (waits[2:4] > 0.09).all() and (waits[4:] > 0.18).all()
    # Where a place was free, all of the wait is lag; else not the part in which an earlier request was answered.
    assert found.check.lag_ms_p99 <= 1e3 * max(waits[:2].max(), waits[2:].max() - 0.09)
    assert found.check.saturated and "max_in_flight" in found.check.advice


def test_a_trace_is_replayed_by_the_workloads_own_offsets() -> None:
    offsets = [0.0, 0.05, 0.05, 0.2]
    with golden_server() as server:
        found = send(server, numbered(4, arrivals_s=offsets), Trace(speed=2.0))
    assert found.trace["intended_s"].to_pylist() == pytest.approx([0.0, 0.025, 0.025, 0.1])


def test_arrivals_follow_the_seed() -> None:
    with golden_server() as server:
        due = [
            send(server, numbered(5), Poisson(rate=100.0), seed=seed).trace["intended_s"].to_pylist()
            for seed in (1, 1, 2)
        ]
    assert due[0] == due[1] != due[2]


def test_fewer_conversations_than_places_are_no_fault_of_the_client() -> None:
    workload = numbered(12, columns={"conversation": [0, 1, 2] * 4})
    with golden_server(ttft_s=0.02) as server:
        found = send(server, workload, ClosedLoop(concurrency=8), {"lag_limit_ms": 1000.0})
    assert found.check.max_in_flight == 3
    assert not found.check.saturated, found.check.advice


@pytest.mark.parametrize("load", [ClosedLoop(concurrency=3), Constant(rate=1000.0)])
def test_turns_of_a_conversation_wait_for_the_answer_and_the_pause(load: Any) -> None:
    # Two conversations, one of three turns and one of two, and two requests that stand alone.
    conversation = [7, 8, 7, -1, 8, 7, -1]
    think_s = [0.0, 0.0, 0.05, 0.0, 0.1, 0.0, 0.0]
    workload = numbered(7, columns={"conversation": conversation, "think_s": think_s})
    with golden_server(ttft_s=0.02) as server:
        found = send(server, workload, load, {"workers": 2})
    rows = found.trace.to_pylist()
    assert [row["error"] for row in rows] == [None] * 7
    for before, after in ((0, 2), (2, 5), (1, 4)):
        due = rows[before]["end_s"] + think_s[after]
        assert rows[after]["intended_s"] == pytest.approx(due, abs=1e-9)
        assert rows[after]["sent_s"] >= due
    assert len({seen.body["prompt"][0] for seen in server.seen}) == 7


def test_more_workers_than_places_or_requests_are_not_started() -> None:
    with golden_server() as server:
        assert len(send(server, numbered(9), ClosedLoop(concurrency=2), {"workers": 4}).check.cpu_shares) == 2
        assert len(send(server, numbered(1), Constant(rate=9.0), {"workers": 4}).check.cpu_shares) == 1
        assert len(send(server, numbered(3), client={"workers": "auto"}).check.cpu_shares) == 1


def test_an_empty_workload_is_a_round_without_rows() -> None:
    found = send("http://127.0.0.1:9", numbered(0))
    assert len(found.trace) == 0 and found.trace.schema == TRACE_SCHEMA and found.complete


def test_progress_ends_with_all() -> None:
    heard: list[tuple[int, int]] = []
    with golden_server(ttft_s=0.3) as server:
        send(server, numbered(4), progress=lambda ended, total: heard.append((ended, total)))
    assert heard == sorted(heard)
    assert heard[-1] == (4, 4)


def test_an_interruption_returns_what_was_measured() -> None:
    interrupted = threading.Event()

    def interrupt() -> None:
        _wait_for(server, 4)
        interrupted.set()

    with golden_server(fault="stall", fault_requests=frozenset({3})) as server, meanwhile(interrupt):
        found = send(server, numbered(10), interrupted=interrupted, stall_timeout_s=PATIENCE_S)
    assert not found.complete
    assert found.trace["error"].to_pylist() == [None, None, None, "interrupted"]


def test_ctrl_c_spills_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import signal
        import sys
        from pathlib import Path
        from llmexp.schema.load import ClosedLoop
        from tests.client.sending import numbered, send
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
        try:
            send(sys.argv[1], numbered(10), ClosedLoop(concurrency=2), {"workers": 2},
            spill=Path(sys.argv[2]))
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    spill = tmp_path / "spilled.parquet"
    with golden_server(fault="stall", fault_requests=frozenset(range(4, 10))) as server:
        with started([sys.executable, "-c", script, server.url, str(spill)]) as process:
            _wait_for(server, 6)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        until(lambda: server.in_flight == 0)
    trace = pq.read_table(spill)
    assert trace["error"].to_pylist().count("interrupted") == 2
    assert trace["error"].to_pylist().count(None) == len(trace) - 2 == 4


def test_a_signal_after_the_last_answer_does_not_lose_the_round(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os
        import signal
        import sys
        from pathlib import Path
        from llmexp import interrupt
        from llmexp.client import replay
        from llmexp.schema.load import ClosedLoop
        from tests.client.sending import numbered, send
        interrupt.install()
        gather = replay.gather
        def interrupted(*arguments, **more):
            os.kill(os.getpid(), signal.SIGTERM)
            return gather(*arguments, **more)
        replay.gather = interrupted
        try:
            send(sys.argv[1], numbered(4), ClosedLoop(concurrency=2), spill=Path(sys.argv[2]))
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    spill = tmp_path / "spilled.parquet"
    with golden_server() as server:
        command = [sys.executable, "-c", script, server.url, str(spill)]
        assert subprocess.run(command, timeout=2 * PATIENCE_S).returncode == 130
    assert pq.read_table(spill)["error"].to_pylist() == [None] * 4


def test_workers_end_with_their_parent_and_leave_nothing(tmp_path: Path) -> None:
    script = "import sys; from tests.client.sending import *; send(sys.argv[1], numbered(2))"
    with golden_server(fault="stall") as server:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        with started([sys.executable, "-c", script, server.url], environment) as process:
            _wait_for(server, 1)
            workers = _workers(process.pid)
        assert workers and not left(workers, PATIENCE_S)
    assert not list(tmp_path.glob("llmexp-client-*"))


def test_a_worker_that_dies_is_reported_and_no_ended_request_is_lost(tmp_path: Path) -> None:
    spill = tmp_path / "spilled.parquet"
    two_told = threading.Event()  # which they are once they are in a journal

    def hear(ended: int, total: int) -> None:
        if ended == 2:
            two_told.set()

    def kill_one() -> None:
        _wait_for(server, 4)
        assert two_told.wait(PATIENCE_S)
        _workers(os.getpid())[0].kill()

    with golden_server(fault="stall", fault_requests=frozenset(range(2, 8))) as server, meanwhile(kill_one):
        load, client = ClosedLoop(concurrency=2), {"workers": 2}
        with pytest.raises(EngineError, match="a client worker was ended by SIGKILL"):
            send(server, numbered(8), load, client, spill=spill, progress=hear, stall_timeout_s=2 * PATIENCE_S)
    errors = pq.read_table(spill)["error"].to_pylist()
    assert errors.count(None) == 2
    assert errors.count("interrupted") == len(errors) - 2 == 1, "the dead worker's third never ended"


def test_what_had_ended_when_the_parent_was_killed_is_in_the_runs_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.client.sending import *; "
        "send(sys.argv[1], numbered(9), ClosedLoop(concurrency=2), {'workers': 2}, spill=Path(sys.argv[2]))"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with golden_server(fault="stall", fault_requests=frozenset(range(3, 9))) as server:
        command = [sys.executable, "-c", script, server.url, str(tmp_path / "requests-0.parquet")]
        with started(command, {**os.environ, "TMPDIR": str(temporary)}):
            _wait_for(server, 5)
        until(lambda: not any(temporary.iterdir()))
    rows = [row for path in tmp_path.glob("requests-0.*.parquet") for row in pq.read_table(path).to_pylist()]
    errors = [row["error"] for row in rows]
    assert errors.count(None) == 3
    assert errors.count("interrupted") == len(rows) - 3 == 2
    assert len({row["request"] for row in rows}) == 5


_ENDS_WITHOUT_A_WORD = {
    "third Ctrl-C before the trace": ("gather", "[os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]"),
    "killed before the trace": ("gather", "os.kill(os.getpid(), signal.SIGKILL)"),
    "killed after the trace": ("journal.abandon", "os.kill(os.getpid(), signal.SIGKILL)"),
    "out of memory": ("gather", "{}['memory']"),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("how", _ENDS_WITHOUT_A_WORD)
def test_what_ended_workers_measured_is_in_the_runs_folder_once(how: str, stopped: bool, tmp_path: Path) -> None:
    where, what = _ENDS_WITHOUT_A_WORD[how]
    script = textwrap.dedent(
        f"""
        import os
        import signal
        import sys
        import threading
        import time
        from pathlib import Path
        from llmexp import interrupt
        from llmexp.client import replay
        from llmexp.schema.load import ClosedLoop
        from tests.client.sending import numbered, send
        interrupt.install()
        def end(*arguments, **more):
            time.sleep(0.2)
            {what}
        replay.{where} = end
        over = threading.Event()
        def stop(ended, total):
            if {stopped} and ended == 4:
                over.set()
        send(sys.argv[1], numbered(6), ClosedLoop(concurrency=2), {{"workers": 2}}, spill=Path(sys.argv[2]),
             progress=stop, interrupted=over)
        """
    )
    temporary, spill = tmp_path / "tmp", tmp_path / "requests-0.parquet"
    temporary.mkdir()
    stalled = {"fault": "stall", "fault_requests": frozenset({4, 5})} if stopped else {}
    with golden_server(together=2, **stalled) as server:  # so each worker has one
        command, environment = [sys.executable, "-c", script, server.url, str(spill)], {"TMPDIR": str(temporary)}
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=2 * PATIENCE_S)
        assert done.returncode in (130, -signal.SIGKILL, 1), done.stderr
        until(lambda: not any(temporary.iterdir()))
    traces = {path.name: pq.read_table(path) for path in tmp_path.glob("*.parquet")}
    assert sorted(traces) == ([spill.name] if "after" in how else ["requests-0.0.parquet", "requests-0.1.parquet"])
    rows = {row["request"]: row["error"] for trace in traces.values() for row in trace.to_pylist()}
    assert sum(map(len, traces.values())) == len(rows)
    ended = [error for error in rows.values() if error != "interrupted"]
    assert ended == [None] * (4 if stopped else 6)


def test_a_signal_to_all_processes_is_for_the_parent(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from llmexp import interrupt
        from tests.client.sending import numbered, send
        interrupt.install()
        try:
            send(sys.argv[1], numbered(4), spill=Path(sys.argv[2]))
        except KeyboardInterrupt:
            sys.exit(interrupt.exit_code())
        """
    )
    spill = tmp_path / "requests-0.parquet"
    with (
        golden_server(fault="stall", fault_requests=frozenset({2})) as server,
        started([sys.executable, "-c", script, server.url, str(spill)]) as process,
    ):
        _wait_for(server, 3)
        for one in (*_workers(process.pid), process):
            one.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
    assert pq.read_table(spill)["error"].to_pylist() == [None, None, "interrupted"]


def test_an_engine_that_hangs_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    spill = tmp_path / "spilled.parquet"
    hangs = pytest.raises(EngineError, match=r"no request got a token for engine\.stall_timeout_s=2 s")
    with golden_server(fault="stall", fault_requests=frozenset({2})) as server, hangs:
        send(server, numbered(4), stall_timeout_s=2.0, spill=spill)
    assert pq.read_table(spill)["error"].to_pylist() == [None, None, "interrupted"]
    with golden_server(ttft_s=0.2, itl_s=0.2) as server:
        load = Constant(rate=0.2)  # a request takes 2.4 s, and for 2.6 s the engine owes nothing
        assert send(server, numbered(2, output_tokens=12), load, stall_timeout_s=2.0).complete


def test_an_engine_that_only_lets_requests_time_out_hangs() -> None:
    with golden_server(ttft_s=600) as server, pytest.raises(EngineError, match="stall_timeout_s"):
        send(server, numbered(50), client={"timeout_s": 0.3}, stall_timeout_s=1.5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_hangs_ends_the_round_too(workers: int, tmp_path: Path) -> None:
    told = threading.Event()

    def stop_them() -> None:
        assert told.wait(PATIENCE_S)
        for worker in _workers(os.getpid()):
            worker.suspend()

    spill = tmp_path / "spilled.parquet"
    with golden_server(ttft_s=0.2) as server, meanwhile(stop_them):
        told_of = {"progress": lambda ended, total: ended and told.set(), "spill": spill}
        with pytest.raises(EngineError, match="stall_timeout_s"):
            send(server, numbered(200), client={"workers": workers}, stall_timeout_s=2.0, **told_of)
    assert pq.read_table(spill)["error"].to_pylist()[0] is None


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(EngineError, match=r"nowhere\.invalid"):
        send("http://nowhere.invalid:8000", numbered(1))


@contextmanager
def started(command: list[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end of the block."""
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(server: GoldenServer, requests: int) -> None:
    until(lambda: len(server.seen) >= requests)


def _workers(pid: int) -> list[psutil.Process]:
    return [process for process in descendants(pid) if "llmexp.client.worker" in command_line(process)]
