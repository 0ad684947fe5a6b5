from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.errors import ConfigError, WorkloadError
from llmexp.schema.workloads import Custom, MultiTurn
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from llmexp.workloads.multi_turn import record, record_with
from llmexp.workloads.store import save
from llmexp.workloads.workload import Tokens, Workload
from tests.workloads.conftest import from_prompts, make_model


def respond(prompts: list[Tokens], output_tokens: list[int]) -> list[Sequence[int]]:
    """A made-up model: what it generates depends on the whole prompt, and no made-up answer holds such tokens."""
    return [
        [int(prompt.sum() * (step + 3) % 3) for step in range(count)]
        for prompt, count in zip(prompts, output_tokens, strict=True)
    ]


def served(workload: Workload, size: int) -> list[int]:
    """Hit tokens of a dumb engine: after a request it caches prompt and generated tokens but the last."""
    cached: set[tuple[int, ...]] = set()
    hits = []
    for prompt, output in zip(workload.prompts(), workload.output_tokens.tolist(), strict=True):
        tokens = prompt.tolist()
        found = 0
        while found + size <= len(tokens) - 1 and tuple(tokens[: found + size]) in cached:
            found += size
        hits.append(found)
        kept = [*tokens, *respond([prompt], [output])[0]][:-1]
        cached.update(tuple(kept[:end]) for end in range(size, len(kept) + 1, size))
    return hits


CONVERSATIONS = MultiTurn(num_conversations=3, turns=4, system_tokens=20, user_tokens=7, output_tokens=9)


def test_each_prompt_goes_on_from_the_one_before() -> None:
    workload = build(CONVERSATIONS, make_model())
    prompts = list(workload.prompts())
    assert [len(prompt) for prompt in prompts] == workload.prompt_tokens.tolist() == [
        27, 27, 27, 43, 43, 43, 59, 59, 59, 75, 75, 75,
    ]  # fmt: skip
    for i in range(9):
        assert np.array_equal(prompts[i + 3][: len(prompts[i])], prompts[i])
    assert workload.columns["conversation"].tolist() == [0, 1, 2] * 4
    assert workload.columns["turn"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(0, 20), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from([1, 2, 4, 5, 16]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_audit_predicts_made_up_and_recorded_answers(
    conversations: int, turns: int, system: int, user: int, output: int, size: int
) -> None:
    config = MultiTurn(
        num_conversations=conversations,
        turns=turns,
        system_tokens=system,
        user_tokens=user,
        output_tokens=output,
    )
    made_up = build(config, make_model())
    recorded = record_with(made_up, respond)
    for workload in (made_up, recorded):
        assert audit(workload, size).reusable_by_request.tolist() == served(workload, size)


def test_recording_settles_one_turn_a_call() -> None:
    workload = build(CONVERSATIONS, make_model())
    for turn in range(3):
        given = respond(list(workload.prompts()), workload.output_tokens.tolist())
        workload = record(workload, dict(enumerate(given)))
        known = workload.columns["answer_in"].reshape(4, 3)
        assert (known[: turn + 1] >= 0).all()
        assert (known[turn + 1 :] == -1).all()
    at_once = record_with(build(CONVERSATIONS, make_model()), respond)
    assert at_once.sha256 == workload.sha256 != build(CONVERSATIONS, make_model()).sha256
    assert audit(workload, 8).reusable_tokens > audit(build(CONVERSATIONS, make_model()), 8).reusable_tokens


def test_recorded_answers_are_the_generated_tokens() -> None:
    workload = record_with(build(CONVERSATIONS, make_model()), respond)
    for i in range(9):
        start = workload.prompt_tokens[i]
        answer = workload.prompt_at(i + 3)[start : start + 9].tolist()
        assert answer == respond([workload.prompt_at(i)], [9])[0]


def test_recorded_workload_is_saved_and_replayed(tmp_path: Path) -> None:
    workload = record_with(build(CONVERSATIONS, make_model()), respond)
    save(workload, tmp_path / "w.parquet")
    replay = build(Custom(path=str(tmp_path / "w.parquet")), make_model())
    assert replay.sha256 == workload.sha256
    assert audit(replay, 8).to_json() == audit(workload, 8).to_json()
    cut = build(Custom(path=str(tmp_path / "w.parquet"), limit=4), make_model())
    assert cut.columns["answer_in"].tolist() == [3, -1, -1, -1]


def test_recorded_answers_are_replayed_whatever_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "answers.parquet"
    recorded = record_with(build(CONVERSATIONS, make_model()), respond)
    save(recorded, path)
    asked = CONVERSATIONS.model_copy(update={"answers": str(path), "seed": 7, "think_s": 1.0})
    replayed = build(asked, make_model())
    assert [prompt.tolist() for prompt in replayed.prompts()] == [prompt.tolist() for prompt in recorded.prompts()]
    assert replayed.columns["answer_in"].tolist() == recorded.columns["answer_in"].tolist()
    assert replayed.columns["think_s"].tolist() == [0.0] * 3 + [1.0] * 9
    assert audit(replayed, 8).reusable_generated_tokens > 0


def test_recorded_answers_of_other_conversations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.parquet"
    save(record_with(build(CONVERSATIONS, make_model()), respond), path)
    with pytest.raises(ConfigError, match=r"workload.turns: got 5; .* was recorded with 4"):
        build(CONVERSATIONS.model_copy(update={"answers": str(path), "turns": 5}), make_model())
    with pytest.raises(WorkloadError, match="has token id"):
        build(CONVERSATIONS.model_copy(update={"answers": str(path)}), make_model(vocab_size=100))
    save(from_prompts([[1, 2]]), path)
    with pytest.raises(WorkloadError, match="not one that `llmexp record` wrote"):
        build(CONVERSATIONS.model_copy(update={"answers": str(path)}), make_model())


def test_answers_must_be_as_long_as_asked() -> None:
    workload = build(CONVERSATIONS, make_model())
    with pytest.raises(WorkloadError, match="answer to request 0: 9 tokens expected, got 2 tokens"):
        record(workload, {0: [5, 6]})
    with pytest.raises(WorkloadError, match="answer to request 0: 9 tokens expected, got none"):
        record(workload, {})


def test_thinking() -> None:
    fixed = build(CONVERSATIONS.model_copy(update={"think_s": 2.0}), make_model())
    assert fixed.columns["think_s"].tolist() == [0.0] * 3 + [2.0] * 9
    config = MultiTurn(num_conversations=500, turns=4, think_s=2.0, think="exponential", user_tokens=8, output_tokens=1)
    drawn = build(config, make_model()).columns["think_s"]
    assert (drawn[:500] == 0).all()
    assert drawn[500:].mean() == pytest.approx(2.0, rel=0.1)
    assert drawn[500:].std() == pytest.approx(2.0, rel=0.15)


def test_user_part_too_short() -> None:
    with pytest.raises(WorkloadError, match="1 of them cannot tell 200 prompts apart"):
        build(MultiTurn(num_conversations=50, user_tokens=1), make_model(vocab_size=30))
