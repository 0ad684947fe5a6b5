"""The client's check of itself: did it send what was asked, when it was asked, and hold up no answer?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmexp.client.journal import Outcome

# A send, or the reading of a chunk, may be this late at p99, or this share of the median time to first token.
LAG_P99_LIMIT_MS = 2.0
LAG_P99_LIMIT_SHARE = 0.05
CPU_SHARE_LIMIT = 0.9
ACHIEVED_RATE_LIMIT = 0.95
IN_FLIGHT_LIMIT = 0.95


@dataclass(frozen=True)
class ClientCheck:
    """The client's account of a round. Past a limit of this module it is `saturated`, and `advice` says how.

    Lag is the time from when nothing but the client itself kept a request back (it was due, and a place under
    the cap on requests in flight was free) to when its bytes were handed on; loop lag is how late the event
    loop served a timer. Rates are of the requests that arrive by themselves, None in a closed loop.
    `asked_in_flight` is the concurrency of a closed loop or the cap of an open one. `mean_in_flight`
    integrates a count that the workers keep apart from the records; `littles_law_ratio` is its ratio to the
    product of throughput and mean time in system, from the records: 1 if none was lost or counted twice.
    """

    intended_rate_per_s: float | None
    achieved_rate_per_s: float | None
    lag_ms_p50: float
    lag_ms_p99: float
    loop_lag_ms_p99: float
    cpu_shares: tuple[float, ...]
    asked_in_flight: int | None
    max_in_flight: int
    mean_in_flight: float
    littles_law_ratio: float
    capped_requests: int
    saturated: bool
    advice: str


def check_client(
    trace: pa.Table,
    outcomes: Sequence[Outcome],
    *,
    lags_s: NDArray[np.float64],
    due_s: NDArray[np.float64] | None,
    first: NDArray[np.int32],
    asked_in_flight: int | None,
    keeps_full: bool,
    alone: bool = True,
    lag_limit_ms: float | None,
) -> ClientCheck:
    """Judges a round. `first` are the requests that arrive by themselves, due at `due_s` (None: closed loop).

    `lags_s` are the lags of all its requests; `lag_limit_ms` replaces this module's limit on them. `keeps_full` says
    that `asked_in_flight` requests should be in flight as long as there are some to send. A client that is not `alone`
    in its process shares lag and CPU with the engine there, so that they are part of what is measured and no limit
    applies to them.
    """
    lags_ms = lags_s * 1e3
    loop_lags_ms = np.concatenate([outcome.loop_lags_s for outcome in outcomes]) * 1e3
    lag_p50, lag_p99 = (_percentile(lags_ms, q) for q in (50, 99))
    loop_lag_p99 = _percentile(loop_lags_ms, 99)
    cpu_shares = tuple(round(outcome.cpu_s / outcome.wall_s, 4) for outcome in outcomes if outcome.wall_s > 0)

    sent, end = (trace[name].to_numpy() for name in ("sent_s", "end_s"))
    window_s = float(end.max() - sent.min()) if len(sent) else 0.0
    in_system_s = float((end - sent).sum())
    area_s = sum(outcome.in_flight_area_s for outcome in outcomes)
    peak, full = _in_flight(sent, end)

    intended_rate = achieved_rate = None
    if due_s is not None and len(first) > 1 and due_s[-1] > due_s[0]:
        intended_rate = (len(first) - 1) / float(due_s[-1] - due_s[0])
        arrived = sent[np.isin(trace["request"].to_numpy(), first)]
        span_s = float(arrived.max() - arrived.min()) if len(arrived) > 1 else 0.0
        achieved_rate = (len(arrived) - 1) / span_s if span_s > 0 else None

    ttft_ms = (trace["first_token_s"].to_numpy(zero_copy_only=False) - trace["intended_s"].to_numpy()) * 1e3
    if lag_limit_ms is None:
        lag_limit_ms = max(LAG_P99_LIMIT_MS, LAG_P99_LIMIT_SHARE * _percentile(ttft_ms[~np.isnan(ttft_ms)], 50))
    capped = sum(outcome.capped for outcome in outcomes)
    more = "raise client.workers, give the client cores of its own, or lower the load"
    late = f"{more}; client.lag_limit_ms sets another limit"
    problems = []
    if alone and lag_p99 > lag_limit_ms:
        problems.append(f"sends were {lag_p99:.2f} ms late at p99 (limit {lag_limit_ms:.2f} ms): {late}")
    if alone and loop_lag_p99 > lag_limit_ms:
        problems.append(f"the event loop was {loop_lag_p99:.2f} ms late at p99 (limit {lag_limit_ms:.2f} ms): {late}")
    if alone and max(cpu_shares, default=0.0) > CPU_SHARE_LIMIT:
        problems.append(f"a worker used {max(cpu_shares):.0%} of a core (limit {CPU_SHARE_LIMIT:.0%}): {more}")
    if intended_rate and achieved_rate and achieved_rate < ACHIEVED_RATE_LIMIT * intended_rate:
        cause = f"raise load.max_in_flight ({capped} requests waited for it)" if capped else more
        problems.append(f"sent {achieved_rate:.2f} requests/s, not {intended_rate:.2f}: {cause}")
    asked = min(asked_in_flight or 0, len(sent)) if keeps_full else 0
    if full < IN_FLIGHT_LIMIT * asked:
        problems.append(f"only {full:.1f} of {asked} requests were in flight on average: {more}")

    return ClientCheck(
        intended_rate_per_s=intended_rate,
        achieved_rate_per_s=achieved_rate,
        lag_ms_p50=lag_p50,
        lag_ms_p99=lag_p99,
        loop_lag_ms_p99=loop_lag_p99,
        cpu_shares=cpu_shares,
        asked_in_flight=asked_in_flight,
        max_in_flight=peak,
        mean_in_flight=area_s / window_s if window_s > 0 else 0.0,
        littles_law_ratio=area_s / in_system_s if in_system_s > 0 else 1.0,
        capped_requests=capped,
        saturated=bool(problems),
        advice="; ".join(problems),
    )


def _percentile(values: NDArray[np.float64], q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else 0.0


def _in_flight(sent: NDArray[np.float64], end: NDArray[np.float64]) -> tuple[int, float]:
    """Most requests in flight at once, and their mean number from the first peak to the last send."""
    if not len(sent):
        return 0, 0.0
    times = np.concatenate([sent, end])
    steps = np.concatenate([np.ones(len(sent), int), -np.ones(len(end), int)])
    order = np.lexsort((steps, times))  # a place is free before it is taken again
    times, counts = times[order], np.cumsum(steps[order])
    peak = int(counts.argmax())
    last = int(np.searchsorted(times, sent.max()))
    spans = np.diff(times[peak : last + 1])
    total = float(spans.sum())
    mean = float((counts[peak:last] * spans).sum()) / total if total > 0 else float(counts[peak])
    return int(counts[peak]), mean
