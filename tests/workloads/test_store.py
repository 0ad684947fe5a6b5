import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp.errors import WorkloadError
from llmexp.schema.workloads import SharedPrefix
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from llmexp.workloads.store import describe, load, save
from llmexp.workloads.workload import Workload
from tests.workloads.conftest import from_prompts, make_model


def full() -> Workload:
    return from_prompts(
        [[5, 6, 7], [8], [9, 9]],
        output_tokens=2,
        arrivals_s=np.array([0.0, 0.5, 0.5]),
        columns={"subject": np.array(["law", "art", "law"]), "priority": np.array([0, 1, 2])},
        request_fields={"logprobs": 4},
        keep_text=True,
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    save(full(), tmp_path / "deep" / "w.parquet")
    back = load(tmp_path / "deep" / "w.parquet")
    assert back.sha256 == full().sha256
    assert [prompt.tolist() for prompt in back.prompts()] == [[5, 6, 7], [8], [9, 9]]
    assert back.columns["subject"].tolist() == ["law", "art", "law"]
    assert (back.arrivals_s is not None and back.arrivals_s.tolist()) == [0.0, 0.5, 0.5]
    assert (back.request_fields, back.keep_text, back.name) == ({"logprobs": 4}, True, "literal")


def test_several_row_groups(tmp_path: Path) -> None:
    workload = build(SharedPrefix(num_requests=2500, prefix_tokens=3, suffix_tokens=3), make_model())
    save(workload, tmp_path / "w.parquet")
    assert load(tmp_path / "w.parquet").sha256 == workload.sha256
    assert load(tmp_path / "w.parquet").recipe == workload.recipe
    assert [path.name for path in tmp_path.iterdir()] == ["w.parquet"]


def test_changed_content_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save(full(), path)
    table = pq.read_table(path)
    changed = table.set_column(1, "output_tokens", pa.array([2, 2, 3], pa.int32()))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(WorkloadError, match="the file changed"):
        load(path)


def test_not_a_saved_workload(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        load(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(WorkloadError, match="not a Parquet file"):
        load(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(WorkloadError, match="not of a workload"):
        load(tmp_path / "other.parquet")


@pytest.mark.parametrize("change", ["priority", "arrivals_s", "request_fields", "output_tokens", "prompt"])
def test_hash_covers_all_that_is_sent(change: str) -> None:
    workload = full()
    changed = {
        "priority": replace(workload, columns={**workload.columns, "priority": np.array([0, 1, 1])}),
        "arrivals_s": replace(workload, arrivals_s=np.array([0.0, 0.5, 0.6])),
        "request_fields": replace(workload, request_fields={"logprobs": 5}),
        "output_tokens": replace(workload, output_tokens=np.array([2, 2, 1], np.int32)),
        "prompt": replace(workload, prompt_at=lambda i: workload.prompt_at(i)[::-1].copy()),
    }[change]
    assert changed.sha256 != workload.sha256
    assert replace(workload, columns={**workload.columns, "subject": np.array(["x"] * 3)}).sha256 == workload.sha256


def test_description_is_json() -> None:
    workload = build(SharedPrefix(), make_model())
    described = json.loads(json.dumps(describe(workload, audit(workload, 16))))
    assert described["sha256"] == workload.sha256
    assert described["recipe"]["prefix_tokens"] == 512
    assert described["audit"]["reusable_tokens"] == 15 * 512
