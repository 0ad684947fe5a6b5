"""Caches, policies and batching that vLLM does not have."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.errors import ConfigError
from llmexp.simulate import Request, Requests, Settings, simulate
from llmexp.simulate.loop import sequence
from llmexp.simulate.policies import POLICIES
from llmexp.simulate.radix import Node, RadixCache
from llmexp.simulate.scheduler import Scheduler
from tests.simulate.cases import Case, cases

radix = st.sampled_from(["radix", "radix_trimmed"])


def tree_blocks(node: Node) -> int:
    return len(node.run) + sum(tree_blocks(child) for child in node.children.values())


def idle_blocks(node: Node) -> int:
    return (0 if node.users else len(node.run)) + sum(idle_blocks(child) for child in node.children.values())


def apart(case: Case) -> Case:
    """No two requests sent at once. Of two with equal priority that were, vLLM would preempt the earlier one of the
    batch, and where both do not fit, each in turn, for ever."""
    requests = [replace(request, arrival_s=request.arrival_s + i / 100) for i, request in enumerate(case.requests)]
    many = None if case.settings.policy == "priority" else case.max_concurrency
    return replace(case, requests=requests, max_concurrency=many)


@settings(deadline=None)
@given(case=cases().map(apart), prefix_cache=radix)
def test_radix_serves_everything_and_never_exceeds_its_memory(case: Case, prefix_cache: str) -> None:
    engine = replace(case.settings, prefix_cache=prefix_cache, enable_prefix_caching=True)
    requests = Requests.of(case.requests, engine.block_size)
    result = simulate(requests, engine, max_concurrency=case.max_concurrency)
    assert sum(result.steps["finished"].to_pylist()) == len(requests)
    scheduler = Scheduler(engine)
    cache = scheduler.cache
    assert isinstance(cache, RadixCache)
    for i in range(len(requests)):
        scheduler.add(sequence(requests, i, float(i), i))
    while scheduler.running or scheduler.waiting:
        scheduler.update(scheduler.schedule())
        private = sum(held.private for held in cache._held.values())
        assert cache.unused + private + tree_blocks(cache._root) == engine.num_gpu_blocks - 1
        assert cache.evictable == idle_blocks(cache._root)
        assert cache.unused >= 0 and private >= 0
    assert cache.num_free_blocks == engine.num_gpu_blocks - 1


@settings(deadline=None)
@given(case=cases(), prefix_cache=radix)
def test_one_by_one_with_room_for_all_a_tree_hits_what_blocks_hit(case: Case, prefix_cache: str) -> None:
    blocks = replace(case.settings, num_gpu_blocks=10_000, enable_prefix_caching=True, scheduler_reserve_full_isl=True)
    tree = replace(blocks, prefix_cache=prefix_cache)
    hits = [simulate(case.requests, s, max_concurrency=1).requests["cached_tokens"] for s in (blocks, tree)]
    assert hits[0] == hits[1]


def served(prompts: list[list[int]], blocks: int, prefix_cache: str) -> list[int]:
    """Cached tokens of single-token requests, one after the other, with blocks of one token."""
    requests = [Request(prompt_token_ids=p, output_tokens=1) for p in prompts]
    engine = Settings(num_gpu_blocks=blocks + 1, block_size=1, prefix_cache=prefix_cache)  # type: ignore[arg-type]
    cached: list[int] = simulate(requests, engine, max_concurrency=1).requests["cached_tokens"].to_pylist()
    return cached


def test_a_whole_leaf_goes_where_a_trimmed_one_keeps_its_head() -> None:
    a, b = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    assert served([a, b, a], 8, "radix") == [0, 0, 0]
    # 2 of a's 6 blocks had to go; of the other 4, then, all are hit
    assert served([a, b, a], 8, "radix_trimmed") == [0, 0, 4]
    assert served([a, b, a], 8, "blocks") == [0, 0, 4]


def test_the_least_recently_used_leaf_goes_first() -> None:
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    assert served([a, b, a, c, a, b], 12 - 1, "radix") == [0, 0, 3, 0, 3, 0]


def order_of(policy: str, requests: list[Request]) -> list[int]:
    """The order in which requests get into a batch of one, behind a first request."""
    first = Request(prompt_token_ids=[0] * 64, output_tokens=4)
    engine = Settings(num_gpu_blocks=100, max_num_seqs=1, policy=policy)  # type: ignore[arg-type]
    result = simulate([first, *(replace(r, arrival_s=1.0) for r in requests)], engine)
    admitted = result.requests["admitted_s"].to_pylist()[1:]
    return sorted(range(len(requests)), key=lambda i: admitted[i])


def test_each_policy_picks_what_it_says() -> None:
    requests = [
        Request(prompt_token_ids=[1] * 40, output_tokens=1, deadline_s=30.0, priority=1),
        Request(prompt_token_ids=[0] * 64, output_tokens=90, deadline_s=20.0, priority=1),  # hits 48 tokens
        Request(prompt_token_ids=[2] * 20, output_tokens=40, deadline_s=10.0, priority=2),
        Request(prompt_token_ids=[1] * 32 + [3] * 20, output_tokens=3, priority=0),
    ]
    expected = {
        "fcfs": [0, 1, 2, 3],
        "priority": [3, 0, 1, 2],
        "random": [0, 1, 3, 2],
        "shortest_prefill": [1, 2, 0, 3],  # 16, 20, 40 and, once 0 is cached, 20 tokens to compute
        "shortest_cache": [2, 0, 3, 1],
        "shortest_service": [0, 3, 2, 1],
        "deadline": [2, 1, 0, 3],
        "memory_aware_deadline": [2, 1, 0, 3],
        "longest_prefix": [1, 0, 3, 2],  # 3 hits what 0 has left behind
        "depth_first": [1, 0, 3, 2],
    }
    assert {policy: order_of(policy, requests) for policy in POLICIES} == expected


def test_only_the_memory_aware_policy_lets_small_requests_pass_a_blocked_one() -> None:
    running = Request(prompt_token_ids=[0] * 64, output_tokens=40)
    large = Request(prompt_token_ids=[1] * 100, output_tokens=2, arrival_s=1.0, deadline_s=1.0)
    small = Request(prompt_token_ids=[2] * 16, output_tokens=2, arrival_s=1.0, deadline_s=9.0)
    for policy, overtakes in (("deadline", False), ("memory_aware_deadline", True)):
        engine = Settings(num_gpu_blocks=11, max_num_seqs=8, policy=policy)  # type: ignore[arg-type]
        admitted = simulate([running, large, small], engine).requests["admitted_s"].to_pylist()
        assert (admitted[2] < admitted[1]) is overtakes


def test_a_static_batch_waits_for_its_last_answer() -> None:
    requests = [Request(prompt_token_ids=[i], output_tokens=n) for i, n in enumerate([2, 9, 1])]
    static = Settings(num_gpu_blocks=50, max_num_seqs=2, batching="static")
    assert simulate(requests, static).requests["admitted_s"].to_pylist() == [0.0, 0.0, 9.0]
    continuous = replace(static, batching="continuous")
    assert simulate(requests, continuous).requests["admitted_s"].to_pylist() == [0.0, 0.0, 2.0]


def test_what_vllm_cannot_do_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="compiled"):
        simulate([], Settings(num_gpu_blocks=9, batching="static"), compiled=True)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        Settings(num_gpu_blocks=9, prefix_cache="radix", enable_prefix_caching=False)
