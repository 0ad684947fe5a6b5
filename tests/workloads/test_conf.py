"""Every workload file fits its section, names every knob, and builds (with made data where it needs a file)."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from llmexp.schema.workloads import WorkloadConfig
from llmexp.workloads.audit import audit, require_no_reuse
from llmexp.workloads.build import BUILDERS, build
from tests.workloads.conftest import make_model

FOLDER = Path(__file__).parents[2] / "conf" / "workload"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


LONG = ("conversations", "long_prompts")  # for models of more context than a laptop's


def content(name: str) -> dict[str, Any]:
    """The file's values, with the seed and the block size that the whole run has."""
    values = dict(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    assert values["seed"] == "${seed}", "a trial has a seed of its own, which the workload follows"
    assert values.get("reuse_block_size") in (None, "${kv.block_size}"), "reuse comes in the engine's blocks"
    return {name: {"${seed}": 0, "${kv.block_size}": 16}.get(str(value), value) for name, value in values.items()}


@pytest.mark.parametrize("name", NAMES)
def test_file_names_every_knob(name: str) -> None:
    config: Any = TypeAdapter(WorkloadConfig).validate_python(content(name))
    assert set(content(name)) == set(type(config).model_fields)
    undescribed = [name for name, field in type(config).model_fields.items() if not field.description]
    assert undescribed == ["kind"]


@pytest.mark.parametrize("name", [name for name in NAMES if "path" not in content(name)])
def test_file_builds_within_its_tokens(name: str) -> None:
    config: Any = TypeAdapter(WorkloadConfig).validate_python(content(name))
    longest = 16_384 if name in LONG else 2048
    workload = build(config, make_model(vocab_size=49152, max_model_len=longest))
    account = audit(workload, 16)
    assert account.exact_duplicates == 0
    if config.kind == "unique_prefix":
        require_no_reuse(workload, account)
    else:
        assert account.ideal_hit_rate > 0
    assert workload.recipe["kind"] == config.kind


def test_every_kind_has_a_file() -> None:
    assert {content(name)["kind"] for name in NAMES} == set(BUILDERS)
