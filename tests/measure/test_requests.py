from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.client.records import TRACE_SCHEMA
from llmexp.measure.catalog import MEASURES
from llmexp.measure.requests import request_measures
from llmexp.schema.load import SloConfig

NO_SLO = SloConfig()


def row(request: int = 0, **values: Any) -> dict[str, Any]:
    """A completed request: due at 0, sent at 0.01, tokens at 0.1, 0.2 and 0.4 s, ended at 0.5 s."""
    chunks = values.pop("chunk_s", [0.1, 0.2, 0.4])
    ends = {"first_token_s": chunks[0], "last_token_s": chunks[-1]} if chunks else {}
    return {
        "round": 0,
        "request": request,
        "worker": 0,
        "intended_s": 0.0,
        "sent_s": 0.01,
        **ends,
        "end_s": 0.5,
        "chunk_s": chunks,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "finish_reason": "length",
        **values,
    }


def trace(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=TRACE_SCHEMA)


def test_one_round_of_two_requests() -> None:
    measures, percentiles = request_measures(
        trace(row(), row(1, intended_s=0.2, sent_s=0.2, chunk_s=[0.5, 0.9, 1.7], end_s=2.01)), NO_SLO
    )
    assert measures == pytest.approx(
        {
            "duration_s": 2.0,  # from 0.01 to 2.01
            "throughput_req_per_s": 1.0,
            "throughput_output_tokens_per_s": 3.0,
            "throughput_total_tokens_per_s": 13.0,
            "mean_in_flight": (0.49 + 1.81) / 2.0,
            "ttft_ms_mean": (100 + 300) / 2,  # from when they were due, not from when they were sent
            "tpot_ms_mean": (150 + 600) / 2,
            "itl_ms_mean": (100 + 200 + 400 + 800) / 4,
            "e2e_ms_mean": (400 + 1500) / 2,
            "client_wait_ms_mean": 5.0,
            "failed_requests": 0,
            "requests_without_usage": 0,
            "tokens_per_chunk": 1.0,
        }
    )
    assert percentiles["itl_ms_p50"].n == 4
    assert percentiles["itl_ms_p50"].value is None  # four values support no median


def test_gaps_between_requests_are_no_inter_token_latency() -> None:
    rows = [row(i, chunk_s=[10.0 * i, 10.0 * i + 0.25]) for i in range(50)]
    _, percentiles = request_measures(trace(*rows), NO_SLO)
    assert percentiles["itl_ms_p99"].n == 50
    assert percentiles["itl_ms_p90"].value == pytest.approx(250)


def test_failed_requests_count_as_failed_and_nowhere_else() -> None:
    good = [row(i) for i in range(3)]
    failed = row(3, chunk_s=[5.0, 9.0], error="closed", output_tokens=None, end_s=0.5)
    silent = row(4, chunk_s=[], error="HTTP 500", output_tokens=None, end_s=0.4)
    measures, percentiles = request_measures(trace(*good, failed, silent), NO_SLO)
    assert measures["failed_requests"] == 2
    assert measures["throughput_req_per_s"] == pytest.approx(3 / 0.49)
    assert measures["ttft_ms_mean"] == pytest.approx(100)
    assert percentiles["itl_ms_p50"].n == 6


def test_bundled_tokens_count_by_usage_and_mark_the_itl() -> None:
    measures, _ = request_measures(trace(row(chunk_s=[0.1, 0.4], output_tokens=6)), NO_SLO)
    assert measures["tokens_per_chunk"] == 3
    assert measures["tpot_ms_mean"] == pytest.approx(300 / 5)
    assert measures["itl_ms_mean"] == pytest.approx(300)
    assert measures["throughput_output_tokens_per_s"] == pytest.approx(6 / 0.49)


def test_no_tpot_without_two_tokens_in_two_chunks() -> None:
    one_token = row(0, chunk_s=[0.1], output_tokens=1)
    one_chunk = row(1, chunk_s=[0.1], output_tokens=5)
    no_usage = row(2, output_tokens=None)
    measures, percentiles = request_measures(trace(one_token, one_chunk, no_usage), NO_SLO)
    assert "tpot_ms_mean" not in measures
    assert percentiles["tpot_ms_p50"].n == 0
    assert measures["requests_without_usage"] == 1


def test_rounds_are_pooled_for_latencies_and_averaged_for_rates() -> None:
    second = row(0, round=1, sent_s=0.0, end_s=1.0, chunk_s=[0.3, 0.4, 0.5])
    measures, _ = request_measures(trace(row(0), row(1), second, row(1, round=1, error="x")), NO_SLO)
    assert measures["throughput_req_per_s"] == pytest.approx((2 / 0.49 + 1 / 1.0) / 2)
    assert measures["duration_s"] == pytest.approx((0.49 + 1.0) / 2)
    assert measures["ttft_ms_mean"] == pytest.approx((100 + 100 + 300) / 3)
    assert measures["failed_requests"] == 1


def test_an_empty_trace_has_no_measures() -> None:
    assert request_measures(trace(), NO_SLO) == ({}, {})


def test_every_name_is_in_the_catalog() -> None:
    measures, percentiles = request_measures(trace(row()), SloConfig(ttft_ms=100.0))
    assert set(measures) | set(percentiles) <= set(MEASURES)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ({"ttft_ms": 150.0}, 1),
        ({"ttft_ms": 250.0}, 2),
        ({"tpot_ms": 120.0}, 2),  # the third, and the second, which has no TPOT
        ({"ttft_ms": 250.0, "tpot_ms": 120.0}, 1),
        ({"e2e_ms": 350.0}, 2),
        ({"ttft_ms": 50.0}, 0),
    ],
)
def test_goodput_counts_the_requests_that_meet_all_objectives(slo: dict[str, float], met: int) -> None:
    rows = [
        row(0),  # TTFT 100, TPOT 150, e2e 400
        row(1, chunk_s=[0.2], output_tokens=1),  # TTFT 200, no TPOT, e2e 200
        row(2, chunk_s=[0.3, 0.31, 0.32]),  # TTFT 300, TPOT 10, e2e 320
        row(3, chunk_s=[0.01, 0.02, 0.03], error="closed"),
    ]
    measures, _ = request_measures(trace(*rows), SloConfig(**slo))
    assert measures["goodput_share"] == met / 4
    assert measures["goodput_req_per_s"] == pytest.approx(met / 0.49)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 1), st.floats(0.001, 20)), min_size=1, max_size=60))
def test_littles_law_holds_in_every_trace(requests: list[tuple[float, float, float]]) -> None:
    rows = [
        row(i, intended_s=due, sent_s=due + wait, chunk_s=[due + wait + stay], end_s=due + wait + stay)
        for i, (due, wait, stay) in enumerate(requests)
    ]
    measures, _ = request_measures(trace(*rows), NO_SLO)
    # Mean in flight, by counting at the middle of every interval between two events.
    sent, end = (np.array([r[name] for r in rows]) for name in ("sent_s", "end_s"))
    times = np.unique(np.concatenate([sent, end]))
    middles = (times[1:] + times[:-1]) / 2
    counts = ((sent[:, None] < middles) & (middles < end[:, None])).sum(axis=0)
    mean = (counts * np.diff(times)).sum() / (times[-1] - times[0])
    assert measures["mean_in_flight"] == pytest.approx(mean)
    assert measures["throughput_req_per_s"] * np.mean(end - sent) == pytest.approx(mean)
