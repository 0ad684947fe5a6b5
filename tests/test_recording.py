"""What `llmexp record` refuses before an engine starts; tests/engines/test_runs.py records a real one."""

from pathlib import Path

import pytest

from llmexp.errors import ConfigError
from llmexp.recording import record


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workload=shared_prefix"], "workload: got shared_prefix; only the prompts of multi_turn hold answers"),
        (["workload=multi_turn", "workload.answers=there.parquet"], r"workload\.answers: got 'there\.parquet'"),
        (["workload=multi_turn", "engine=vllm_async"], "engine: got vllm_async"),
        (["workload=multi_turn", "--out", "nowhere/answers.parquet"], "--out: got 'nowhere/answers.parquet'"),
        (["workload=multi_turn", "kv.block_size=7"], r"kv\.block_size"),
        (["workload=multi_turn", "workload.turn=7"], r"workload\.turn: no such key"),
    ],
)
def test_what_cannot_be_recorded(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        record(["gpu=cpu", "model=tiny_random", *arguments])
    assert not any(tmp_path.iterdir())
