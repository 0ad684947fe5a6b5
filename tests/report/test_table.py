"""The table at the end of every multirun."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmexp.analyze.compare import Comparison, Level
from llmexp.analyze.study import load_study
from llmexp.report.table import HEADLINES, cells_table, legend, number, ratio, to_markdown
from tests.analyze.synthetic import make_study, same_in_every_trial


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
    for words in ("off → on", f"{row.low:.2f} to {row.high:.2f}", "improves", "0.00 →", "3/3", "order=shuffled"):
        assert words in text


SHAPES = (("16", "3570", "23", "8"), ("64", "3570", "23", "8"), ("64", "168", "32", "256"))
KEYS = [f"workload.{name}" for name in ("num_requests", "prefix_tokens", "suffix_tokens", "output_tokens")]


def test_long_names_of_cells_leave_every_word_whole(tmp_path: Path) -> None:
    engines = ("vllm_server", "vllm_async")
    cells = [
        {"engine": engine, **dict(zip(KEYS, shape, strict=True)), "rounds": "2"}
        for engine in engines
        for shape in SHAPES
    ]
    speedups = {"1": 1.0, "2": 1.0}
    make_study(
        tmp_path / "s", cells=cells, trials=3, requests=60, compare="gpu.tensor_parallel_size", speedups=speedups
    )
    text = render(tmp_path / "s")
    assert max(map(len, text.splitlines())) <= 100
    rows = [row for row in load_study(tmp_path / "s").compare().rows if row.measure in HEADLINES]
    assert text.count("inconclusive") == sum(row.verdict == "inconclusive" for row in rows) > 6
    assert text.split().count("prefix_tokens=3570") == 5
    legend = (
        "Cells by engine, workload.{num_requests,prefix_tokens,suffix_tokens,output_tokens}; all with rounds=2; "
        "prefix_tokens=3570 with suffix_tokens=23 output_tokens=8; "
        "prefix_tokens=168 with suffix_tokens=32 output_tokens=256."
    )
    assert legend in " ".join(text.split())
    assert all(text.count(word) == 1 for word in ("rounds=2", "workload.", "suffix_tokens=23", "output_tokens=8"))
    markdown = to_markdown(load_study(tmp_path / "s").compare())
    assert "| engine=vllm_async num_requests=64 prefix_tokens=168 |" in markdown


def test_short_names_stay_apart(tmp_path: Path) -> None:
    cells = [{"model.path": model, "workload.path": path} for model in ("a", "b") for path in ("x", "y")]
    make_study(tmp_path / "s", cells=cells, trials=1, requests=20)
    comparison = load_study(tmp_path / "s").compare()
    assert comparison.label(cells[1]) == "model.path=a workload.path=y"
    make_study(tmp_path / "t", cells=[{"a": "1"}, {"a": "1", "b": "2"}], trials=1, requests=20)
    assert [load_study(tmp_path / "t").compare().label(cell) for cell in ({"a": "1"}, {"a": "1", "b": "2"})] == [
        "a=1",
        "b=2",
    ]


@given(st.lists(st.tuples(*[st.sampled_from("123")] * 4), min_size=2, max_size=6, unique=True))
def test_labels_tell_all_cells_apart(values: list[tuple[str, ...]]) -> None:
    cells = [dict(zip(("a.x", "b.x", "b.y", "z"), cell, strict=True)) for cell in values]
    levels = tuple(Level(cell, "", 1, (), (), {}) for cell in cells)
    comparison = Comparison("s", None, None, 1, 0.9, 0.05, frozenset(), (), levels, (), (), (), 0)
    labels = [comparison.label(cell) for cell in cells]
    assert len({*labels}) == len(cells)
    said = legend(comparison)
    for key in cells[0]:
        for value in {cell[key] for cell in cells}:  # everything is told, in the labels or once for all
            name = key if key in comparison.common else comparison.names[key]
            assert f"{name}={value}" in " ".join([*labels, said])
        assert (key in comparison.common) == (len({cell[key] for cell in cells}) == 1)


def test_one_cell_needs_no_column(tmp_path: Path) -> None:
    make_study(tmp_path / "s", cells=[{"max_num_seqs": "8"}], trials=1, requests=50)
    text = render(tmp_path / "s")
    assert "cell" not in text and "All with max_num_seqs=8." in text


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
    assert "no interval" in text and "No interval below 3 trials." in text
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


def test_a_simulation_repeated_looks_like_no_replication(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=50, simulated=True, trial_noise=0)
    same_in_every_trial(tmp_path / "s")
    text = render(tmp_path / "s")
    assert "deterministic" in text and "the same in every trial" in " ".join(text.split())
    assert not {"improves", "to", "Verdicts:", "intervals"} & {*text.replace("ratio to", "").split()}


def test_intervals_of_a_simulation_are_over_workloads(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=50, simulated=True)
    text = render(tmp_path / "s")
    assert "90% intervals over workloads" in text and "Verdicts over workloads:" in text
    make_study(tmp_path / "one", trials=1, requests=50, simulated=True)
    assert "one workload" in render(tmp_path / "one") and "not replicated" not in render(tmp_path / "one")


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


@pytest.mark.parametrize("width", [100, 80, 70])
def test_a_narrow_terminal_breaks_names_behind_their_signs_and_no_word_or_number(width: int, tmp_path: Path) -> None:
    cells = [{"kv.gpu_memory_utilization": value, "engine": "vllm_server"} for value in ("0.1063", "0.1325")]
    make_study(tmp_path / "s", cells=cells, requests=50)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(cells_table(load_study(tmp_path / "s").compare(), width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    told = text.split()
    assert told.count("improves") == 6 and {"0.1063", "0.1325", "throughput", "valid"} <= set(re.split(r"[\s=]", text))
    assert ("gpu_memory_utilization=" in told) == (width == 80)
    assert ("gpu_memory_" in told) == (width == 70)
