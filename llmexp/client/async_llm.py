"""The client inside an engine's process: requests go to AsyncLLM by function call, all else is as over HTTP.

Both run on one event loop, vLLM's front end being half of what happens there. So the client's lag includes what
the front end takes, as it does for any program that uses AsyncLLM.
"""

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import orjson

from llmexp.client.call import Call
from llmexp.client.driver import Driver
from llmexp.client.journal import Journal, abandon, preserve, refused
from llmexp.client.requests import Bodies
from llmexp.client.stall import require_movement
from llmexp.client.worker import GOODBYE, START_DELAY_S, STOP, STOP_WITHIN_S, Job, heading, work
from llmexp.engines import async_host
from llmexp.engines.host import Host, Talk
from llmexp.errors import EngineError

_READY = "ready"


class AsyncLLMTransport:
    """See `llmexp.client.call.Transport`. `make_fields(index)` gives a request's fields, as for HTTP."""

    def __init__(self, engine: Any, *, keep_text: bool, make_fields: Callable[[int], Mapping[str, Any]]) -> None:
        self._engine = engine
        self._keep_text = keep_text
        self._make_fields = make_fields
        self._finished: Callable[[Call], None] = lambda call: None
        self._tasks: dict[int, tuple[asyncio.Task[None], Call]] = {}

    async def open(self, connections: int, finished: Callable[[Call], None]) -> None:
        self._finished = finished

    def body(self, index: int) -> Mapping[str, Any]:
        """The arguments of `AsyncLLM.generate`; vLLM's server makes its sampling parameters in the same way."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.inputs import tokens_input

        fields = dict(self._make_fields(index))
        prompt = fields.pop("prompt")
        request = CompletionRequest(**fields, prompt=[0])
        return {
            "prompt": tokens_input(prompt, cache_salt=fields.get("cache_salt")),
            "sampling_params": request.to_sampling_params(fields["max_tokens"]),
            "priority": fields.get("priority", 0),
        }

    def send(self, call: Call, body: Mapping[str, Any]) -> None:
        call.sent = monotonic()
        self._tasks[call.index] = asyncio.get_running_loop().create_task(self._generate(call, body)), call

    def cancel(self, call: Call, error: str) -> None:
        self._tasks[call.index][0].cancel()
        self._settle(call, error)

    async def close(self) -> None:
        """There is nothing to drop."""

    async def _generate(self, call: Call, body: Mapping[str, Any]) -> None:
        error = None
        try:
            async for output in self._engine.generate(**body, request_id=f"{call.index}-{call.sent}"):
                self._take(call, output, monotonic())
        except Exception as failure:  # whatever the engine raises ends this request alone
            error = f"{type(failure).__name__}: {failure}"
        self._settle(call, error)

    def _take(self, call: Call, output: Any, now: float) -> None:
        (choice,) = output.outputs
        if choice.token_ids:
            call.chunks.append(now)
            call.output_tokens = (call.output_tokens or 0) + len(choice.token_ids)
        if self._keep_text:
            call.text = (call.text or "") + choice.text
            if call.logprobs is None and choice.logprobs:
                first = {token.decoded_token: token.logprob for token in choice.logprobs[0].values()}
                call.logprobs = orjson.dumps(first).decode()
        if output.finished:
            call.prompt_tokens = len(output.prompt_token_ids)
            call.cached_tokens = output.num_cached_tokens
            call.finish_reason = choice.finish_reason
            if (stats := output.metrics) is not None:
                call.engine_times = (
                    stats.queued_ts,
                    stats.scheduled_ts,
                    stats.first_token_ts,
                    stats.last_token_ts,
                )

    def _settle(self, call: Call, error: str | None) -> None:
        if self._tasks.pop(call.index, None) is not None:
            call.error = error
            call.end = monotonic()
            self._finished(call)


async def serve(engine: Any, talk: async_host.Talk) -> None:
    """Serves one job in the engine's process: job in, ready out, start in, progress out (requests that have ended, and
    when the engine last moved), at last 0, or the number of the error with which the journal's disk refused it.

    STOP, or that the other end is gone, ends what is under way; without a GOODBYE the trace is made here.
    """
    job: Job = await talk.receive()
    with ExitStack() as stack:
        if job.claims is not None:  # alone, this worker takes every request
            claims = os.memfd_create("claims")
            stack.callback(os.close, claims)
            os.pwrite(claims, job.first.astype("<i8").tobytes(), 0)
            job = replace(job, claims=claims)
        transport = AsyncLLMTransport(engine, keep_text=job.keep_text, make_fields=Bodies(job.requests).fields)
        journal = stack.enter_context(closing(Journal(job.journal)))
        driver = Driver(transport, journal.append, timeout_s=job.timeout_s)
        await transport.open(1, driver.finished)
        talk.send(_READY)
        try:
            start: float = await talk.receive()
        except (EOFError, ConnectionError):
            abandon(job.journal)
            raise
        journal.append(heading(job, start))
        dismissed = asyncio.get_running_loop().create_task(_dismissed(talk, driver))
        journal.append(await work(job, driver, start, lambda ended, moved_s: talk.send((ended, moved_s))))
        talk.send(journal.settle())
        if not await dismissed:
            preserve(job.journal)


async def _dismissed(talk: async_host.Talk, driver: Driver) -> bool:
    """Whether the other end's last word is a goodbye; whatever it says, nothing more is sent to the engine."""
    said = None
    with suppress(EOFError, ConnectionError):
        while said != GOODBYE:
            said = await talk.receive()
            driver.stop()
    driver.stop()
    return bool(said == GOODBYE)


class Guest:
    """Our end of a job that is served in an engine's process: what the worker processes are to a server."""

    def __init__(self, host: Host, job: Job) -> None:
        self._stack = ExitStack()
        self._over = False
        try:
            self._talk: Talk = self._stack.enter_context(host.calling(serve))
            self._talk.send(job)
        except OSError:
            raise EngineError("AsyncLLM takes no requests; its process has ended") from None

    def start(self) -> tuple[float, float]:
        try:
            self._talk.receive()
            origin = time.monotonic() + START_DELAY_S
            self._talk.send(origin)
        except (EOFError, OSError):
            raise EngineError(self.obituary()) from None
        return origin, time.time() + (origin - time.monotonic())

    def work(
        self,
        total: int,
        progress: Callable[[int, int], None] | None,
        interrupted: threading.Event | None,
        stall_timeout_s: float,
    ) -> None:
        moved_s = time.monotonic() + START_DELAY_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._talk, selectors.EVENT_READ)
            while not (interrupted is not None and interrupted.is_set()):
                if selector.select(0.1):
                    try:
                        said = self._talk.receive()
                    except (EOFError, OSError):
                        return
                    if not isinstance(said, tuple):
                        self._over = True
                        if said:
                            raise refused(said)
                        return
                    ended, moved_s = said
                    if progress is not None:
                        progress(ended, total)
                require_movement(moved_s, stall_timeout_s)

    def finish(self) -> None:
        with suppress(EOFError, OSError):
            self._talk.send(STOP)
            self._talk.wait_at_most(STOP_WITHIN_S)
            while not self._over:
                self._over = not isinstance(self._talk.receive(), tuple)

    def dismiss(self) -> None:
        with suppress(OSError):
            self._talk.send(GOODBYE)

    def obituary(self) -> str:
        return "AsyncLLM's process did not hand over its records (killed? out of memory? see its log and dmesg)"

    def kill(self) -> None:
        """Leaves the engine as it is."""
        self._stack.close()
