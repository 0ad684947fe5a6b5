from typing import Any

import numpy as np
import pytest

from llmexp.client.check import (
    ACHIEVED_RATE_LIMIT,
    CPU_SHARE_LIMIT,
    IN_FLIGHT_LIMIT,
    LAG_P99_LIMIT_MS,
    ClientCheck,
    check_client,
)
from llmexp.client.gather import gather
from llmexp.client.journal import Outcome
from llmexp.client.ledger import ROW, UNKNOWN, Records

N = 200


def checked(
    *,
    lag_s: float = 0.0,
    loop_lag_s: float = 0.0,
    cpu_share: float = 0.5,
    ttft_s: float = 0.01,
    stay_s: float = 0.04,
    stretch: float = 1.0,
    closed: bool = False,
    asked_in_flight: int | None = None,
    capped: int = 0,
    lost: int = 0,
    lag_limit_ms: float | None = None,
    alone: bool = True,
) -> ClientCheck:
    """The check of 200 requests due every 10 ms, each in the system for `stay_s`; at 40 ms, four at once."""
    due = np.arange(N) * 0.01
    rows = np.zeros(N, ROW)
    rows["request"] = np.arange(N)
    rows["intended"] = due
    rows["ready"] = due * stretch
    rows["sent"] = due * stretch + lag_s
    rows["end"] = rows["sent"] + stay_s
    rows["num_chunks"] = 1
    rows["output_tokens"] = UNKNOWN
    area = float((rows["end"] - rows["sent"]).sum())
    records = Records(rows[lost:], (due + ttft_s)[lost:], ["length"] * (N - lost), {}, {}, {}, {})
    outcome = Outcome(
        loop_lags_s=np.full(50, loop_lag_s),
        in_flight_area_s=area,
        max_in_flight=4,
        capped=capped,
        cpu_s=cpu_share * 2.0,
        wall_s=2.0,
    )
    return check_client(
        gather({0: records}, round_index=0, origin=0.0),
        [outcome],
        lags_s=records.rows["sent"] - records.rows["ready"],
        due_s=None if closed else due,
        first=np.arange(N, dtype=np.int32),
        asked_in_flight=asked_in_flight,
        keeps_full=closed,
        lag_limit_ms=lag_limit_ms,
        alone=alone,
    )


def test_a_client_that_keeps_up() -> None:
    check = checked()
    assert not check.saturated and check.advice == ""
    assert check.intended_rate_per_s == pytest.approx(100)
    assert check.achieved_rate_per_s == pytest.approx(100)
    assert check.max_in_flight in (4, 5)  # the fifth comes as the first goes, to within rounding
    assert check.mean_in_flight == pytest.approx(0.04 * N / (1.99 + 0.04))
    assert check.littles_law_ratio == pytest.approx(1)


@pytest.mark.parametrize(
    ("past", "within", "words"),
    [
        ({"lag_s": LAG_P99_LIMIT_MS * 1.1e-3}, {"lag_s": LAG_P99_LIMIT_MS * 0.9e-3}, "sends were"),
        ({"lag_s": 0.02}, {"lag_s": 0.02, "ttft_s": 0.5}, "client.workers"),  # little beside a long TTFT
        ({"lag_s": 0.02}, {"lag_s": 0.02, "lag_limit_ms": 25.0}, "client.workers"),
        ({"lag_s": 0.02, "cpu_share": 1.0}, {"lag_s": 0.02, "cpu_share": 1.0, "alone": False}, "of a core"),
        ({"loop_lag_s": LAG_P99_LIMIT_MS * 1.1e-3}, {"loop_lag_s": LAG_P99_LIMIT_MS * 0.9e-3}, "loop was"),
        ({"cpu_share": CPU_SHARE_LIMIT + 0.01}, {"cpu_share": CPU_SHARE_LIMIT - 0.01}, "of a core"),
        ({"stretch": 1.01 / ACHIEVED_RATE_LIMIT}, {"stretch": 0.99 / ACHIEVED_RATE_LIMIT}, "requests/s"),
        (
            {"stretch": 2.0, "capped": 7, "asked_in_flight": 4},
            {"capped": 7, "asked_in_flight": 4},
            "raise load.max_in_flight (7 requests",
        ),
        (
            {"closed": True, "asked_in_flight": 6},
            {"closed": True, "asked_in_flight": int(4 / IN_FLIGHT_LIMIT)},
            "of 6 requests were in flight",
        ),
    ],
)
def test_each_limit_is_a_limit(past: dict[str, Any], within: dict[str, Any], words: str) -> None:
    assert not checked(**within).saturated
    check = checked(**past)
    assert check.saturated
    assert words in check.advice


def test_a_lost_record_breaks_littles_law() -> None:
    assert checked(lost=N // 10).littles_law_ratio == pytest.approx(1 / 0.9)


def test_a_closed_loop_has_no_rates() -> None:
    check = checked(closed=True)
    assert check.intended_rate_per_s is check.achieved_rate_per_s is None
