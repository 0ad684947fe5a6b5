"""The driver: sends each request when it is due, keeps what comes back, and watches itself doing so."""

import asyncio
import math
from array import array
from collections.abc import Callable
from time import monotonic
from typing import Any

from llmexp.client.agenda import Agenda
from llmexp.client.alarm import Alarm
from llmexp.client.call import Call, Transport
from llmexp.client.ledger import Ledger, Records

HEARTBEAT_S = 0.02
BEATS_PER_REPORT = 5
START_MARGIN_S = 0.01  # before the first request, in which no body is made


class Driver:
    """Runs an agenda over a transport. All of it happens in callbacks of one event loop.

    Ended calls go to `keep`, in portions. After `run`: `loop_lags_s` tells how late the loop served each heartbeat, and
    `in_flight_area_s` is the integral over time of the number of requests in flight.
    """

    def __init__(self, transport: Transport, keep: Callable[[Records], None], *, timeout_s: float) -> None:
        self.loop_lags_s = array("d")
        self.in_flight_area_s = 0.0
        self.max_in_flight = 0
        self._ledger = Ledger()
        self._keep = keep
        self._transport = transport
        self._timeout_s = timeout_s
        self._calls: dict[int, Call] = {}
        self._bodies: dict[int, Any] = {}
        self._changed_at = 0.0
        self._moved_s = 0.0
        self._pumping = False
        self._stopped = False
        self._done: asyncio.Future[None]

    async def run(self, agenda: Agenda, start: float, progress: Callable[[int, float], None]) -> None:
        """Sends everything; returns when the last request has ended or `stop` was called.

        `progress` is called now and then, and at the end, with the number of requests that have ended and with the
        time at which the server last moved: it sent a token, ended a request, or owed nothing.
        """
        self._agenda = agenda
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._moved_s = start
        self._alarm = Alarm(loop, self._pump)
        self._progress = progress
        self._beat_at = start
        self._heartbeat = Alarm(loop, self._beat)
        self._heartbeat.set(start)
        self._prepare(until=start - START_MARGIN_S)
        self._pump()
        await self._done
        self._keep(self._ledger.drain())
        progress(self._ledger.taken, self._moved_s)
        self._alarm.close()
        self._heartbeat.close()

    def stop(self) -> None:
        """Sends nothing more and gives up what is in flight."""
        self._stopped = True
        for call in list(self._calls.values()):
            self._transport.cancel(call, "interrupted")
        self._pump()

    def finished(self, call: Call) -> None:
        """Takes a call back from the transport."""
        self._count(call.end)
        self._moved_s = call.end
        del self._calls[call.index]
        self._ledger.add(call)
        self._agenda.ended(call.index, call.end)
        self._pump()

    def _pump(self) -> None:
        """Sends what is due, then sets the alarm for what is next."""
        if self._pumping:  # a call failed at once, within its send
            return
        self._pumping = True
        while not self._stopped and (due := self._agenda.next(now := monotonic())) is not None:
            call = Call(*due)
            body = self._bodies.pop(call.index, None) or self._transport.body(call.index)
            self._count(now)
            if not self._calls:
                self._moved_s = now
            self._calls[call.index] = call
            self.max_in_flight = max(self.max_in_flight, len(self._calls))
            if now - call.intended > self._timeout_s:
                call.sent = call.end = now
                call.error = f"not sent: it waited in the client beyond client.timeout_s={self._timeout_s:g} s"
                self.finished(call)
            else:
                self._transport.send(call, body)
        self._pumping = False
        if (self._stopped or self._agenda.done) and not self._calls:
            if not self._done.done():
                self._done.set_result(None)
        else:
            self._alarm.set(self._agenda.wake_at())
            self._prepare()

    def _prepare(self, until: float = math.inf) -> None:
        for index in self._agenda.coming():
            if index not in self._bodies and monotonic() < until:
                self._bodies[index] = self._transport.body(index)

    def _count(self, now: float) -> None:
        """Adds to the integral, before the number in flight changes."""
        self.in_flight_area_s += len(self._calls) * (now - self._changed_at)
        self._changed_at = now

    def _beat(self) -> None:
        now = monotonic()
        self.loop_lags_s.append(now - self._beat_at)
        expired = now - self._timeout_s
        moved_s = self._moved_s
        for call in [call for call in self._calls.values() if call.intended < expired]:
            self._transport.cancel(call, f"no complete answer within client.timeout_s={self._timeout_s:g} s")
        self._moved_s = moved_s  # that was us
        if self._ledger.holds:
            self._keep(self._ledger.drain())
        if len(self.loop_lags_s) % BEATS_PER_REPORT == 0:
            self._moved_s = max([moved_s, *(call.chunks[-1] for call in self._calls.values() if call.chunks)])
            self._progress(self._ledger.taken, self._moved_s if self._calls else now)
        self._beat_at = now + HEARTBEAT_S
        self._heartbeat.set(self._beat_at)
