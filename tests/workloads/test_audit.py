"""The audit against a dumb reference: prefixes as tuples, in a set or an LRU list."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.errors import WorkloadError
from llmexp.workloads.audit import (
    audit,
    lru_hit_rate,
    pressure,
    require_disjoint,
    require_no_reuse,
    reuse_by_position,
    reuse_distances,
    shared_blocks_between,
)
from llmexp.workloads.workload import Workload
from tests.workloads.conftest import from_prompts


def prefixes(prompt: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]


def hits_without_eviction(prompts: list[list[int]], size: int) -> list[int]:
    cached: set[tuple[int, ...]] = set()
    hits = []
    for prompt in prompts:
        found = 0
        for prefix in prefixes(prompt, size):
            if prefix not in cached or len(prefix) > len(prompt) - 1:
                break
            found += size
        hits.append(found)
        cached.update(prefixes(prompt, size))
    return hits


def hits_of_lru(prompts: list[list[int]], size: int, capacity: int) -> int:
    """Least recently used first in `order`; a request's blocks are touched tail first, all at its end."""
    order: list[tuple[int, ...]] = []
    hits = 0
    for prompt in prompts:
        for prefix in prefixes(prompt, size):
            if prefix not in order or len(prefix) > len(prompt) - 1:
                break
            hits += size
        for prefix in reversed(prefixes(prompt, size)):
            if prefix in order:
                order.remove(prefix)
            order.append(prefix)
        order = order[-capacity:] if capacity else []
    return hits


# Few symbols and short prompts, so that sharing, repetition and whole-block lengths are common.
prompt_lists = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)
sizes = st.integers(1, 5)


@given(prompt_lists, sizes)
def test_bound_is_what_a_cache_without_eviction_serves(prompts: list[list[int]], size: int) -> None:
    account = audit(from_prompts(prompts), size)
    assert account.reusable_by_request.tolist() == hits_without_eviction(prompts, size)
    assert account.reusable_tokens == sum(hits_without_eviction(prompts, size))
    distinct = {prefix for prompt in prompts for prefix in prefixes(prompt, size)}
    assert account.distinct_blocks == len(distinct)
    holders = [sum(prefix in prefixes(prompt, size) for prompt in prompts) for prefix in distinct]
    assert account.shared_blocks == sum(count > 1 for count in holders)
    assert account.exact_duplicates == len(prompts) - len({tuple(prompt) for prompt in prompts})
    assert account.prompt_tokens == sum(map(len, prompts))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 3))
@settings(max_examples=60)
def test_order_independence_is_told_exactly(prompts: list[list[int]], size: int) -> None:
    from itertools import permutations

    totals = {sum(hits_without_eviction(list(order), size)) for order in permutations(prompts)}
    assert audit(from_prompts(prompts), size).order_independent == (len(totals) == 1)


@given(prompt_lists, sizes, st.integers(0, 20))
def test_lru_hit_rate_is_that_of_an_lru_list(prompts: list[list[int]], size: int, capacity: int) -> None:
    expected = hits_of_lru(prompts, size, capacity) / sum(map(len, prompts))
    assert lru_hit_rate(from_prompts(prompts), size, capacity) == pytest.approx(expected)


@given(prompt_lists, sizes)
def test_lru_that_holds_everything_serves_the_bound(prompts: list[list[int]], size: int) -> None:
    account = audit(from_prompts(prompts), size)
    assert lru_hit_rate(from_prompts(prompts), size, account.blocks_to_hold) == pytest.approx(account.ideal_hit_rate)
    assert len(reuse_distances(from_prompts(prompts), size)) * size == account.reusable_tokens


def test_a_repeated_prompt_of_whole_blocks_recomputes_its_last() -> None:
    prompt = list(range(32))
    assert audit(from_prompts([prompt, prompt]), 16).reusable_by_request.tolist() == [0, 16]
    assert audit(from_prompts([prompt, [*prompt, 99]]), 16).reusable_by_request.tolist() == [0, 32]


def test_a_later_equal_block_after_a_different_one_is_no_hit() -> None:
    assert audit(from_prompts([[1, 1, 2, 2, 9], [3, 3, 2, 2, 9]]), 2).shared_blocks == 0


def test_a_token_moved_within_a_prefix_is_another_prefix() -> None:
    assert audit(from_prompts([[1, 2, 9], [2, 1, 9]]), 2).shared_blocks == 0


def test_block_rate_counts_the_partial_last_block_as_traces_do() -> None:
    account = audit(from_prompts([[1, 2, 3], [1, 2, 3], [1, 2, 4]]), 2)
    assert account.ideal_block_hit_rate == pytest.approx(3 / 6)  # 2 of the duplicate, 1 of the last
    assert account.ideal_hit_rate == pytest.approx(4 / 9)


def conversation(known: bool) -> Workload:
    """Turn 1: 5 tokens, answer of 4; turn 2: those 9 and 3 more. Blocks of 4."""
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
    return from_prompts(prompts, outputs=[4, 1], columns={"answer_in": np.array([1 if known else -1, -1])})


def test_known_answers_count_up_to_the_token_before_the_last() -> None:
    assert audit(conversation(known=False), 4).reusable_by_request.tolist() == [0, 4]
    assert audit(conversation(known=True), 4).reusable_by_request.tolist() == [
        0,
        8,
    ]  # 5 + 4 - 1 = 8 tokens have KV
    assert len(reuse_distances(conversation(known=True), 4)) == 2
    shorter = from_prompts(
        [[1, 2, 3, 4, 5], list(range(1, 13))], outputs=[3, 1], columns={"answer_in": np.array([1, -1])}
    )
    assert audit(shorter, 4).reusable_by_request.tolist() == [0, 4]


def test_generated_tokens_are_told_apart_from_those_of_prompts() -> None:
    known, made_up = audit(conversation(known=True), 4), audit(conversation(known=False), 4)
    assert (known.reusable_tokens, known.reusable_generated_tokens) == (8, 4)
    assert (made_up.reusable_tokens, made_up.reusable_generated_tokens) == (4, 0)
    assert known.blocks_to_hold == made_up.blocks_to_hold, "the engine may answer otherwise"


@pytest.mark.parametrize(("conversations", "independent"), [([0, 0], True), ([0, 1], False), ([-1, -1], False)])
def test_turns_of_a_conversation_keep_their_order(conversations: list[int], independent: bool) -> None:
    # The second prompt goes on where the first one ends, with a full block.
    workload = from_prompts([[1, 2], [1, 2, 3, 4]], columns={"conversation": np.array(conversations)})
    assert audit(workload, 2).order_independent == independent


def test_blocks_to_hold_counts_prompts_once_and_decode_apart() -> None:
    # Blocks (1, 2), (3, 4) and (5, 6); each prompt decodes 3 tokens, 2 of them with KV: one more block.
    account = audit(from_prompts([[1, 2, 3, 4], [1, 2, 5, 6]], output_tokens=3), 2)
    assert account.blocks_to_hold == 3 + 2 + 1  # and the null block


def test_reuse_by_position() -> None:
    workload = from_prompts([[1, 2, 3, 4, 5], [1, 2, 9, 9, 9], [1, 2, 3, 4, 7], [8]])
    assert reuse_by_position(workload, audit(workload, 2)).tolist() == pytest.approx([2 / 3, 1 / 3])


def test_pressure_adds_up_consecutive_requests() -> None:
    workload = from_prompts([[1] * 4, [2] * 8, [3] * 2], output_tokens=3)  # 3, 5 and 2 blocks of 2
    asked = pressure(workload, 2, capacity_blocks=16, concurrency=2)
    assert (asked.mean_blocks, asked.peak_blocks, asked.peak_share) == (7.5, 8, 0.5)


def test_pressure_of_conversations_is_that_of_one_turn_each() -> None:
    columns = {"conversation": np.array([0, 1, 0, 1])}
    workload = from_prompts([[1] * 4, [2] * 4, [1] * 8, [2] * 8], output_tokens=3, columns=columns)
    asked = pressure(workload, 2, capacity_blocks=16, concurrency=8)
    assert (asked.mean_blocks, asked.peak_blocks) == (8, 10)  # pairs of 3 and 3, 3 and 5, 5 and 5 blocks


def test_contamination_is_an_error() -> None:
    shared = from_prompts([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(WorkloadError, match="1 blocks of 2 tokens are shared"):
        require_no_reuse(shared, audit(shared, 2))
    require_no_reuse(shared, audit(shared, 3))
    with pytest.raises(WorkloadError, match="share 1 blocks"):
        require_disjoint(shared, from_prompts([[1, 2]]), 2)
    assert shared_blocks_between(shared, from_prompts([[2, 1], [1, 2, 3, 4]]), 2) == 1


def test_declared_length_must_hold() -> None:
    workload = from_prompts([[1, 2, 3]])
    wrong = Workload("w", {}, workload.prompt_at, np.array([4], np.int32), workload.output_tokens)
    with pytest.raises(WorkloadError, match="declares 4 prompt tokens and has 3"):
        audit(wrong, 2)


def test_account_is_json() -> None:
    account = audit(from_prompts([[1, 2, 3], [1, 2, 4]]), 2)
    assert json.loads(json.dumps(account.to_json()))["reusable_tokens"] == 2
