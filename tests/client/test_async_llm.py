"""The client inside an engine's process, with a stand-in for AsyncLLM that does what it is told."""

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from llmexp.client import async_llm
from llmexp.client.async_llm import AsyncLLMTransport
from llmexp.client.replay import replay
from llmexp.engines import async_host
from llmexp.engines.host import Host
from llmexp.errors import EngineError
from llmexp.schema.load import ClientConfig, ClosedLoop, Constant
from llmexp.workloads.workload import Workload, packed
from tests.waiting import PATIENCE_S, meanwhile, until

TTFT_S, ITL_S = 0.05, 0.02


@dataclass
class Engine:
    """Answers with a known time to first token and between tokens; request `fails` raises, `hangs` never ends."""

    fails: int | None = None
    hangs: int | None = None
    errored: bool = False
    closed: list[int] = field(default_factory=list)  # requests that were given up
    seen: list[dict[str, Any]] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)

    async def generate(self, *, request_id: str, **body: Any) -> AsyncIterator[Any]:
        index = int(request_id.partition("-")[0])
        self.seen.append(body)
        queued = time.monotonic()
        try:
            if index == self.fails:
                raise ValueError("a bad request")
            for k in range(body["max_tokens"]):
                if index == self.hangs and k:
                    self.hanging.set()
                    await asyncio.Event().wait()
                await asyncio.sleep(TTFT_S if k == 0 else ITL_S)
                last = k == body["max_tokens"] - 1
                times = SimpleNamespace(
                    queued_ts=queued,
                    scheduled_ts=queued + 0.01,
                    first_token_ts=queued + 0.02,
                    last_token_ts=queued + 0.03,
                )
                choice = SimpleNamespace(
                    token_ids=[k], text=f" t{k}", logprobs=None, finish_reason="length" if last else None
                )
                yield SimpleNamespace(
                    outputs=[choice],
                    finished=last,
                    prompt_token_ids=body["prompt"],
                    num_cached_tokens=len(body["prompt"]) // 2,
                    metrics=times,
                )
        except asyncio.CancelledError:
            self.closed.append(index)
            raise


class Hosted:
    """A host in a thread of the test's process."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.host = Host(folder / "socket")
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        assert self._ready.wait(PATIENCE_S)

    def _serve(self) -> None:
        async def serve() -> None:
            self._over = asyncio.Event()
            await async_host.listen(self.engine, str(self.host.path), self._over, set())
            self._ready.set()
            await self._over.wait()

        self._loop.run_until_complete(serve())

    def end(self) -> None:
        """Ends the host like a process that dies: every connection closes."""
        self._loop.call_soon_threadsafe(self._over.set)
        self.thread.join(PATIENCE_S)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()


@pytest.fixture
def hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    monkeypatch.setattr(
        AsyncLLMTransport,
        "body",
        lambda self, index: {k: self._make_fields(index)[k] for k in ("prompt", "max_tokens")},
    )
    made = Hosted(Engine(), tmp_path)
    yield made
    if made.thread.is_alive():
        made.end()


def workload(n: int = 6, output_tokens: int = 4) -> Workload:
    prompt_at, lengths = packed(np.arange(10 * (i + 1), dtype=np.int32) for i in range(n))
    return Workload("made", {}, prompt_at, lengths, np.full(n, output_tokens, np.int32))


def test_the_trace_holds_what_the_engine_did(hosted: Hosted) -> None:
    counts: list[tuple[int, int]] = []
    sent = replay(
        hosted.host, workload(), ClosedLoop(concurrency=2), ClientConfig(), round_index=3,
        progress=lambda done, of: counts.append((done, of)),
    )  # fmt: skip
    trace = sent.trace
    assert sent.complete and sent.check.max_in_flight == 2
    assert trace["round"].to_pylist() == [3] * 6
    assert trace["prompt_tokens"].to_pylist() == [10, 20, 30, 40, 50, 60]
    assert trace["cached_tokens"].to_pylist() == [5, 10, 15, 20, 25, 30]
    assert trace["output_tokens"].to_pylist() == [4] * 6
    assert trace["finish_reason"].to_pylist() == ["length"] * 6
    assert sorted(len(body["prompt"]) for body in hosted.engine.seen) == [10, 20, 30, 40, 50, 60]
    ttft_s = trace["first_token_s"].to_numpy() - trace["sent_s"].to_numpy()
    assert (ttft_s >= TTFT_S - 1e-3).all()
    waited_s = trace["engine_scheduled_s"].to_numpy() - trace["engine_queued_s"].to_numpy()
    assert waited_s == pytest.approx(np.full(6, 0.01))
    assert (trace["engine_queued_s"].to_numpy() >= trace["sent_s"].to_numpy()).all()
    assert all(of == 6 for _, of in counts)


def test_arrivals_are_kept_to(hosted: Hosted) -> None:
    sent = replay(hosted.host, workload(), Constant(rate=50.0), ClientConfig(), round_index=0)
    assert sent.trace["intended_s"].to_numpy() == pytest.approx(np.arange(6) / 50)
    assert (sent.trace["sent_s"].to_numpy() >= sent.trace["intended_s"].to_numpy()).all()


def test_a_request_that_the_engine_refuses_fails_alone(hosted: Hosted) -> None:
    hosted.engine.fails = 2
    trace = replay(hosted.host, workload(), ClosedLoop(concurrency=2), ClientConfig(), round_index=0).trace
    errors = trace["error"].to_pylist()
    assert errors[2] == "ValueError: a bad request"
    assert errors[:2] + errors[3:] == [None] * 5


def test_a_request_that_takes_too_long_is_given_up(hosted: Hosted) -> None:
    hosted.engine.hangs = 1
    trace = replay(hosted.host, workload(), ClosedLoop(concurrency=2), ClientConfig(timeout_s=3.0), round_index=0).trace
    errors = trace["error"].to_pylist()
    assert "client.timeout_s" in errors[1] and errors[0] is errors[2] is None
    assert hosted.engine.closed == [1]
    assert len(trace["chunk_s"][1]) == 1  # what had come is kept


def test_an_interruption_keeps_what_was_measured_and_the_engine_serves_on(hosted: Hosted) -> None:
    hosted.engine.hangs = 1
    interrupted = threading.Event()

    def interrupt() -> None:
        assert hosted.engine.hanging.wait(PATIENCE_S)
        interrupted.set()

    with meanwhile(interrupt):
        sent = replay(
            hosted.host, workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=0, interrupted=interrupted,
            stall_timeout_s=2 * PATIENCE_S,
        )  # fmt: skip
    assert not sent.complete
    assert sent.trace["error"].to_pylist() == [None, "interrupted"]
    hosted.engine.hangs = None
    assert replay(hosted.host, workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=1).complete


def test_a_trace_that_nobody_gathers_is_left_by_the_engines_process(
    hosted: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object, **more: object) -> None:
        raise MemoryError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spill = tmp_path / "requests-0.parquet"
    with monkeypatch.context() as dying, pytest.raises(MemoryError):
        dying.setattr("llmexp.client.replay.gather", killed)
        replay(hosted.host, workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=0, spill=spill)
    until(lambda: not any(tmp_path.glob("llmexp-client-*")))
    assert pq.read_table(tmp_path / "requests-0.0.parquet")["error"].to_pylist() == [None] * 6
    replay(hosted.host, workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=1, spill=spill)
    assert sorted(path.name for path in tmp_path.glob("*")) == [
        "requests-0.0.parquet",
        spill.name,
        hosted.host.path.name,
    ]


def test_a_caller_that_dies_before_the_round_leaves_no_prompts_behind(
    hosted: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: async_llm.Guest) -> None:
        self._talk.receive()
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(async_llm.Guest, "start", dies)
    monkeypatch.setattr("llmexp.client.journal.tidy", lambda folder: None)  # the dead do not tidy up
    monkeypatch.setattr("llmexp.client.async_llm.abandon", lambda path: shutil.rmtree(path.parent))
    with pytest.raises(KeyboardInterrupt):
        replay(hosted.host, workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=0)
    until(lambda: not any(tmp_path.glob("llmexp-client-*")))


def test_a_host_that_dies_in_a_round_is_told(hosted: Hosted) -> None:
    hosted.engine.hangs = 0

    def die() -> None:
        assert hosted.engine.hanging.wait(PATIENCE_S)
        hosted.end()

    with meanwhile(die), pytest.raises(EngineError, match="did not hand over its records"):
        load, limit_s = ClosedLoop(concurrency=1), 2 * PATIENCE_S
        replay(hosted.host, workload(), load, ClientConfig(), round_index=0, stall_timeout_s=limit_s)


def test_where_no_host_is_the_round_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="takes no requests"):
        replay(Host(tmp_path / "none"), workload(), ClosedLoop(concurrency=1), ClientConfig(), round_index=0)
