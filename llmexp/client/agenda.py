"""Which request goes next, and when: the arrivals that a worker serves, in both kinds of load."""

import heapq
import os
from collections import deque
from collections.abc import Sequence
from typing import Protocol

Due = tuple[int, float, float]  # request, when it was due, when a place for it was free


class Agenda(Protocol):
    """What the driver asks. In one `follow[i]` is the request after i (-1: none) and `think_s[i]` the
    pause before i. `capped` counts the requests that a cap on requests in flight held back."""

    capped: int

    def next(self, now: float) -> Due | None:
        """The request to send now, if there is one; it counts as in flight from here on."""

    def ended(self, index: int, now: float) -> None:
        """A request has ended."""

    def wake_at(self) -> float | None:
        """When to ask next, if no request ends before."""

    def coming(self) -> Sequence[int]:
        """Requests that are likely next."""

    @property
    def done(self) -> bool:
        """Nothing is left to send."""


class ClosedLoop:
    """`slots` requests in flight; a slot that frees takes the next one, and keeps a conversation to its end.

    `claims` is a file of int64 request indices that all workers read through one shared offset, so that the
    requests start in the workload's order whichever worker takes them.
    """

    def __init__(self, claims: int, slots: int, start: float, follow: Sequence[int], think_s: Sequence[float]) -> None:
        self._claims = claims
        self._free = deque([start] * slots)  # since when each free slot has been so
        self._follow = follow
        self._think_s = think_s
        self._turns: list[tuple[float, int]] = []  # next turns of conversations, by when they are due
        self._claimed: deque[int] = deque()
        self._exhausted = False
        self.capped = 0

    def next(self, now: float) -> Due | None:
        if self._turns and self._turns[0][0] <= now:
            due, index = heapq.heappop(self._turns)
            return index, due, due
        if not self._free or self._free[0] > now or not self._claim(1):
            return None
        since = self._free.popleft()
        return self._claimed.popleft(), since, since

    def ended(self, index: int, now: float) -> None:
        follow = self._follow[index]
        if follow < 0:
            self._free.append(now)
        else:
            heapq.heappush(self._turns, (now + self._think_s[follow], follow))

    def wake_at(self) -> float | None:
        turn = self._turns[0][0] if self._turns else None
        start = self._free[0] if self._free and self._claim(1) else None
        return min((at for at in (turn, start) if at is not None), default=None)

    def coming(self) -> Sequence[int]:
        return self._claim(len(self._free) + 1)

    @property
    def done(self) -> bool:
        return not self._turns and not self._claim(1)

    def _claim(self, wanted: int) -> Sequence[int]:
        """The requests that this worker has claimed, `wanted` of them if so many are left."""
        while len(self._claimed) < wanted and not self._exhausted:
            entry = os.read(self._claims, 8)
            if entry:
                self._claimed.append(int.from_bytes(entry, "little"))
            else:
                self._exhausted = True
        return self._claimed


class OpenLoop:
    """Requests due at given times, held back only by a cap on how many are in flight."""

    LOOK_AHEAD = 4

    def __init__(
        self,
        first: Sequence[int],
        due: Sequence[float],
        cap: int | None,
        follow: Sequence[int],
        think_s: Sequence[float],
    ) -> None:
        self._first = first
        self._due = due
        self._at = 0
        self._places = cap if cap is not None else 1 << 60
        self._freed = float("-inf")  # when a place was last freed while none was
        self._follow = follow
        self._think_s = think_s
        self._turns: list[tuple[float, int]] = []
        self.capped = 0

    def next(self, now: float) -> Due | None:
        due = self.wake_at()
        if due is None or due > now or not self._places:
            return None
        if self._turns and self._turns[0][0] == due:
            _, index = heapq.heappop(self._turns)
        else:
            index = self._first[self._at]
            self._at += 1
        self._places -= 1
        self.capped += self._freed > due
        return index, due, max(due, self._freed)

    def ended(self, index: int, now: float) -> None:
        if not self._places:
            self._freed = now
        self._places += 1
        if (follow := self._follow[index]) >= 0:
            heapq.heappush(self._turns, (now + self._think_s[follow], follow))

    def wake_at(self) -> float | None:
        arrival = self._due[self._at] if self._at < len(self._due) else None
        turn = self._turns[0][0] if self._turns else None
        return min((at for at in (arrival, turn) if at is not None), default=None)

    def coming(self) -> Sequence[int]:
        return self._first[self._at : self._at + self.LOOK_AHEAD]

    @property
    def done(self) -> bool:
        return not self._turns and self._at == len(self._due)
