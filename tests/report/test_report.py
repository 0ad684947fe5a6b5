"""Reports on disk: what they say, and that their figures show something."""

import csv
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from llmexp.analyze.study import Study, load_study
from llmexp.errors import ConfigError
from llmexp.report.markdown import brief
from llmexp.report.plots import plots
from llmexp.report.report import ReportFiles, write_report
from llmexp.report.table import caption
from llmexp.results import Percentile, load_run, load_study_record, save_study
from llmexp.schema.study import Claim
from tests.analyze.synthetic import make_study, same_in_every_trial
from tests.analyze.test_pairs import change

CLAIMS = (
    Claim(measure="throughput_req_per_s", direction="higher", threshold=1.5),
    Claim(measure="ttft_ms_p50", direction="higher", cell={"max_num_seqs": "8"}),
)
FIGURES = {"effect_by_cell", "latency_distributions", "throughput_curve", "hit_rates", "timeline"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """The report of two cells and five trials of doubled speed, one run of which is invalid."""
    folder = tmp_path_factory.mktemp("report") / "demo"
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    record = make_study(folder, cells=cells, trials=5, requests=40, claims=CLAIMS)
    broken = next(plan.name for plan in record.runs if plan.arm == "on" and plan.cell == cells[1])
    change(folder / broken, valid=False, invalid_reasons=("contract_broken: 3 hit tokens | not 4",))
    return write_report(load_study(folder), folder)


def test_the_sentence_that_a_user_wants_to_write(written: ReportFiles) -> None:
    text = written.markdown.read_text()
    row = load_study(written.folder).compare().row("throughput_req_per_s", {"max_num_seqs": "8"}, "on")
    assert row is not None
    assert (
        f"- max_num_seqs=8: cache=on raised throughput {row.estimate:.2f} times (90% interval {row.low:.2f} to "
        f"{row.high:.2f}, 5 trials, contract held in all).\n"
    ) in text
    assert re.search(r"max_num_seqs=32: .*4 trials, 1 of 5 left out, contract held in all", text)


def test_the_findings_and_the_table_fit_a_page_of_their_own(written: ReportFiles) -> None:
    study = load_study(written.folder)
    text = brief(study, study.compare())
    assert text.startswith("- max_num_seqs=8: cache=on raised throughput") and "| cell | cache |" in text
    assert "1 run left out" in text and "# " not in text


def test_claims_stand_beside_their_evidence(written: ReportFiles) -> None:
    text = written.markdown.read_text()
    supported = r"\| throughput_req_per_s higher than 1.5 times the baseline \| \*\*supported\*\* "
    assert re.search(supported + r".*max_num_seqs=8: .*max_num_seqs=32: ", text)
    assert re.search(r"\| ttft_ms_p50 higher than the baseline, where max_num_seqs=8 \| \*\*refuted\*\* ", text)


def test_what_was_left_out_and_what_was_tested(written: ReportFiles) -> None:
    text = written.markdown.read_text()
    assert "20 planned, 19 used, 1 left out" in text
    assert r"contract_broken: 3 hit tokens \| not 4" in text
    tested = load_study(written.folder).compare().tested
    assert f"{tested} comparisons were tested together" in text
    assert "Benjamini-Hochberg" in text
    assert "python -m llmexp -m cache=off,on study.trials=5" in text
    assert load_study(written.folder).runs[0].workload_sha256 in text
    assert "| vllm | 0.32.0 |" in text


def test_tables_are_whole(written: ReportFiles) -> None:
    for block in re.findall(r"(?:^\|.*\n?)+", written.markdown.read_text(), re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(columns) == 1


def test_every_figure_is_embedded_and_shows_something(written: ReportFiles) -> None:
    text = written.markdown.read_text()
    embedded = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert {Path(path).stem for path in embedded} == FIGURES
    for path in embedded:
        image = imread(written.folder / path)[..., :3]
        assert (image.min(axis=-1) < 0.5).mean() > 0.004
        assert (written.folder / path).with_suffix(".svg").stat().st_size > 1000
    assert {path.name for path in written.figures} == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}


def test_the_same_in_csv_and_json(written: ReportFiles) -> None:
    comparison = load_study(written.folder).compare()
    with written.effects.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["measure"] for line in lines] == [row.measure for row in comparison.rows]
    assert float(lines[0]["estimate"]) == pytest.approx(comparison.rows[0].estimate)
    content = json.loads(written.json.read_text())
    assert content["comparison"]["rows"][0]["low"] == pytest.approx(comparison.rows[0].low)
    assert [claim["outcome"] for claim in content["claims"]] == ["supported", "refuted"]
    assert content["requests"][0]["requests"] == 200
    assert len(written.runs.read_text().splitlines()) == 21


def test_a_report_rewritten_holds_only_the_figures_that_it_describes(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    record = make_study(tmp_path / "s", cells=cells, trials=1, requests=20)
    first = write_report(load_study(tmp_path / "s"), tmp_path / "s")
    figures = tmp_path / "s" / "figures"
    (figures / "mine.png").write_bytes(b"a user's")
    (figures / "throughput_curve.svg").write_bytes(b"changed by a user")
    for plan in record.runs:
        (tmp_path / "s" / plan.name / "requests.parquet").unlink()
    narrow = record.model_copy(
        update={"cells": tuple(cells[:1]), "runs": tuple(p for p in record.runs if p.cell == cells[0])}
    )
    save_study(narrow, tmp_path / "s")
    second = write_report(load_study(tmp_path / "s"), tmp_path / "s")
    kept = {path.name for path in second.figures} | {"mine.png", "throughput_curve.svg"}
    assert {path.name for path in figures.iterdir()} == kept
    gone = {path.name for path in first.figures} - kept
    assert {"throughput_curve.png", "timeline.png", "timeline.svg"} <= gone
    assert not any(name in second.markdown.read_text() for name in gone)


@pytest.mark.parametrize("left", ["{", '{"figures": {"../../mine.png": "0"}}', '{"figures": [1]}', "[]"])
def test_what_an_earlier_report_says_leads_to_no_other_file(tmp_path: Path, left: str) -> None:
    make_study(tmp_path / "s", trials=1, requests=8)
    (tmp_path / "mine.png").write_bytes(b"")
    (tmp_path / "s" / "report.json").write_text(left.replace('"0"', f'"{hashlib.sha256().hexdigest()}"'))
    write_report(load_study(tmp_path / "s"), tmp_path / "s")
    assert (tmp_path / "mine.png").exists()


def test_the_same_study_gives_the_same_report(written: ReportFiles, tmp_path: Path) -> None:
    again = write_report(load_study(written.folder), tmp_path)
    for first, second in zip(
        (written.markdown, written.json, written.effects, *written.figures),
        (again.markdown, again.json, again.effects, *again.figures),
        strict=True,
    ):
        assert first.read_bytes() == second.read_bytes()


def test_simulated_data_is_labelled_in_every_title(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    make_study(tmp_path / "s", cells=cells, trials=3, requests=20, simulated=True)
    study = load_study(tmp_path / "s")
    drawn = list(plots(study, study.compare()))
    assert {plot.name for plot in drawn} == FIGURES
    for plot in drawn:
        assert plot.title.startswith("SIMULATED")
        assert any(text.get_text().startswith("SIMULATED") for text in plot.figure.findobj(Text))
        assert plot.caption.split()[0] in plot.figure.get_supxlabel()
    text = write_report(study, tmp_path / "s").markdown.read_text()
    assert text.startswith("# SIMULATED")
    assert "a model of an engine (smollm2_135m on unknown), not from a measurement" in text


def test_arms_differ_without_colour(tmp_path: Path) -> None:
    make_study(tmp_path / "s", speedups={"off": 1.0, "on": 2.0, "salted": 1.0}, trials=3, requests=20)
    study = load_study(tmp_path / "s")
    drawn = {plot.name: plot.figure for plot in plots(study, study.compare())}
    lines = [line for line in drawn["latency_distributions"].axes[0].lines if line.get_linewidth() > 1]
    assert len({line.get_linestyle() for line in lines}) == 3
    counted = [line for line in drawn["hit_rates"].axes[0].lines if line.get_label() == "counted"]
    assert len({line.get_marker() for line in counted}) == 3


def test_distributions_end_at_every_request(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, rounds=1, requests=30)
    study = load_study(tmp_path / "s")
    drawn = {plot.name: plot.figure for plot in plots(study, study.compare())}
    for line in drawn["latency_distributions"].axes[0].lines:
        x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        assert (len(x), y[0], y[-1]) == (31, 0, 1)
        assert (np.diff(x) >= 0).all()


def texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that a figure shows, with its place in pixels."""
    canvas = FigureCanvasAgg(figure)
    for _ in range(2):  # the second knows how large the labels are
        canvas.draw()
    found = [*figure.texts, *(text for legend in figure.legends for text in (legend.get_title(), *legend.get_texts()))]
    for panel in filter(Axes.get_visible, figure.axes):
        found += [panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        found += panel.get_legend().get_texts() if panel.get_legend() else []
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [(one.get_text(), one.get_window_extent()) for one in found if one.get_visible() and one.get_text().strip()]


SHAPES = (("16", "3570", "8"), ("64", "3570", "8"), ("64", "168", "256"))
NAMES = ("workload.num_requests", "workload.prefix_tokens", "workload.output_tokens")


@pytest.fixture(scope="module")
def degrees(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """One and two GPUs in six cells whose names are long and whose throughputs are far apart."""
    folder = tmp_path_factory.mktemp("degrees") / "tp"
    cells = [
        {"engine": engine, **dict(zip(NAMES, shape, strict=True))}
        for engine in ("vllm_server", "vllm_async")
        for shape in SHAPES
    ]
    speedups = {"1": 1.0, "2": 1.6}
    record = make_study(
        folder, cells=cells, trials=3, requests=8, compare="gpu.tensor_parallel_size", speedups=speedups
    )
    for plan in record.runs:
        rounds = load_run(folder / plan.name).rounds
        factor = 1.0 if plan.cell["workload.num_requests"] == "16" else 9.0
        rate = {"throughput_req_per_s": factor * rounds[0].measures["throughput_req_per_s"]}
        rate["throughput_req_per_s_per_gpu"] = rate["throughput_req_per_s"] / int(plan.arm)
        more = {**rate, "duration_s": 1.0, "limit_s": 0.4, "limit_share": 0.4, "limit_prefill_s": 0.4}
        changed = [one.model_copy(update={"measures": {**one.measures, **more}}) for one in rounds]
        gpu = {"gpu": {"tensor_parallel_size": int(plan.arm), "link_bytes_per_s": 450e9}}
        change(folder / plan.name, rounds=tuple(changed), config=gpu)
    return load_study(folder)


def test_no_text_of_a_figure_covers_another_or_leaves_it(degrees: Study) -> None:
    for plot in plots(degrees, degrees.compare()):
        found = texts(plot.figure)
        width, height = plot.figure.canvas.get_width_height()
        for i, (text, place) in enumerate(found):
            assert place.x0 > -1 and place.y0 > -1 and place.x1 < width + 1 and place.y1 < height + 1, (plot.name, text)
            for other, there in found[:i]:
                assert not place.padded(-1).overlaps(there.padded(-1)), (plot.name, text, other)


def test_every_panel_shows_all_that_it_is_for(degrees: Study) -> None:
    drawn = {plot.name: plot.figure for plot in plots(degrees, degrees.compare())}
    assert {"effect_by_cell", "floor", "throughput_curve"} <= drawn.keys()
    for name, figure in drawn.items():
        for panel in filter(Axes.get_visible, figure.axes):
            assert panel.lines or panel.patches, (name, panel.get_title())
    titles = [panel.get_title() for panel in drawn["effect_by_cell"].axes if panel.get_visible()]
    assert "e2e p95" not in titles and {"throughput", "throughput a GPU", "TPOT p50"} <= {*titles}  # of 8 requests
    for panel in drawn["throughput_curve"].axes:
        bottom, top = panel.get_ylim()
        assert all(bottom <= y <= top for line in panel.lines for y in line.get_ydata())


def test_a_percentile_without_enough_requests_is_told_in_its_place(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    record = make_study(tmp_path / "s", cells=cells, trials=3, requests=30)
    for plan in record.runs[::2]:
        run = load_run(tmp_path / "s" / plan.name)
        unknown = {"e2e_ms_p95": Percentile(value=None, low=None, high=None, n=30)}
        rounds = [one.model_copy(update={"percentiles": {**one.percentiles, **unknown}}) for one in run.rounds]
        if plan.cell == cells[0]:
            change(run.folder, rounds=tuple(rounds), percentiles={**run.percentiles, **unknown})
    study = load_study(tmp_path / "s")
    drawn = {plot.name: plot.figure for plot in plots(study, study.compare())}["effect_by_cell"]
    (panel,) = [panel for panel in drawn.axes if panel.get_title() == "e2e p95"]
    assert [text.get_text() for text in panel.texts] == ["too few requests"]
    assert "-: too few requests for that percentile." in caption(study.compare())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"trials": 1}, "not replicated"),
        ({"trials": 2}, "no interval below 3 trials"),
        ({"trials": 2, "compare": None, "speedups": {"": 1.0}}, "Nothing is compared"),
        ({"trials": 3, "speedups": {"off": 1.0, "on": 1.0}, "trial_noise": 0.2}, "we cannot tell"),
        ({"trials": 3, "speedups": {"off": 1.0, "on": 2.0, "salted": 1.0}}, "cache=salted"),
        ({"trials": 3, "requests": 4}, "TTFT p50"),
    ],
)
def test_every_kind_of_study_gets_a_report(tmp_path: Path, arguments: dict[str, object], words: str) -> None:
    make_study(tmp_path / "s", **{"requests": 20, **arguments})  # type: ignore[arg-type]
    written = write_report(load_study(tmp_path / "s"), tmp_path / "s")
    assert words in written.markdown.read_text()


def test_a_study_without_a_valid_run_still_says_why(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "1"}, {"max_num_seqs": "2"}]
    record = make_study(tmp_path / "s", trials=1, requests=20, cells=cells)
    for plan in record.runs:
        change(tmp_path / "s" / plan.name, status="failed", valid=False, rounds=(), measures={}, error="out of memory")
    text = write_report(load_study(tmp_path / "s"), tmp_path / "s").markdown.read_text()
    assert text.count("| failed | out of memory |") == 4
    assert "nothing can be said of throughput" in text


def test_a_claim_on_an_unknown_measure(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=1, requests=20)
    record = load_study_record(tmp_path / "s")
    claim = Claim(measure="throughput", direction="higher")
    save_study(record.model_copy(update={"claims": (claim,)}), tmp_path / "s")
    with pytest.raises(ConfigError, match="did you mean throughput"):
        write_report(load_study(tmp_path / "s"), tmp_path / "s")


def test_a_report_on_another_key_answers_the_claims_of_the_study(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    record = make_study(tmp_path / "s", cells=cells, trials=3, requests=20, claims=CLAIMS[:1])
    for plan in record.runs:  # the same requests in both, so that they may be paired
        change(tmp_path / "s" / plan.name, workload_sha256=f"{plan.trial}" * 64)
    study = load_study(tmp_path / "s")
    text = write_report(study, tmp_path / "s", study.compare("max_num_seqs")).markdown.read_text()
    assert text.startswith("# s: max_num_seqs, against 8")
    assert "- cache=on: max_num_seqs=32 raised throughput" in text
    assert "**supported** | in every cell that it covers | on, max_num_seqs=8" in text
    drawn = {plot.name: plot.figure for plot in plots(study, study.compare("max_num_seqs"))}
    labels = [text.get_text() for text in drawn["hit_rates"].axes[0].get_yticklabels()]
    assert labels == [f"max_num_seqs={n}, cache={arm}" for n in (8, 32) for arm in ("off", "on")]


def test_trials_that_are_all_the_same_are_drawn(tmp_path: Path) -> None:
    cells = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]
    record = make_study(tmp_path / "s", cells=cells, trials=3, requests=20, simulated=True)
    for plan in record.runs:  # their mean is above every one of them
        rounds = load_run(tmp_path / "s" / plan.name).rounds
        same = tuple(one.model_copy(update={"measures": {"throughput_req_per_s": 0.1}}) for one in rounds)
        change(tmp_path / "s" / plan.name, rounds=same)
    study = load_study(tmp_path / "s")
    assert "throughput_curve" in {plot.name for plot in plots(study, study.compare())}


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (1, ": one workload, so others may differ."),
        (2, ": no interval below 3 workloads, so others may differ."),
        (3, "% interval over workloads "),
    ],
)
def test_a_simulation_speaks_of_workloads_and_never_of_launches(tmp_path: Path, trials: int, words: str) -> None:
    make_study(tmp_path / "s", trials=trials, requests=30, simulated=True)
    text = write_report(load_study(tmp_path / "s"), tmp_path / "s").markdown.read_text()
    assert words in text and "not replicated" not in text and "noise" not in text.partition("## Method")[0]
    same_in_every_trial(tmp_path / "s")
    if trials > 1:
        text = write_report(load_study(tmp_path / "s"), tmp_path / "s").markdown.read_text()
        said = f"in the simulation cache=on raised throughput .* \\(deterministic: {trials} trials alike, contract held"
        assert re.search(said, text) and "What this study can see" not in text
