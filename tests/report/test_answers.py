"""What a report says of two arms' answers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp.analyze.study import load_study
from llmexp.measure.accuracy import ANSWERS_SCHEMA
from llmexp.report.report import write_report
from llmexp.results import ANSWERS, load_run
from tests.analyze.synthetic import make_study
from tests.analyze.test_pairs import change

BASE = "A" * 3 + "B" * 147
OTHER = "A" * 2 + "B" * 10 + "A" * 138  # one right answer lost, 138 won


def keep(run: Path, *rounds: str) -> None:
    rows = [
        {"round": r, "request": i, "question": f"law/{i}", "subject": "law", "answer": "A", "generated": letter}
        | {"right": letter == "A"}
        for r, letters in enumerate(rounds)
        for i, letter in enumerate(letters)
    ]
    pq.write_table(pa.Table.from_pylist(rows, ANSWERS_SCHEMA), run / ANSWERS)


def test_agreement_test_and_differing_questions(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, requests=20)
    base, other = sorted(record.runs, key=lambda plan: plan.arm)
    assert (base.arm, other.arm) == ("off", "on")
    keep(tmp_path / "s" / base.name, BASE, OTHER)
    keep(tmp_path / "s" / other.name, BASE, OTHER)  # its first round is invalid, so its second counts
    rounds = load_run(tmp_path / "s" / other.name).rounds
    change(tmp_path / "s" / other.name, rounds=(rounds[0].model_copy(update={"valid": False}), rounds[1]))
    written = write_report(load_study(tmp_path / "s"), tmp_path / "s")
    text = written.markdown.read_text()
    assert "| on | 0 | 11 of 150 | 0.0200 (0.00682 to 0.0571) | 0.933 (0.882 to 0.963) | 1 | 138 | 4.0e-40 |" in text
    assert "on, all, trial 0: 139 questions answered differently" in text
    assert "`law/2`, `law/12`" in text and "and 39 more in report.json" in text
    (found,) = json.loads(written.json.read_text())["questions"]
    assert (found["arm"], found["trial"], found["agreement"]["same"]) == ("on", 0, 11)
    assert found["agreement"]["differing"] == ["law/2", *(f"law/{i}" for i in range(12, 150))]
    assert found["agreement"]["p_value"] == pytest.approx(2 * (1 + 139) / 2**139)


def test_studies_without_answers_have_no_such_section(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, requests=20)
    written = write_report(load_study(tmp_path / "s"), tmp_path / "s")
    assert "## Answers" not in written.markdown.read_text()
    assert json.loads(written.json.read_text())["questions"] == []
