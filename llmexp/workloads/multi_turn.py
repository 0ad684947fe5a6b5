"""Conversations. What a later prompt reuses depends on whether it holds the answer that the engine gave.

Built from a seed, prompts hold made-up answers: only the prompt part of an earlier turn can be reused. To
replay a conversation as it would go on, `llmexp record` has an engine answer once, and `workload.answers` takes
the file: then every arm is sent the same recorded tokens, and what decode left in the cache counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmexp.errors import ConfigError, WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import MultiTurn
from llmexp.workloads import store
from llmexp.workloads.custom import require_known_tokens
from llmexp.workloads.draws import Vocabulary, lengths, uniforms
from llmexp.workloads.files import sha256_of
from llmexp.workloads.workload import Tokens, Workload

CONVERSATIONS_IN_MEMORY = 64


def multi_turn(config: MultiTurn, model: Model) -> Workload:
    """`num_conversations` × `turns` requests: first turns of all conversations, then second turns, and so on.

    Raises WorkloadError if a user's part is too short to tell the prompts apart, or if the recorded answers are
    no conversations of this shape.
    """
    workload = _recorded(config, model) if config.answers else _made_up(config, model)
    shape = config.turns, config.num_conversations
    think = np.full(shape, config.think_s)
    if config.think == "exponential":
        think *= -np.log(uniforms(think.size, config.seed, "think")).reshape(shape)
    think[0] = 0.0
    return replace(workload, columns={**workload.columns, "think_s": think.ravel()})


def _recorded(config: MultiTurn, model: Model) -> Workload:
    """The conversations of a file, whatever the seed: all trials replay the same ones."""
    assert config.answers is not None
    found = store.load(config.answers)
    if "answer_in" not in found.columns or found.recipe.get("kind") != config.kind:
        raise WorkloadError(f"{config.answers}: a workload, but not one that `llmexp record` wrote")
    asked = config.model_dump(mode="json")
    for key in ("num_conversations", "turns", "system_tokens", "user_tokens", "output_tokens"):
        if found.recipe.get(key) != asked[key]:
            raise ConfigError(
                f"workload.{key}: got {asked[key]}; {config.answers} was recorded with {found.recipe.get(key)}"
            )
    require_known_tokens(config.answers, found, model)
    kept = ("seed", "vocabulary", "recorded_with")
    recorded = {key: found.recipe.get(key) for key in kept}
    return replace(found, recipe={"file_sha256": sha256_of(config.answers), "recorded": recorded})


def _made_up(config: MultiTurn, model: Model) -> Workload:
    shape = turns, conversations = config.turns, config.num_conversations
    count = turns * conversations
    user = lengths(config.user_tokens, count, config.seed, "user").reshape(shape)
    answer = lengths(config.output_tokens, count, config.seed, "output").reshape(shape)
    vocabulary = Vocabulary(model, config.seed)
    marks = vocabulary.mark_tokens(1 + count)
    if user.min() < marks:
        raise WorkloadError(
            f"workload.user_tokens: {user.min()} of them cannot tell {count} prompts apart; {marks} can"
        )
    system = vocabulary.passage(0, config.system_tokens, marks, "system")

    @lru_cache(maxsize=CONVERSATIONS_IN_MEMORY)
    def whole(conversation: int) -> Tokens:
        parts = [system]
        for turn in range(turns):
            number = turn * conversations + conversation
            parts.append(vocabulary.passage(1 + number, int(user[turn, conversation]), marks, "user"))
            parts.append(vocabulary.passage(1 + number, int(answer[turn, conversation]), 0, "answer"))
        return np.concatenate(parts)

    prompt_tokens = config.system_tokens + np.cumsum(user, axis=0) + np.cumsum(answer, axis=0) - answer
    flat = np.minimum(prompt_tokens, 2**30).astype(np.int32).ravel()  # what is longer is too long all the same
    return Workload(
        name=config.kind,
        recipe={},
        prompt_at=lambda i: whole(i % conversations)[: flat[i]],
        prompt_tokens=flat,
        output_tokens=answer.ravel(),
        columns={
            "conversation": np.tile(np.arange(conversations), turns),
            "turn": np.repeat(np.arange(turns), conversations),
            "answer_in": np.full(count, -1),
        },
    )


def record(workload: Workload, answers: Mapping[int, Sequence[int]]) -> Workload:
    """The conversations with the engine's answers in place of made-up ones.

    `answers[i]` are the token ids generated for request i. A generated answer is genuine only if the prompt
    held genuine answers, so each call settles one more turn of every conversation: with answers to a replay
    of the workload, call it `turns - 1` times, or let `record_with` do so.

    Raises WorkloadError if an answer is missing or has another length than the workload asks for.
    """
    following = _following(workload.columns["conversation"])
    answer_in = workload.columns["answer_in"].copy()
    settled: dict[int, Tokens] = {}
    for first in np.flatnonzero(workload.columns["turn"] == 0).tolist():
        i = first
        while following[i] >= 0 and answer_in[i] >= 0:
            i = int(following[i])
        if following[i] < 0:
            continue
        if i not in answers or len(answers[i]) != workload.output_tokens[i]:
            got = f"{len(answers[i])} tokens" if i in answers else "none"
            raise WorkloadError(f"answer to request {i}: {workload.output_tokens[i]} tokens expected, got {got}")
        settled[i] = np.asarray(answers[i], np.int32)
        answer_in[i] = following[i]
    before = {int(after): i for i, after in enumerate(following) if after >= 0}

    def prompt_at(i: int) -> Tokens:
        tokens = workload.prompt_at(i).copy()
        earlier = before.get(i)
        while earlier is not None:
            if earlier in settled:
                start = workload.prompt_tokens[earlier]
                tokens[start : start + len(settled[earlier])] = settled[earlier]
            earlier = before.get(earlier)
        return tokens

    return replace(workload, prompt_at=prompt_at, columns={**workload.columns, "answer_in": answer_in})


def as_recorded(workload: Workload) -> Workload:
    """The conversations as they would be recorded of an engine that gives the made-up answers: each request's
    answer is the one that the next prompt holds."""
    following = _following(workload.columns["conversation"])
    return replace(workload, columns={**workload.columns, "answer_in": following})


def record_with(workload: Workload, generate: Callable[[list[Tokens], list[int]], list[Sequence[int]]]) -> Workload:
    """Records all answers turn by turn; `generate(prompts, output_tokens)` is asked for one turn at a time."""
    turns = workload.columns["turn"]
    for turn in range(int(turns.max())):
        asked = np.flatnonzero(turns == turn).tolist()
        given = generate([workload.prompt_at(i) for i in asked], [int(workload.output_tokens[i]) for i in asked])
        workload = record(workload, dict(zip(asked, given, strict=True)))
    return workload


def _following(conversation: NDArray[np.int64]) -> NDArray[np.int64]:
    """The next request of each request's conversation, -1 after the last, shape `(n,)`."""
    following = np.full(len(conversation), -1)
    latest: dict[int, int] = {}
    for i, number in enumerate(conversation.tolist()):
        if number in latest:
            following[latest[number]] = i
        latest[number] = i
    return following
