"""The config of a study refuses what could not be meant."""

import pytest
from pydantic import ValidationError

from llmexp.schema.study import Claim, StudyConfig


def test_numbers_from_yaml_become_what_the_command_line_would_say() -> None:
    study = StudyConfig.model_validate({"baseline": 128, "cells": [{"max_num_seqs": 32, "workload.order": "sorted"}]})
    assert study.baseline == "128"
    assert study.cells == ({"max_num_seqs": "32", "workload.order": "sorted"},)


@pytest.mark.parametrize("where", [{"baseline": False}, {"cells": [{"cache": True}]}])
def test_an_unquoted_on_or_off_is_explained(where: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"YAML read this as the boolean .*; quote it"):
        StudyConfig.model_validate(where)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trials": 0},
        {"margin": 0},
        {"margin": 1},
        {"confidence": 1},
        {"confidence": 0.4},
        {"name": "../elsewhere"},
        {"unknown": 1},
        {"claims": [{"measure": "ttft_ms_p50", "direction": "faster"}]},
        {"claims": [{"measure": "ttft_ms_p50", "direction": "equivalent", "threshold": 1.1}]},
    ],
)
def test_values_out_of_bounds(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        StudyConfig.model_validate(wrong)


def test_defaults() -> None:
    study = StudyConfig()
    assert (study.trials, study.margin, study.confidence, study.compare, study.plan_only) == (1, 0.05, 0.9, None, False)
    assert Claim(measure="ttft_ms_p50", direction="lower").cell == {}
