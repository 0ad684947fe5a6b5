"""The table at the end of every multirun."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from llmexp.analyze.study import load_study
from llmexp.report.table import cells_table, number, ratio, to_markdown
from tests.analyze.synthetic import make_study


def render(folder: Path) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(cells_table(load_study(folder).compare()))
    return console.export_text()


def test_ratios_with_intervals_and_verdicts_within_100_columns(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": n, "workload.order": order} for n in ("32", "128") for order in ("sorted", "shuffled")]
    make_study(tmp_path / "s", cells=cells, trials=3, requests=50)
    comparison = load_study(tmp_path / "s").compare()
    text = render(tmp_path / "s")
    assert max(map(len, text.splitlines())) <= 100
    assert "3 trials, 90% intervals" in text
    assert f"{comparison.tested} comparisons at a false discovery rate of 10%" in " ".join(text.split())
    row = comparison.row("throughput_req_per_s", cells[3], "on")
    assert row is not None
    for words in ("off → on", f"{row.low:.2f} to {row.high:.2f}", "improves", "0.00 → 0.80", "3/3", "=shuffled"):
        assert words in text


def test_one_trial_is_not_replicated(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, requests=50)
    text = render(tmp_path / "s")
    row = load_study(tmp_path / "s").compare().row("throughput_req_per_s", {}, "on")
    assert row is not None
    assert f"{row.estimate:.2f}" in text
    assert "not replicated" in text
    assert "interval" not in text
    assert "improves" not in text


def test_two_trials_claim_no_interval(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=2, requests=50)
    text = render(tmp_path / "s")
    assert "no interval below 3 trials" in text
    assert " to " not in text.replace("ratio to", "")


def test_a_single_arm_shows_what_was_measured(tmp_path: Path) -> None:
    make_study(tmp_path / "s", compare=None, speedups={"": 1.0}, trials=1, requests=50)
    level = load_study(tmp_path / "s").compare().levels[0]
    text = render(tmp_path / "s")
    assert "nothing compared" in text
    assert "req/s" in text
    assert number(level.mean("e2e_ms_p95")) in text


def test_runs_left_out_show(tmp_path: Path) -> None:
    record = make_study(tmp_path / "s", trials=1, requests=50)
    (tmp_path / "s" / record.runs[0].name / "summary.json").unlink()
    text = render(tmp_path / "s")
    assert "0/1" in text
    assert "no valid pair" in text
    assert "1 run left out" in text


def test_simulated_numbers_say_so(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, requests=50, simulated=True)
    assert "SIMULATED" in render(tmp_path / "s")
    make_study(tmp_path / "m", trials=1, requests=50)
    assert "SIMULATED" not in render(tmp_path / "m")


def test_markdown_has_as_many_cells_in_every_line(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 2.0, "salted": 1.0}, trials=3, requests=50)
    lines = to_markdown(load_study(tmp_path / "s").compare()).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert ", " in lines[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.104, "2.10"), (0.4849, "0.485"), (1149.0, "1149"), (0.0, "0.00"), (28800.0, "28800"), (3e-7, "3.00e-07")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_ratios() -> None:
    assert [ratio(value) for value in (2.104, 0.4849, 0.052, None)] == ["2.10", "0.48", "0.052", "-"]
