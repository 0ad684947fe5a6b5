"""When requests reach the engine: at their time, after the turn before, and no more at once than the client
allows."""

from heapq import heappop, heappush

from llmexp.simulate.requests import Requests


class Arrivals:
    """Requests that have not been sent, in order of the time that they are due (then of their index).

    With ``max_concurrency``, a client holds due requests back while that many are unfinished.
    """

    def __init__(self, requests: Requests, max_concurrency: int | None) -> None:
        self._requests = requests
        self._slots = len(requests) if max_concurrency is None else max_concurrency
        self._open_since_s = 0.0
        self._due = [(t, i) for i, t in enumerate(requests.arrival_s.tolist()) if requests.after[i] < 0]
        self._due.sort()  # a sorted list is a heap
        self._next_turns: dict[int, list[int]] = {}
        for i, before in enumerate(requests.after.tolist()):
            if before >= 0:
                self._next_turns.setdefault(before, []).append(i)

    @property
    def next_s(self) -> float | None:
        """When the next request is due, if one is and the client may send it."""
        return self._due[0][0] if self._due and self._slots else None

    def take(self, now_s: float) -> list[tuple[int, float]]:
        """Index and sending time of the requests sent until ``now_s``."""
        sent = []
        while self._slots and self._due and self._due[0][0] <= now_s:
            due_s, index = heappop(self._due)
            sent.append((index, max(due_s, self._open_since_s)))
            self._slots -= 1
        return sent

    def finish(self, index: int, now_s: float) -> None:
        """Request ``index`` is answered: the client may send another, and the next turn's clock starts."""
        if self._slots == 0:
            self._open_since_s = now_s
        self._slots += 1
        for turn in self._next_turns.get(index, ()):
            heappush(self._due, (now_s + float(self._requests.arrival_s[turn]), turn))
