import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.errors import ResultError
from llmexp.measure.accuracy import (
    ANSWERS_SCHEMA,
    accuracy,
    agreement,
    by_subject,
    letter,
    letter_logprobs,
    score,
    summary,
)
from llmexp.workloads.workload import Workload, packed


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilson_interval_by_its_formula(right: int, more: int) -> None:
    n = right + more
    z, p = 1.959963984540054, right / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    result = accuracy(right, n)
    assert result.low == pytest.approx(max(center - half, 0), abs=1e-9)
    assert result.high == pytest.approx(min(center + half, 1), abs=1e-9)


def test_nothing_to_score() -> None:
    with pytest.raises(ResultError, match="no answers"):
        accuracy(0, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("A", "A"), (" D", "D"), ("  A", None), ("a", None), ("AB", None), ("", None), (None, None), (" E", None)],
)
def test_letter_with_and_without_a_space(text: str | None, expected: str | None) -> None:
    assert letter(text) == expected


def test_letter_logprobs_add_spellings_and_are_among_the_four() -> None:
    shares = {" A": 0.2, "A": 0.1, " B": 0.1, " The": 0.5}
    found = letter_logprobs(json.dumps({token: math.log(share) for token, share in shares.items()}))
    assert {each: math.exp(logprob) for each, logprob in found.items()} == pytest.approx({"A": 0.75, "B": 0.25})
    assert letter_logprobs(json.dumps({" The": -0.1})) == {}
    assert letter_logprobs(None) == {}


def workload(answers: str) -> Workload:
    n = len(answers)
    prompt_at, lengths = packed([np.array([1], np.int32)] * n)
    columns = {
        "answer": np.array(list(answers), object),
        "subject": np.array(["law" if i % 2 else "art" for i in range(n)], object),
        "question": np.array([f"q{i}" for i in range(n)], object),
    }
    return Workload("mmlu", {}, prompt_at, lengths, np.ones(n, np.int32), columns=columns)


def trace(texts: list[str | None], logprobs: dict[int, dict[str, float]] | None = None) -> pa.Table:
    order = range(len(texts) - 1, -1, -1)  # a trace is not in the order of the workload
    return pa.table(
        {
            "round": pa.array([0] * len(texts), pa.int32()),
            "request": pa.array(list(order), pa.int32()),
            "text": pa.array([texts[i] for i in order], pa.string()),
            "logprobs": pa.array(
                [json.dumps((logprobs or {}).get(i)) if i in (logprobs or {}) else None for i in order], pa.string()
            ),
        }
    )


def test_scores_join_the_trace_with_the_workload() -> None:
    answers = score(workload("ABCD"), trace([" A", "C", None, "?"], {1: {" B": -0.5, "C": -1.0, "x": 0.0}}))
    assert answers.schema == ANSWERS_SCHEMA
    rows: dict[str, dict[str, Any]] = {row["question"]: row for row in answers.to_pylist()}
    assert [rows[f"q{i}"]["right"] for i in range(4)] == [True, False, False, False]
    assert [rows[f"q{i}"]["generated"] for i in range(4)] == ["A", "C", None, None]
    assert rows["q1"]["likeliest"] == "B"
    assert math.exp(rows["q1"]["answer_logprob"]) == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert rows["q0"]["answer_logprob"] is None
    assert {subject: (each.right, each.n) for subject, each in by_subject(answers).items()} == {
        "art": (1, 2),
        "law": (0, 2),
    }


def test_summary_is_plain() -> None:
    plain = json.loads(json.dumps(summary(score(workload("AB"), trace([" A", "?"], {1: {" B": -1.0}})))))
    assert plain["accuracy"]["right"] == 1
    assert plain["accuracy_of_likeliest_letter"]["right"] == 1
    assert plain["no_letter"] == 1
    assert plain["by_subject"]["law"]["n"] == 1


def test_agreement_by_hand() -> None:
    """Ten questions answered A: 1 and 6 by one arm only; exact McNemar of (1, 6) is 2 * (1 + 7) / 2**7."""
    first = score(workload("A" * 10), trace(["A"] * 2 + ["B"] * 6 + ["C", "A"]))
    second = score(workload("A" * 10), trace(["B"] + ["A"] * 7 + ["C", " A"]))
    result = agreement(first, second)
    assert (result.both_right, result.only_first_right, result.only_second_right, result.both_wrong) == (2, 1, 6, 1)
    assert result.p_value == pytest.approx(2 * 8 / 128)
    assert (result.n, result.same, result.share) == (10, 3, 0.3)
    assert sorted(result.differing) == [f"q{i}" for i in (0, 2, 3, 4, 5, 6, 7)]


def test_arms_that_agree() -> None:
    answers = score(workload("AB"), trace(["A", "A"]))
    result = agreement(answers, answers)
    assert (result.share, result.p_value, result.differing) == (1.0, 1.0, ())


def test_agreement_needs_the_same_questions_once() -> None:
    answers = score(workload("AB"), trace(["A", "A"]))
    with pytest.raises(ResultError, match="different questions; 1 are in one only, such as q1"):
        agreement(answers, score(workload("A"), trace(["A"])))
    with pytest.raises(ResultError, match="4 answers to 2 questions"):
        agreement(answers, pa.concat_tables([answers, answers]))
