"""Effects on single requests, paired by their index in the workload."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp.analyze.requests import latencies, request_effects
from llmexp.analyze.study import load_study
from llmexp.results import TRACE, load_run
from tests.analyze.synthetic import make_study
from tests.analyze.test_pairs import change


def test_latencies_count_from_when_a_request_was_due(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, rounds=2, requests=6)
    folder = tmp_path / "s" / record.runs[0].name
    run = load_run(folder)
    rows = run.trace().to_pylist()
    rows[2]["error"] = "timeout"
    trace = pa.Table.from_pylist(rows[::-1], schema=run.trace().schema)  # the order of rows means nothing
    pq.write_table(trace, folder / TRACE)
    table = latencies(run, "ttft_ms")
    assert table.shape == (2, 6)
    assert np.isnan(table[0, 2])
    assert table[1, 4] == pytest.approx(1000 * (rows[10]["first_token_s"] - rows[10]["intended_s"]))
    invalid = run.rounds[0].model_copy(update={"valid": False})
    alone = latencies(change(folder, rounds=(invalid, run.rounds[1])), "ttft_ms")
    assert alone == pytest.approx(table[1:])


def test_the_effect_on_the_same_request(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 2.0}, trials=3, requests=100, trial_noise=0.0)
    comparison = load_study(tmp_path / "s").compare()
    found = {(one.measure, one.statistic): one for one in request_effects(comparison.pairings, confidence=0.9)}
    assert set(found) == {(m, s) for m in ("ttft_ms", "e2e_ms") for s in ("paired", "p50", "p95")}
    for effect in found.values():
        assert effect.low < 0.5 < effect.high
        assert effect.requests == 300
        assert effect.faster > 0.99
    paired, p95 = found["ttft_ms", "paired"], found["ttft_ms", "p95"]
    assert np.log(paired.high / paired.low) < np.log(p95.high / p95.low)  # pairing cancels what requests differ in


def test_without_traces_or_with_few_requests_nothing_is_said(tmp_path: Path) -> None:
    record = make_study(tmp_path / "few", trials=3, requests=8)
    assert request_effects(load_study(tmp_path / "few").compare().pairings, confidence=0.9) == ()
    record = make_study(tmp_path / "s", trials=3, requests=24)
    for plan in record.runs:
        (tmp_path / "s" / plan.name / TRACE).unlink()
    assert request_effects(load_study(tmp_path / "s").compare().pairings, confidence=0.9) == ()
