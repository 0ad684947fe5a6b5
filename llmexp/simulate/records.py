"""What a simulation records: steps, requests, and spans (who was scheduled when)."""

from typing import NamedTuple

import numpy as np

from llmexp.simulate.cost import Work
from llmexp.simulate.requests import Floats, Ints, Requests
from llmexp.simulate.scheduler import Scheduler, Step
from llmexp.simulate.sequence import Sequence

# kernel.py is compiled with the places of these names; its cache on disk knows only kernel.py's own changes, so
# touch that file when one of these tuples changes.
STEP_TIMES = (
    "scheduled_s",
    "start_s",  # as it was scheduled, or as the step before ended, if that was later
    "duration_s",  # until the engine has its tokens
    "delivered_s",  # the clients have them
)
STEP_COUNTS = (
    "running",  # sequences in the batch, scheduled in this step or not
    "waiting",
    "scheduled",
    "prefill_tokens",
    "decode_tokens",
    "sampled",
    "attended_pairs",
    "context_tokens",
    "free_blocks",  # after scheduling
    "admitted",
    "preempted",
    "finished",  # at the end of the step
    "queries",  # prefix cache statistics in tokens, as vLLM counts them
    "hits",
    "preempted_queries",
    "preempted_hits",
)
REQUEST_TIMES = ("sent_s", "admitted_s", "first_token_s", "finished_s")
REQUEST_COUNTS = ("cached_tokens", "preemptions")
SPAN_COUNTS = (
    "request",
    "first_step",
    "steps",  # consecutive ones; more than one only when decoding
    "tokens",  # per step
    "context",  # tokens computed before
    "sampled",  # tokens generated per step: 1 or, amid a prefill, 0
)


class Tables(NamedTuple):
    """Numbers in rows, named by the tuples above. Times float64, counts int64; spans by request and step."""

    step_times: Floats
    step_counts: Ints
    request_times: Floats
    request_counts: Ints
    spans: Ints


class Recorder:
    """Collects ``Tables`` while the plain loop runs."""

    def __init__(self, requests: Requests) -> None:
        self._request_times = np.full((len(requests), len(REQUEST_TIMES)), np.nan)
        self._request_counts = np.zeros((len(requests), len(REQUEST_COUNTS)), np.int64)
        self._step_times: list[tuple[float, float, float, float]] = []
        self._step_counts: list[list[int]] = []
        self._spans: list[list[int]] = []
        self._decoding: dict[int, list[int]] = {}  # each request's latest span of decode steps

    def sent(self, index: int, sent_s: float) -> None:
        self._request_times[index, 0] = sent_s

    def scheduled(self, step: Step, scheduler: Scheduler, work: Work, now_s: float) -> int:
        """A step was decided. Returns its number."""
        number = len(self._step_counts)
        sampled = set(step.sampled)
        for seq in step.admitted:
            if seq.num_preemptions == 0:
                self._request_times[seq.index, 1] = now_s
                self._request_counts[seq.index, 0] = seq.num_computed - step.scheduled[seq]
        for seq in step.preempted:
            self._request_counts[seq.index, 1] += 1
        for seq, num_new in step.scheduled.items():
            self._span(number, seq, num_new, seq in sampled)
        self._step_times.append((now_s, now_s, 0.0, now_s))
        self._step_counts.append(
            [
                len(scheduler.running),
                len(scheduler.waiting),
                len(step.scheduled),
                *map(int, work[1:]),
                scheduler.cache.num_free_blocks,
                len(step.admitted),
                len(step.preempted),
                0,
                step.queries,
                step.hits,
                step.preempted_queries,
                step.preempted_hits,
            ]
        )
        return number

    def computed(
        self,
        number: int,
        emitted: list[Sequence],
        finished: list[Sequence],
        start_s: float,
        now_s: float,
        delivered_s: float,
    ) -> None:
        """Step ``number`` ended at ``now_s``."""
        scheduled_s = self._step_times[number][0]
        self._step_times[number] = (scheduled_s, start_s, now_s - start_s, delivered_s)
        for seq in emitted:
            if not self.has_answered(seq):
                self._request_times[seq.index, 2] = now_s
        for seq in finished:
            self._request_times[seq.index, 3] = now_s
        self._step_counts[number][STEP_COUNTS.index("finished")] = len(finished)

    def has_answered(self, seq: Sequence) -> bool:
        """Whether the request's first token has come."""
        return not np.isnan(self._request_times[seq.index, 2])

    def tables(self) -> Tables:
        return Tables(
            np.array(self._step_times, np.float64).reshape(-1, len(STEP_TIMES)),
            np.array(self._step_counts, np.int64).reshape(-1, len(STEP_COUNTS)),
            self._request_times,
            self._request_counts,
            sorted_spans(np.array(self._spans, np.int64).reshape(-1, len(SPAN_COUNTS))),
        )

    def _span(self, number: int, seq: Sequence, num_new: int, samples: bool) -> None:
        decodes = num_new == 1 and samples and seq.num_computed > seq.prompt_tokens
        latest = self._decoding.get(seq.index)
        if decodes and latest and latest[1] + latest[2] == number:
            latest[2] += 1
            return
        span = [seq.index, number, 1, num_new, seq.num_computed - num_new, samples]
        self._spans.append(span)
        if decodes:
            self._decoding[seq.index] = span


def sorted_spans(spans: Ints) -> Ints:
    rows: Ints = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    return rows
