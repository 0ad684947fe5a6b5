"""What a report says beside the comparison: budgets that do not start, pressure, searches, devices, doubts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.analyze.intervals import t_interval
from llmexp.analyze.study import Study, load_study
from llmexp.report.evidence import device_section, engine_section, weaknesses
from llmexp.report.markdown import brief
from llmexp.report.plots import plots
from llmexp.report.report import write_report
from llmexp.report.run_table import verdict
from llmexp.report.search import search_section
from llmexp.report.sentences import http_costs, sentence
from llmexp.report.style import colour, line, marker
from llmexp.report.table import caption, number
from llmexp.report.tensor_parallel import tensor_parallel_section
from llmexp.results import Percentile, RunResult, SearchRecord, load_run, save_run, save_search
from tests.analyze.synthetic import make_study

GIB = 2**30
KEY = "kv.gpu_memory_utilization"


def edit(folder: Path, change: Callable[[RunResult], dict[str, Any]]) -> Study:
    """Rewrites every run of a study."""
    for path in sorted(folder.glob("*/summary.json")):
        run = load_run(path.parent)
        save_run(run.model_copy(update=change(run)))
    return load_study(folder)


def measured(run: RunResult, **measures: float) -> dict[str, Any]:
    rounds = [one.model_copy(update={"measures": {**one.measures, **measures}}) for one in run.rounds]
    return {"rounds": tuple(rounds)}


def with_budget(budget: float) -> Callable[[RunResult], dict[str, Any]]:
    """A device of 100 GiB whose weights take 10, and a KV cache of 64 KiB a token that needs half a GiB."""

    def change(run: RunResult) -> dict[str, Any]:
        left = (float(run.cell.get(KEY, run.arm)) * 100 - 10) * GIB
        engine = {"kv_bytes_per_token": 65536, "kv_capacity_tokens": left / 65536}
        if left < budget * GIB:
            lacks = {"needed_bytes": int(budget * GIB), "available_bytes": int(left)}
            nothing: dict[str, Any] = {"measures": {}, "percentiles": {}, "rounds": (), "valid": False}
            return nothing | {"status": "refused", "engine": lacks, "error": "too little\nlog: /somewhere"}
        pressure = 200_000 * 65536 / left
        queue = Percentile(value=None, low=0, high=300, n=24)
        found = measured(run, kv_capacity_tokens=left / 65536, prompt_pressure=pressure, preemptions=3 * pressure)
        rounds = [one.model_copy(update={"percentiles": {"queue_ms_p95": queue}}) for one in found["rounds"]]
        return {"rounds": tuple(rounds), "engine": run.engine | engine}

    return change


@pytest.fixture(scope="module")
def budgets(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Four budgets, the smallest of which does not start."""
    folder = tmp_path_factory.mktemp("budgets") / "kv"
    cells = [{KEY: budget} for budget in ("0.104", "0.9", "0.2", "0.11")]
    make_study(folder, cells=cells, trials=3, requests=8, rounds=1)
    return edit(folder, with_budget(0.5))


def test_a_budget_that_does_not_start_is_a_result(budgets: Study) -> None:
    comparison = budgets.compare()
    first = comparison.pairings[0]
    expected = (
        "gpu_memory_utilization=0.104: the engine does not start for lack of memory (0.40 of the 0.50 GiB needed)."
    )
    assert sentence(comparison, first, "throughput_req_per_s") == expected
    assert "6 runs did not start for lack of memory." in caption(comparison)
    assert "left out" not in caption(comparison)
    text = write_report(budgets, budgets.folder).markdown.read_text()
    assert "24 planned, 18 used, 6 found too little memory to start, 0 left out" in text
    assert "/somewhere" not in text


def test_budgets_stand_in_the_order_of_their_capacity(budgets: Study) -> None:
    title, table, _ = engine_section(budgets, budgets.compare())
    assert title == "## KV budgets"
    lines = [row for row in table.splitlines()[2:] if "| on |" in row]
    assert [row.split(" | ")[0] for row in lines] == [
        f"| gpu_memory_utilization={budget}" for budget in ("0.9", "0.2", "0.11", "0.104")
    ]
    assert "1,310,720 tokens (80.00 GiB)" in lines[0]
    assert "0.800 of 0.800" in lines[0] and "0 to 300" in lines[0]
    assert "does not start (0.40 of the 0.50 GiB needed)" in lines[3]


def test_the_pressure_is_drawn_with_the_budgets_that_do_not_start(budgets: Study) -> None:
    figure = {plot.name: plot.figure for plot in plots(budgets, budgets.compare())}["pressure"]
    hits, ratios, preemptions = figure.axes
    assert "0.40 of the 0.50 GiB needed" in hits.texts[0].get_text()
    drawn = {text.get_text() for text in hits.get_legend().get_texts()}
    assert drawn == {"cache=off", "cache=on", "cache=on: possible"}
    pressures = sorted(200_000 * 65536 / ((budget * 100 - 10) * GIB) for budget in (0.9, 0.2, 0.11))
    (curve,) = [line for line in ratios.lines if line.get_label().startswith("cache=on")]
    assert list(curve.get_xdata()) == pytest.approx(pressures)
    assert list(preemptions.lines[0].get_ydata()) == pytest.approx([3 * pressure for pressure in pressures])


def test_a_floor_shows_what_memory_there_was(tmp_path: Path) -> None:
    values = ("0.9", "0.2", "0.104")
    make_study(tmp_path / "s", compare=KEY, speedups=dict.fromkeys(values, 1.0), trials=1, requests=8)
    found = "smallest that starts: 0.2"
    save_search(SearchRecord(kind="floor", key=KEY, found=found, smallest=0.2, largest_failed=0.104), tmp_path / "s")
    study = edit(tmp_path / "s", with_budget(0.5))
    comparison = study.compare()
    assert f"{KEY}=0.104 does not start for lack of memory" in sentence(
        comparison, comparison.pairings[1], "ttft_ms_p50"
    )
    title, said, table, _ = search_section(study, comparison)
    assert (title, said) == ("## Search", f"**{found}.**")
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| 0.104", "| 0.2", "| 0.9"]
    figure = {plot.name: plot.figure for plot in plots(study, comparison)}["search"]
    starts, lacks, *_ = figure.axes[0].lines
    assert list(starts.get_ydata()) == pytest.approx([10, 80]) and list(lacks.get_ydata()) == pytest.approx(
        [0.4], abs=1e-3
    )


def test_a_search_for_saturation_has_more_values_than_there_are_colours(tmp_path: Path) -> None:
    values = [str(value) for value in (32, 64, 96, 128, 160, 192, 224, 256, 512)]
    make_study(tmp_path / "s", compare="max_num_seqs", speedups=dict.fromkeys(values, 1.0), trials=1, requests=24)
    record = SearchRecord(
        kind="saturation", key="max_num_seqs", found="it stops rising", knee=96, best=128, slo_limit=64
    )
    save_search(record, tmp_path / "s")
    study = edit(tmp_path / "s", lambda run: measured(run, goodput_share=0.5) | {"config": {"slo": {"ttft_ms": 400}}})
    assert "**Found: it stops rising.**" in write_report(study, tmp_path / "s").markdown.read_text()
    figure = {plot.name: plot.figure for plot in plots(study, study.compare())}["search"]
    labels = {text.get_text() for text in figure.axes[1].get_legend().get_texts()}
    assert {"knee: 96", "SLO met up to 64", "slo.ttft_ms=400"} <= labels
    assert "| SLO met |" in search_section(study, study.compare())[2]


def saturated(folder: Path, **beyond: float) -> str:
    """The section of a search whose knee is at 128 of 256 requests, with the measures `beyond` it."""
    speedups = {"64": 1.0, "128": 1.5, "256": 1.5}
    make_study(folder, compare="max_num_seqs", speedups=speedups, trials=3, requests=24)
    save_search(
        SearchRecord(kind="saturation", key="max_num_seqs", found="it stops rising", knee=128, best=256), folder
    )
    at_knee = {"tokens_per_step": 1000.0, "duration_s": 10.0, "engine_steps": 100.0, "mean_in_flight": 127.0}
    at_knee |= {"requests_running_mean": 120.0, "kv_usage_peak": 0.3, "preemptions": 0.0, "queue_ms_mean": 5.0}
    at_knee |= {"limit_share": 0.6, "prompt_pressure": 0.4, "tokens_per_chunk": 1.8}
    study = edit(folder, lambda run: measured(run, **at_knee | (beyond if run.arm == "256" else {})))
    return "\n".join(search_section(study, study.compare()))


def test_a_search_shows_its_points_with_intervals_and_why_it_ends(tmp_path: Path) -> None:
    text = saturated(
        tmp_path / "s", tokens_per_step=2000.0, engine_steps=52.0, mean_in_flight=250.0, requests_running_mean=245.0
    )
    study = load_study(tmp_path / "s")
    level = study.compare().level({}, "128")
    assert level is not None
    low, high = t_interval(np.array(level.measures["throughput_req_per_s"]), 0.9)
    mean = number(level.mean("throughput_req_per_s"))
    assert f"| 128 (knee) | {mean} ({number(float(low))} to {number(float(high))}) |" in text
    assert "| 128 (knee) | 127 | 120 | 1,000 | 100 | 5.00 | 0.40 | 30% | 0.00 | 0.80 | 1.80 | 60% |" in text
    assert "Why it stops there, by what changed from max_num_seqs=128 to 256:" in text
    assert (
        "2.00 times as many tokens (1,000 to 2,000) in 1.92 times the time (100 to 192 ms): a token takes 0.96 times"
        in text
    )
    assert "The KV cache is not the limit: 30% of its blocks in use at most, no preemption a round." in text
    assert (
        "a chunk:" not in text
        and "reaches 60% and 60%" in text
        and "in flight the engine ran" not in text
        and "The load kept" not in text
    )


def test_a_search_shows_why_throughput_dips(tmp_path: Path) -> None:
    speedups = {"64": 1.0, "128": 1.6, "256": 1.4, "512": 1.8}
    make_study(tmp_path, compare="max_num_seqs", speedups=speedups, trials=3, requests=24)
    record = SearchRecord(kind="saturation", key="max_num_seqs", found="it rises", knee=512, best=512, dips=(256,))
    save_search(record, tmp_path)
    chunks = {"64": 1.1, "128": 1.8, "256": 1.0, "512": 1.0}
    study = edit(tmp_path, lambda run: measured(run, tokens_per_chunk=chunks[run.arm]))
    text = "\n".join(search_section(study, study.compare()))
    assert "Why it dips at 256, by what changed from max_num_seqs=128 to 256:" in text
    assert "Tokens came 1.80 and 1.00 a chunk: the server sent 1.80 times as many chunks a request." in text
    assert "Why it stops there" not in text


def test_a_search_says_which_limit_the_engine_has_met(tmp_path: Path) -> None:
    full = saturated(
        tmp_path / "full", kv_usage_peak=0.99, preemptions=7.0, mean_in_flight=256, requests_running_mean=90
    )
    assert "The KV cache is full: 99% of its blocks in use at most, 7.00 preemptions a round." in full
    assert "Of 256 requests in flight the engine ran 90.0 at once; they waited 5.00 ms on average." in full
    idle = saturated(tmp_path / "idle", mean_in_flight=140.0)
    assert "The load kept 140 requests in flight on average, not 256." in idle
    assert "steps do not grow any more" in idle


def test_arms_are_told_apart_beyond_the_first_round_of_colours() -> None:
    assert len({(colour(i), str(line(i)), marker(i)) for i in range(36)}) == 36


def test_capacity_of_two_gpus_is_twice_the_memory_less_once_the_weights(tmp_path: Path) -> None:
    speedups = {"1": 1.0, "2": 1.6}
    make_study(tmp_path / "s", compare="gpu.tensor_parallel_size", speedups=speedups, trials=3, requests=24)

    def change(run: RunResult) -> dict[str, Any]:
        n = int(run.arm)
        weights = 15 * GIB // n
        capacity = n * (125 * GIB - weights) / 65536
        engine = {"kv_bytes_per_token": 65536, "model_memory_bytes": weights}
        engine |= {"links": "NV18", "all_reduce": "custom", "nccl_version": "2.28.9"} if n > 1 else {}
        engine["kv_capacity_tokens"] = capacity
        config = {"gpu": {"tensor_parallel_size": n, "link_bytes_per_s": 450e9}}
        floor = {"limit_prefill_s": 1.2 / n, "limit_decode_s": 0.1 / n, "limit_s": 1.2 / n, "limit_share": 0.3}
        floor |= {"limit_all_reduce_s": 0.1} if n > 1 else {}
        rate = run.rounds[0].measures["throughput_req_per_s"] / n
        found = measured(
            run, kv_capacity_tokens=capacity, duration_s=4.0 / n, throughput_req_per_s_per_gpu=rate, **floor
        )
        return found | {"engine": engine, "config": config}

    study = edit(tmp_path / "s", change)
    text = "\n".join(tensor_parallel_section(study, study.compare()))
    ratio = (2 * 125 - 15) / (125 - 15)
    assert f"holds {ratio:.3f} times as many tokens" in text and f"arithmetic expects {ratio:.3f} times" in text
    assert f"{ratio:.2f}, exact, improves |" in text
    assert "| 2 | NV18 | custom | 2.28.9 | 7.50 |" in text
    row = study.compare().row("throughput_req_per_s", {}, "2")
    assert (
        row is not None
        and f"throughput is {row.estimate:.2f} times that of 1" in text
        and "A GPU does less in 1 and more in 0 of them by its interval" in text
    )
    assert "| 2 | 2.00 | 0.600 | 0.0500 | 0.100 | 5.0% | 30% |" in text
    assert "450 GB/s in one direction" in text and "no NVLink" not in text
    row = study.compare().row("tpot_ms_p50", {}, "2")
    assert row is not None and f"{row.estimate:.2f}, {row.low:.2f} to {row.high:.2f}, improves" in text
    assert tensor_parallel_section(study, study.compare("gpu.tensor_parallel_size", "2"))
    study = edit(
        tmp_path / "s", lambda run: {"engine": {**run.engine, "links": "SYS"}} if run.arm == "2" else {"error": None}
    )
    (last,) = tensor_parallel_section(study, study.compare())[-1:]
    assert last.startswith("The links found (SYS) are no NVLink")


@pytest.mark.parametrize("baseline", ["vllm_server", "vllm_async"])
def test_what_http_costs_in_one_sentence(tmp_path: Path, baseline: str) -> None:
    speeds = {"vllm_server": 1.0, "vllm_async": 1.25}
    order = {name: speeds[name] for name in (baseline, *(speeds.keys() - {baseline}))}
    make_study(tmp_path / "s", compare="engine", speedups=order, trials=3, requests=24, trial_noise=0.001)
    comparison = load_study(tmp_path / "s").compare()
    (text,) = http_costs(comparison)
    row = comparison.rows[0]
    low, high = (row.low, row.high) if baseline == "vllm_async" else (1 / row.high, 1 / row.low)
    share = row.estimate if baseline == "vllm_async" else 1 / row.estimate
    ends = f"{round(100 - 100 * high)}% to {round(100 - 100 * low)}%"
    assert text.startswith(f"HTTP costs {round(100 - 100 * share)}% of the throughput (90% interval {ends}, 3 trials)")
    assert 15 < 100 - 100 * share < 25
    assert "+" in text.partition("at the median ")[2] and "served" in text


def test_http_costs_nothing_where_the_paths_are_equal(tmp_path: Path) -> None:
    speeds = {"vllm_server": 1.0, "vllm_async": 1.0}
    make_study(tmp_path / "s", compare="engine", speedups=speeds, trials=3, requests=400, trial_noise=0.001)
    (text,) = http_costs(load_study(tmp_path / "s").compare())
    assert text.startswith("HTTP costs no throughput beyond the margin of 5%")


def test_energy_and_cost_where_they_are_known(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, requests=8)
    assert device_section(load_study(tmp_path / "s"), load_study(tmp_path / "s").compare()) == []
    found = {"energy_j_per_output_token": 0.22, "gpu_power_w_mean": 612.0, "cost_per_million_tokens": 1.5}
    study = edit(tmp_path / "s", lambda run: measured(run, **found))
    _, table, _ = device_section(study, study.compare())
    assert table.splitlines()[0] == "| cache | power (W) | J an output token | cost of 1M tokens |"
    assert table.splitlines()[2] == "| off | 612 | 0.220 | 1.50 |"


def test_pairs_whose_arms_ran_on_different_gpus_are_told(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=24)

    def on(run: RunResult) -> tuple[str, ...]:
        """Trial 0 on one GPU, trial 1 on one and two of which one is the same, trial 2 on two that are not."""
        return {("on", 1): ("a", "b"), ("on", 2): ("b",)}.get((run.arm, run.trial), ("a",))

    study = edit(tmp_path / "s", lambda run: {"engine": {**run.engine, "gpus": on(run)}})
    (told,) = weaknesses(study, study.compare())
    assert told.startswith("**1 of 3 pairs on different GPUs**") and "(all, trial 2)" in told
    assert f"- {told}" in brief(study, study.compare())
    study = edit(tmp_path / "s", lambda run: {"engine": {**run.engine, "gpus": ()}})
    assert not list(weaknesses(study, study.compare())), "a CPU has no name of its own"


def test_throttled_runs_and_what_an_endpoint_did_not_tell_are_said(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=3, requests=24)
    unknown = ("cache state: no reset there, so a round may begin warm",)

    def change(run: RunResult) -> dict[str, Any]:
        throttled = (run.arm, run.trial) == ("on", 0)
        engine = {**run.engine, "throttled": throttled, "unknown": unknown}
        return measured(run, gpu_throttled_share=0.25 if throttled else 0.0) | {"engine": engine}

    study = edit(tmp_path / "s", change)
    throttled = next(run for run in study.runs if run.engine["throttled"])
    assert verdict(throttled).splitlines()[1:] == [
        f"unknown: {unknown[0]}",
        "throttled: heat or a fault slowed a GPU during a round",
    ]
    first, second = weaknesses(study, study.compare())
    assert first.startswith("**1 of 6 runs throttled**") and "25%" in first and "cache=on-t0" in first
    assert second == "**Unknown in every run: cache state.** No reset there, so a round may begin warm."
    comparison = study.compare()
    assert "1 run throttled" in sentence(comparison, comparison.pairings[0], "throughput_req_per_s")
    assert "1 run throttled" in caption(comparison)
    assert study.to_pandas()["throttled"].sum() == 1
