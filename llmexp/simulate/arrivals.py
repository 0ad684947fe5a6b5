"""When requests reach the engine: at their time, after the turn before, no more at once than the client allows, and
through the front end."""

from collections import deque
from heapq import heappop, heappush
from math import nextafter

from llmexp.simulate.cost import NO_FRONT_END, FrontEnd
from llmexp.simulate.requests import Requests


class Arrivals:
    """Requests that have not reached the engine, in order of the time that they are due (then of their index).

    With ``max_concurrency``, a client holds due requests back while that many are unfinished. A next turn needs a
    place like any other request, unless ``keeps_place``: then a conversation has one from its first turn to its last.
    """

    def __init__(
        self,
        requests: Requests,
        max_concurrency: int | None,
        keeps_place: bool = False,
        front_end: FrontEnd = NO_FRONT_END,
    ) -> None:
        self._requests = requests
        self._keeps_place = keeps_place
        self._front_end = front_end
        self._busy_until_s = 0.0  # the front end
        places = len(requests) if max_concurrency is None else min(max_concurrency, len(requests))
        self._free_since_s = deque([0.0] * places)
        self._due = [(t, i) for i, t in enumerate(requests.arrival_s.tolist()) if requests.after[i] < 0]
        self._due.sort()  # a sorted list is a heap
        self._placed: list[tuple[float, int]] = []  # next turns that have their place
        self._next_turns: dict[int, list[int]] = {}
        for i, before in enumerate(requests.after.tolist()):
            if before >= 0:
                self._next_turns.setdefault(before, []).append(i)
        self._under_way: deque[tuple[float, int, float]] = deque()  # when each is through, index, when sent

    @property
    def next_s(self) -> float | None:
        """When the next request reaches the engine, or is sent on its way there."""
        return self._under_way[0][0] if self._under_way else self._next_sent_s()

    def take(self, now_s: float) -> list[tuple[int, float]]:
        """Index and sending time of the requests that reach the engine until ``now_s``."""
        self._send(now_s)
        taken = []
        while self._under_way and self._under_way[0][0] <= now_s:
            _, index, sent_s = self._under_way.popleft()
            taken.append((index, sent_s))
        return taken

    def hand_out(self, now_s: float, num_tokens: int, echoed_tokens: int) -> float:
        """A step has ended: when its tokens are with the clients, after the requests that were sent before."""
        self._send(nextafter(now_s, 0.0))
        self._busy_until_s = max(self._busy_until_s, now_s)
        if num_tokens:
            front_end = self._front_end
            spent_s = front_end.output_s + front_end.token_s * num_tokens + front_end.echo_s * echoed_tokens
            self._busy_until_s += spent_s
        return self._busy_until_s

    def finish(self, index: int, now_s: float) -> None:
        """The client has the whole answer to request ``index``: it may send another, and the next turn's clock
        starts."""
        turns = self._next_turns.get(index, ())
        if not (turns and self._keeps_place):
            self._free_since_s.append(now_s)
        queue = self._placed if self._keeps_place else self._due
        for turn in turns:
            heappush(queue, (now_s + float(self._requests.arrival_s[turn]), turn))

    def _send(self, now_s: float) -> None:
        while (sent_s := self._next_sent_s()) is not None and sent_s <= now_s:
            if self._placed and self._placed[0][0] == sent_s:
                index = heappop(self._placed)[1]
            else:
                self._free_since_s.popleft()
                index = heappop(self._due)[1]
            prompt_tokens = int(self._requests.prompt_tokens[index])
            spent_s = self._front_end.request_s + self._front_end.prompt_token_s * prompt_tokens
            self._busy_until_s = max(self._busy_until_s, sent_s) + spent_s
            self._under_way.append((self._busy_until_s, index, sent_s))

    def _next_sent_s(self) -> float | None:
        placed_s = self._placed[0][0] if self._placed else None
        if not (self._due and self._free_since_s):
            return placed_s
        due_s: float = max(self._due[0][0], self._free_since_s[0])
        return due_s if placed_s is None else min(due_s, placed_s)
