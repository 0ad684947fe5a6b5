"""What of a shell's variables is a condition of a run, and how differences between conditions read."""

import pytest

from llmexp.fingerprint import conditions, difference, inherited


def test_variables_that_change_an_engine_are_kept_and_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_CANARY0123456789")
    shell = {
        "NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "4", "VLLM_USE_V1": "1", "PYTORCH_CUDA_ALLOC_CONF": "a:b",
        "VLLM_API_KEY": "CANARY", "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/usr/local/cuda", "HOME": "/root",
        "NCCL_VERSION": "2.28.9",
        "VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_LAUNCH_BLOCKING": "1", "VLLM_NOTE": "with hf_CANARY0123456789",
    }  # fmt: skip
    found = inherited(shell, {"VLLM_USE_V1": "0"})
    assert found == {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_P2P_DISABLE": "1",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "a:b",
        "VLLM_NOTE": "with <secret>",
    }


def test_a_shell_without_such_variables_is_one_that_never_told_of_them() -> None:
    assert conditions({"cpu": "x", "variables": {}}) == conditions({"cpu": "x"})


def test_a_difference_names_the_leaf() -> None:
    before, now = {"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "variables": {"OMP_NUM_THREADS": "1"}}
    assert difference(before, now) == ["a.y: 2 -> 3", "variables.OMP_NUM_THREADS: None -> 1"]
    assert difference(now, before)[-1] == "variables.OMP_NUM_THREADS: 1 -> None"
