"""One round: replays a workload against a server from processes of its own, and gathers the trace."""

import math
import os
import pickle
import secrets
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import llmexp
from llmexp import interrupt, liveness
from llmexp.client import journal
from llmexp.client.arrivals import arrivals
from llmexp.client.async_llm import Guest
from llmexp.client.check import ClientCheck, check_client
from llmexp.client.gather import gather
from llmexp.client.requests import Requests
from llmexp.client.spill import write
from llmexp.client.stall import require_movement
from llmexp.client.worker import (
    GOODBYE,
    OVER,
    PRESERVE_WITHIN_S,
    READY,
    START,
    START_DELAY_S,
    STOP,
    STOP_WITHIN_S,
    Job,
)
from llmexp.engines.host import Host
from llmexp.engines.process import ending
from llmexp.engines.target import Target
from llmexp.errors import ConfigError, EngineError, StorageError
from llmexp.schema.load import ClientConfig, ClosedLoop, LoadConfig, Trace
from llmexp.workloads.workload import Workload

POLL_S = 0.1
# What one worker serves with room to spare, for `client.workers=auto`.
IN_FLIGHT_PER_WORKER = 256
RATE_PER_WORKER = 1000.0


@dataclass(frozen=True)
class Replay:
    """What came of a round. Times in `trace` (TRACE_SCHEMA) count from `origin_monotonic_s`, a time of
    CLOCK_MONOTONIC that was `origin_wall` on the wall clock. `complete` is False after an interruption."""

    trace: pa.Table
    origin_monotonic_s: float
    origin_wall: float
    check: ClientCheck
    complete: bool


def replay(
    target: Target | Host,
    workload: Workload,
    load: LoadConfig,
    client: ClientConfig,
    *,
    round_index: int,
    salted: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    interrupted: threading.Event | None = None,
    spill: Path | None = None,
    stall_timeout_s: float = math.inf,
) -> Replay:
    """Sends the whole workload once, to a server or to an engine's process that takes the client in, and waits
    for the last answer.

    `salted` gives each request a `cache_salt` of its own. `seed` determines the arrivals. `progress` is
    called with the numbers of ended and of all requests. Once `interrupted` is set nothing more is sent,
    requests in flight end with the error "interrupted", and the trace so far is returned. The trace goes to the
    Parquet file `spill` in any case, also when a worker dies or on Ctrl-C, before the error goes on; if this process is
    gone before it is there, the workers leave it beside that file.

    Raises ConfigError or WorkloadError if this workload cannot be sent as asked, EngineError if a worker
    fails, or if requests are in flight and none gets a token for `stall_timeout_s`.
    """
    first, follow, think_s = _conversations(workload)
    offsets_s = None if workload.arrivals_s is None else workload.arrivals_s[first]
    due_s = arrivals(load, len(first), seed=seed, offsets_s=offsets_s)
    places = load.concurrency if isinstance(load, ClosedLoop) else load.max_in_flight
    inside = isinstance(target, Host)
    workers = 1 if inside else _num_workers(client, places, due_s, len(first))
    with ExitStack() as stack:
        try:
            folder = journal.make_folder()
            stack.callback(journal.tidy, folder)
            requests = _requests(target, workload, client, folder, salted)
            (folder / "claims").write_bytes(first.astype("<i8").tobytes())
        except OSError as refusal:
            raise journal.refused(refusal.errno or 0) from None
        claims = None
        if due_s is None:
            claims = os.open(folder / "claims", os.O_RDONLY)
            stack.callback(os.close, claims)
        jobs = [
            Job(
                round_index=round_index,
                worker=k,
                base_url=target.base_url if isinstance(target, Target) else "",
                api=client.api,
                transport=client.transport,
                timeout_s=client.timeout_s,
                keep_text=workload.keep_text,
                requests=requests,
                journal=folder / f"journal-{k}",
                spill=spill,
                parent=liveness.mark(),
                follow=follow,
                think_s=think_s,
                places=None if places is None else len(range(k, places, workers)),
                claims=claims,
                first=first[k::workers],
                due=np.empty(0) if due_s is None else due_s[k::workers],
                api_key=target.api_key if isinstance(target, Target) else None,
            )
            for k in range(workers)
        ]
        crew = Guest(target, jobs[0]) if isinstance(target, Host) else _Crew(jobs, folder)
        stack.callback(crew.kill)
        origin, origin_wall = crew.start()
        error: BaseException | None = None
        safe = stack.enter_context(ExitStack())
        try:
            crew.work(len(workload), progress, interrupted, stall_timeout_s)
            safe.enter_context(interrupt.held())  # until the trace is on disk
        except BaseException as caught:  # also Ctrl-C: what was measured is kept first
            error = caught
            safe.enter_context(interrupt.held())
        crew.finish()
        journals = {job.worker: journal.read(job.journal) for job in jobs}
        outcomes = [outcome for _, outcome in journals.values() if outcome is not None]
        if error is None and len(outcomes) < workers:
            error = EngineError(crew.obituary())
        records = {k: kept for k, (kept, _) in journals.items()}
        trace = gather(records, round_index=round_index, origin=origin)
        try:
            if spill is not None:
                write(trace, spill)
        except StorageError as elsewhere:
            error = elsewhere
        for job in jobs:
            journal.abandon(job.journal)
        crew.dismiss()
        if error is not None:
            raise error
    check = check_client(
        trace,
        outcomes,
        lags_s=np.concatenate([kept.rows["sent"] - kept.rows["ready"] for kept in records.values()]),
        due_s=due_s,
        first=first,
        asked_in_flight=places,
        keeps_full=due_s is None and not think_s.any() and bool((follow < 0).all()),
        alone=not inside,
        lag_limit_ms=client.lag_limit_ms,
    )
    return Replay(trace, origin, origin_wall, check, complete=len(trace) == len(workload))


def _conversations(workload: Workload) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
    """Requests that wait for no other; each request's next turn (-1: none); the pause before each request."""
    n = len(workload)
    follow = np.full(n, -1, np.int32)
    think_s = np.asarray(workload.columns.get("think_s", np.zeros(n)), np.float64)
    is_first = np.ones(n, bool)
    if "conversation" in workload.columns:
        last: dict[Any, int] = {}
        for i, conversation in enumerate(workload.columns["conversation"].tolist()):
            if conversation == -1:
                continue
            if conversation in last:
                follow[last[conversation]] = i
                is_first[i] = False
            last[conversation] = i
    return np.flatnonzero(is_first).astype(np.int32), follow, think_s


def _num_workers(client: ClientConfig, places: int | None, due_s: NDArray[np.float64] | None, n: int) -> int:
    if client.workers != "auto":
        workers = client.workers
    else:
        if due_s is None:
            wanted = (places or 1) / IN_FLIGHT_PER_WORKER
        else:
            span_s = float(due_s[-1]) if len(due_s) else 0.0
            wanted = n / span_s / RATE_PER_WORKER if span_s > 0 else 1.0
        workers = min(int(np.ceil(wanted)), max((os.cpu_count() or 1) // 2, 1))
    return max(1, min(workers, n, places or workers))


def require_written(workload: Workload, client: ClientConfig) -> None:
    """Raises ConfigError if the client is to send text or messages, and the workload's prompts are token ids alone."""
    written = _written_in(client)
    if written and written not in workload.columns:
        key, what, those = (
            ("client.api=chat", "chat messages", "mmlu with workload.chat_template=true, custom with `messages`")
            if client.api == "chat"
            else ("client.prompt=text", "text", "mmlu with workload.chat_template=false, custom with `prompt`")
        )
        raise ConfigError(
            f"{key} sends prompts as {what}, and workload {workload.name} has none; {those} on every line would"
        )


def require_arrivals(workload: Workload, load: LoadConfig) -> None:
    """Raises ConfigError or WorkloadError if the workload's own arrivals are asked for, and it has none or such as go
    back in time."""
    if isinstance(load, Trace):
        first, *_ = _conversations(workload)
        arrivals(load, len(first), offsets_s=None if workload.arrivals_s is None else workload.arrivals_s[first])


def _written_in(client: ClientConfig) -> str | None:
    """The workload's column that is sent in place of token ids."""
    return "messages" if client.api == "chat" else "prompt_text" if client.prompt == "text" else None


def _as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the completions API by the names that the chat API has for them."""
    if "logprobs" not in fields:
        return dict(fields)
    return {**fields, "logprobs": True, "top_logprobs": fields["logprobs"]}


def _requests(target: Target | Host, workload: Workload, client: ClientConfig, folder: Path, salted: bool) -> Requests:
    """What the workers send, with the prompts in a file that they share."""
    require_written(workload, client)
    written = _written_in(client)
    texts = [str(text) for text in workload.columns[written]] if written else None
    prompts = folder / "prompts"
    bounds = np.zeros(len(workload) + 1, np.int64)
    if texts is None:
        np.cumsum(workload.prompt_tokens, out=bounds[1:])
        with prompts.open("wb") as file:
            for prompt in workload.prompts():
                file.write(np.ascontiguousarray(prompt, np.int32).data)
    common = {
        "model": target.model if isinstance(target, Target) else None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": client.temperature,
        "seed": client.seed,
        "ignore_eos": client.ignore_eos,
        **(_as_chat(workload.request_fields) if client.api == "chat" else workload.request_fields),
    }
    priority = workload.columns.get("priority")
    return Requests(
        prompts=prompts,
        bounds=bounds,
        output_tokens=workload.output_tokens,
        common=common,
        texts=None if client.api == "chat" else texts,
        messages=texts if client.api == "chat" else None,
        priority=None if priority is None else priority.astype(np.int64),
        salt=secrets.token_hex(8) if salted else "",
    )


class _Crew:
    """The worker processes of a round."""

    def __init__(self, jobs: Sequence[Job], folder: Path) -> None:
        self._logs = [folder / f"log-{k}" for k in range(len(jobs))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._talking = selectors.DefaultSelector()  # to those that are not over
        self._owing = False  # whether they have what nobody else has
        self._said = [b""] * len(jobs)  # each worker's unfinished line
        self._ended = [0] * len(jobs)
        self._moved_s = 0.0
        package = str(Path(llmexp.__file__).parent.parent)
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        for job, log in zip(jobs, self._logs, strict=True):
            with log.open("wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-c", "from llmexp.client.worker import main; main()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    bufsize=0,
                    pass_fds=() if job.claims is None else (job.claims,),
                    env={**os.environ, "PYTHONPATH": paths},
                    start_new_session=True,  # Ctrl-C is for the parent, which tells them
                )
            self._processes.append(process)
            self._tell(process, pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL))

    def start(self) -> tuple[float, float]:
        """Waits until all are ready, then sets the origin: its monotonic and its wall time."""
        for process in self._processes:
            assert process.stdout is not None
            said = process.stdout.read(len(READY))
            if said != READY:
                process.wait()
                raise EngineError(self.obituary())
        origin = time.monotonic() + START_DELAY_S
        origin_wall = time.time() + (origin - time.monotonic())
        self._owing = True
        for k, process in enumerate(self._processes):
            self._tell(process, START.pack(origin))
            assert process.stdout is not None
            self._talking.register(process.stdout, selectors.EVENT_READ, k)
        return origin, origin_wall

    def work(
        self,
        total: int,
        progress: Callable[[int, int], None] | None,
        interrupted: threading.Event | None,
        stall_timeout_s: float,
    ) -> None:
        """Waits until all have ended, or until `interrupted` is set. Raises EngineError if nothing moves any more."""
        self._moved_s = time.monotonic() + START_DELAY_S
        shown = -1
        while self._talking.get_map():
            self._hear(POLL_S)
            if interrupted is not None and interrupted.is_set():
                return
            require_movement(self._moved_s, stall_timeout_s)
            if progress is not None and shown != sum(self._ended):
                shown = sum(self._ended)
                progress(shown, total)

    def finish(self) -> None:
        """Tells those that still work to stop, and waits until their journals are whole."""
        for process in self._processes:
            self._tell(process, STOP)
        deadline = time.monotonic() + STOP_WITHIN_S
        while self._talking.get_map() and (left_s := deadline - time.monotonic()) > 0:
            with suppress(EngineError, StorageError):  # of one that is no more, there is what it had written
                self._hear(left_s)

    def dismiss(self) -> None:
        """Tells them that nobody needs their journals any more."""
        for process in self._processes:
            self._tell(process, GOODBYE)
        self._owing = False

    def obituary(self) -> str:
        """Why a worker is missing."""
        for log, process in zip(self._logs, self._processes, strict=True):
            if process.poll():
                lines = log.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "it left no message")
                return f"a client worker {ending(process.returncode)}: {last}"
        return "a client worker did not hand over its records"

    def kill(self) -> None:
        """Ends what is left of them; those that were not dismissed leave their traces first."""
        self._talking.close()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            if self._owing:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PRESERVE_WITHIN_S)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _hear(self, wait_s: float) -> None:
        """Hears what workers say within that time. Raises EngineError if one is no more, StorageError if its disk is
        full."""
        for key, _ in self._talking.select(wait_s):
            k: int = key.data
            stdout = self._processes[k].stdout
            assert stdout is not None
            said = stdout.read(65536)
            if not said:
                self._talking.unregister(stdout)
                self._processes[k].wait()
                raise EngineError(self.obituary())
            *lines, self._said[k] = (self._said[k] + said).split(b"\n")
            for ended, value in map(bytes.split, lines):
                if ended == OVER:
                    self._talking.unregister(stdout)
                    if refusal := int(value):
                        raise journal.refused(refusal)
                else:
                    self._ended[k] = int(ended)
                    self._moved_s = max(self._moved_s, float(value))

    def _tell(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        assert process.stdin is not None
        try:
            view = memoryview(message)
            while view:
                view = view[process.stdin.write(view) :]
        except BrokenPipeError:  # it has died, which `start` reports
            pass
