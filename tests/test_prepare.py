"""What is settled before an engine starts: a control that is none is refused there."""

import pkgutil
from pathlib import Path

import pytest

import llmexp
from llmexp import prepare as module
from llmexp.compose import compose
from llmexp.errors import WorkloadError
from llmexp.prepare import account, prepare
from tests.workloads.conftest import from_prompts

RATES = ["gpu.flops_per_s=1e12", "gpu.bandwidth_bytes_per_s=1e11", "gpu.memory_bytes=8000000000"]
CONTROL = ["model=tiny_random", "gpu=cpu", "workload=unique_prefix", "kv.block_size=32"]


def test_a_control_that_shares_a_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = from_prompts([[*range(3, 35), 3], [*range(3, 35), 4]])
    monkeypatch.setattr(module, "build", lambda config, model: sharing)
    with pytest.raises(WorkloadError, match="control without reuse, but 1 blocks of 32 tokens are shared"):
        prepare(compose([*CONTROL, f"runs_dir={tmp_path}"]))
    prepare(compose([*CONTROL, "workload=shared_prefix", f"runs_dir={tmp_path}"]))


def test_a_control_is_checked_again_in_the_engines_own_blocks() -> None:
    sharing = from_prompts([[*range(3, 19), *range(3, 20)], [*range(3, 19), *range(4, 21)]])
    config = compose(CONTROL)
    assert account(config, sharing, None).shared_blocks == 0
    with pytest.raises(WorkloadError, match="1 blocks of 16 tokens are shared"):
        account(config, sharing, 16)


@pytest.mark.parametrize(("engine", "kept"), [("vllm_server", True), ("vllm_async", True), ("simulator", False)])
def test_an_engine_of_our_own_is_known_by_the_variables_that_it_inherits(
    engine: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([*CONTROL, f"engine={engine}", "gpu=cpu", *RATES, f"runs_dir={tmp_path}"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = prepare(config)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    now = prepare(config)
    assert ("OMP_NUM_THREADS" in now.environment.get("variables", {})) == kept
    assert (before.fingerprint != now.fingerprint) == kept
    assert before.asked == now.asked


def test_no_module_hides_a_name_of_the_library_once_it_is_imported() -> None:
    for found in pkgutil.iter_modules(llmexp.__path__):
        assert found.name not in llmexp.__all__
