"""Demand on the KV cache from traces whose overlaps are known."""

import pyarrow as pa
import pytest

from llmexp.client.records import TRACE_SCHEMA
from llmexp.measure.pressure import pressure_measures


def trace(*requests: tuple[float, float, int | None]) -> pa.Table:
    empty = dict.fromkeys(TRACE_SCHEMA.names)
    rows = [{**empty, "sent_s": sent, "end_s": end, "prompt_tokens": tokens} for sent, end, tokens in requests]
    return pa.Table.from_pylist(rows, schema=TRACE_SCHEMA)


def test_pressure_is_the_largest_demand_at_any_time() -> None:
    # 100 and 300 overlap; 400 begins in the instant in which 300 ends.
    found = pressure_measures(trace((0.0, 2.0, 100), (1.0, 3.0, 300), (3.0, 4.0, 350)), 1000)
    assert found == {"kv_capacity_tokens": 1000.0, "prompt_pressure": pytest.approx(0.4)}


def test_an_unknown_capacity_gives_no_measure() -> None:
    assert pressure_measures(trace((0.0, 2.0, 100)), None) == {}


def test_unknown_lengths_give_no_pressure() -> None:
    assert "prompt_pressure" not in pressure_measures(trace((0.0, 1.0, None)), 1000)
