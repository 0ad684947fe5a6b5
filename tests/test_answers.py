"""A run of questions with right answers: what is scored, kept and logged, on a server that stands in."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp import results, rounds, tracking
from llmexp.client import spill
from llmexp.client.replay import Replay
from llmexp.compose import compose
from llmexp.execute import run
from llmexp.measure.accuracy import accuracy
from llmexp.results import RunResult, is_intact
from llmexp.schema.config import TrackingConfig
from tests.golden.server import golden_server
from tests.sources import mmlu_folder

CHANGED = 3  # the request that is answered differently in the second round


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Two rounds of 24 questions, six of each letter, all answered A and likeliest B; one A becomes no letter."""
    folder = tmp_path_factory.mktemp("scored")
    send = rounds.replay

    def answered(*arguments: Any, **named: Any) -> Replay:
        sent = send(*arguments, **named)
        trace = sent.trace
        texts = [
            "?" if (row["round"], row["request"]) == (1, CHANGED) else " A"
            for row in trace.select(["round", "request"]).to_pylist()
        ]
        alternatives = json.dumps({" A": -2.0, " B": -1.0, "B": -3.0})
        columns = {"text": pa.array(texts), "logprobs": pa.array([alternatives] * len(trace))}
        for name, values in columns.items():
            trace = trace.set_column(trace.column_names.index(name), name, values)
        if "spill" in named:  # a round, whose trace is on disk already
            spill.write(trace, named["spill"])
        return replace(sent, trace=trace)

    with pytest.MonkeyPatch.context() as patch, golden_server() as server:
        patch.setattr(rounds, "replay", answered)
        patch.setattr(rounds, "invalid_reasons", lambda *_: ())  # how fast the client was decides nothing here
        return run(
            compose(
                [
                    *("engine=endpoint", f"engine.url={server.url}", "model=tiny_random", "gpu=cpu"),
                    *("kv.block_size=16", "rounds=2", "max_num_seqs=2", "client.lag_limit_ms=10000"),
                    *("workload=mmlu", f"workload.path={mmlu_folder(folder / 'mmlu')}", "workload.num_questions=24"),
                    *(f"runs_dir={folder / 'runs'}", "study.name=s", "run.name=r", f"tracking.dir={folder / 'mlruns'}"),
                ]
            )
        )


def test_accuracy_is_of_one_round_with_its_interval(scored: RunResult) -> None:
    assert scored.valid
    wanted = accuracy(6, 24)
    for measures in (scored.rounds[0].measures, scored.measures):
        for name in ("accuracy", "accuracy_of_likeliest_letter"):
            found = [measures[name], measures[f"{name}_low"], measures[f"{name}_high"]]
            assert found == [wanted.value, wanted.low, wanted.high]
    lost = next(row["answer"] for row in answers(scored) if row["request"] == CHANGED) == "A"
    assert scored.rounds[1].measures["accuracy"] == (5 / 24 if lost else 6 / 24)


def test_what_changed_between_rounds_is_counted(scored: RunResult) -> None:
    assert scored.measures["changed_answers"] == 1
    assert "changed_answers" not in scored.rounds[0].measures


def answers(run: RunResult) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run.folder / results.ANSWERS).to_pylist()
    return rows


def test_every_answer_is_kept_and_vouched_for(scored: RunResult) -> None:
    rows = answers(scored)
    assert [(row["round"], row["request"]) for row in rows] == [(r, q) for r in range(2) for q in range(24)]
    assert {row["generated"] for row in rows if row["request"] == CHANGED} == {"A", None}
    assert len({row["question"] for row in rows}) == 24
    kept = json.loads((scored.folder / results.ACCURACY).read_text())
    assert kept["by_subject"]["law"]["n"] == kept["by_subject"]["virology"]["n"] == 12
    assert {results.ANSWERS, results.ACCURACY} <= scored.files.keys()
    assert is_intact(scored)


def test_mlflow_has_the_measures_and_the_answers(scored: RunResult) -> None:
    client, experiment = tracking.open_store(TrackingConfig(dir=str(scored.folder.parents[2] / "mlruns")))
    (logged,) = client.search_runs([experiment])
    assert logged.data.metrics["accuracy"] == 0.25
    assert {file.path for file in client.list_artifacts(logged.info.run_id)} >= {results.ANSWERS, results.ACCURACY}
