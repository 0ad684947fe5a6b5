"""A client process (`main`): it sends its share of a round's requests and reports on them.

The parent writes a pickled Job to its standard input, waits for READY, then writes when to start. It reads
lines with the number of ended requests and the time at which the server last moved, at last OVER with 0; what was
measured is in the file `job.journal`. Where its disk was full to the end, the worker makes the trace itself and says
OVER with the error's number. STOP means to send no more, GOODBYE that the journal is not needed any more: only that
ends a worker. Where standard input closes without it, the parent is gone, and the worker makes the trace itself. Little
is imported here, because each round's workers start anew.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import Literal

import numpy as np
import uvloop
from numpy.typing import NDArray

from llmexp.client.agenda import Agenda, ClosedLoop, OpenLoop
from llmexp.client.call import Transport
from llmexp.client.driver import Driver
from llmexp.client.journal import Heading, Journal, Outcome, abandon, preserve
from llmexp.client.requests import Bodies, Requests
from llmexp.liveness import mark

READY, OVER = b"ready\n", b"over"
STOP, GOODBYE = b".", b"!"
START = struct.Struct("d")
START_DELAY_S = 0.05  # from the last worker's readiness to the round's origin
STOP_WITHIN_S = 10.0  # a worker hands over its records
PRESERVE_WITHIN_S = 60.0  # or makes a trace of them itself, for which it imports what that takes


@dataclass(frozen=True)
class Job:
    """A worker's share of a round.

    Closed loop: `claims` is the inherited descriptor of the file of requests to take, `places` the slots.
    Open loop: `first` and `due` are the requests that arrive by themselves and when, counted from the start,
    and `places` the cap.
    If nobody is left to read the journal, its trace goes beside the Parquet file `spill`. `parent`: the mark
    (`llmexp.liveness`) of who would.
    """

    round_index: int
    worker: int

    base_url: str
    api: Literal["completions", "chat"]
    transport: Literal["lean", "openai"]
    timeout_s: float
    keep_text: bool
    requests: Requests
    journal: Path
    spill: Path | None
    parent: str
    follow: NDArray[np.int32]
    think_s: NDArray[np.float64]
    places: int | None
    claims: int | None
    first: NDArray[np.int32]
    due: NDArray[np.float64]
    api_key: str | None = field(default=None, repr=False)


def main() -> None:
    """Serves one job. Where everything of a command gets a signal, as from `scancel`, the parent's word counts."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(1, False)
    job: Job = pickle.load(sys.stdin.buffer)
    if job.api_key is not None:
        os.environ["LLMEXP_API_KEY"] = job.api_key  # whatever it was called: what is kept of errors is cleaned of it
    transport = _transport(job)
    gc.freeze()
    gc.disable()  # a collection's pause would show in the times; nothing here leaves cycles behind
    uvloop.run(_serve(job, transport))


def _transport(job: Job) -> Transport:
    bodies = Bodies(job.requests)
    if job.transport == "lean":
        from llmexp.client.lean import LeanTransport

        return LeanTransport(
            job.base_url, api=job.api, api_key=job.api_key, keep_text=job.keep_text, make_body=bodies.json
        )
    from llmexp.client.reference import OpenAITransport

    return OpenAITransport(
        job.base_url, api=job.api, api_key=job.api_key, keep_text=job.keep_text, make_fields=bodies.fields
    )


async def _serve(job: Job, transport: Transport) -> None:
    with contextlib.closing(Journal(job.journal)) as journal:
        driver = Driver(transport, journal.append, timeout_s=job.timeout_s)
        await transport.open(job.places or 1 if job.claims is not None else 1, driver.finished)
        _say(READY)
        message = os.read(0, START.size)
        if not message:
            abandon(job.journal)
            raise SystemExit
        start = START.unpack(message)[0]
        journal.append(heading(job, start))
        loop = asyncio.get_running_loop()
        loop.add_reader(0, driver.stop)
        journal.append(await work(job, driver, start, lambda ended, moved_s: _say(b"%d %f\n" % (ended, moved_s))))
        loop.remove_reader(0)
        refusal = journal.settle()
    await transport.close()
    for descriptor in (0, 1):  # which the loop, and `main`, have set otherwise
        os.set_blocking(descriptor, True)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, OVER + b" %d\n" % refusal)
    last = b""
    while said := os.read(0, 64):
        last = said
    if not last.endswith(GOODBYE):
        preserve(job.journal)


async def work(job: Job, driver: Driver, start: float, progress: Callable[[int, float], None]) -> Outcome:
    """Sends a job's requests from `start` on (CLOCK_MONOTONIC)."""
    agenda = _agenda(job, start)
    before = process_time()
    await driver.run(agenda, start, progress)
    cpu_s, wall_s = process_time() - before, monotonic() - start
    return Outcome(
        loop_lags_s=np.array(driver.loop_lags_s),
        in_flight_area_s=driver.in_flight_area_s,
        max_in_flight=driver.max_in_flight,
        capped=agenda.capped,
        cpu_s=cpu_s,
        wall_s=wall_s,
    )


def heading(job: Job, start: float) -> Heading:
    """How a job's journal begins."""
    return Heading(job.spill, job.round_index, job.worker, start, (mark(), job.parent))


def _agenda(job: Job, start: float) -> Agenda:
    follow, think_s = job.follow.tolist(), job.think_s.tolist()
    if job.claims is not None:
        assert job.places is not None
        return ClosedLoop(job.claims, job.places, start, follow, think_s)
    return OpenLoop(job.first.tolist(), (job.due + start).tolist(), job.places, follow, think_s)


def _say(message: bytes) -> None:
    # Fails if the parent is busy, then the next line says more, or gone, which standard input says too.
    with contextlib.suppress(OSError):
        os.write(1, message)
