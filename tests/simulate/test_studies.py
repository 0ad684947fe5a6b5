"""The studies' tables, and effects that the literature reports."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from llmexp.simulate import Request, Requests, Settings, StepCost, Work, simulate, studies
from llmexp.simulate.starvation import overtaken
from tests.simulate.cases import Case, cases

COST = StepCost(Work(steps=0.01, prefill_tokens=1e-4, decode_tokens=1e-4))


def shared_prefixes(groups: int, each: int, prefix: int) -> list[Request]:
    """Prompts of ``groups`` long prefixes in random order, all at once."""
    order = np.random.default_rng(0).permutation(groups * each)
    return [Request(prompt_token_ids=[int(i) % groups] * prefix + [1000 + int(i)] * 32, output_tokens=4) for i in order]


def test_order_moves_reuse_towards_the_bound() -> None:
    requests = shared_prefixes(groups=40, each=10, prefix=512)
    base = Settings(num_gpu_blocks=200, max_num_seqs=4)  # of 40 prefixes, 5 fit
    table = studies.compare(requests, studies.scheduling_order(base), COST).to_pandas().set_index("variant")
    bound = studies.reuse_bound(Requests.of(requests, base.block_size))
    assert bound == pytest.approx(0.9 * 512 / 544)
    assert table["hit_rate"]["fcfs"] < 0.15
    assert table["hit_rate"]["depth_first"] == pytest.approx(bound, abs=0.01)
    assert table["hit_rate"]["longest_prefix"] > 0.6
    assert table["overtaken_max"]["fcfs"] == 0 < table["overtaken_max"]["depth_first"]


@settings(deadline=None)
@given(case=cases())
def test_no_engine_reuses_more_than_the_bound(case: Case) -> None:
    """Without answers that later prompts repeat."""
    fresh = [replace(request, output_token_ids=None) for request in case.requests]
    requests = Requests.of(fresh, case.settings.block_size)
    result = simulate(requests, case.settings, max_concurrency=case.max_concurrency, compiled=False)
    assert studies.summary(result)["hit_rate"] <= studies.reuse_bound(requests) + 1e-12


def test_the_bound_worked_out_by_hand() -> None:
    """Blocks of 4: ``abcd`` alone computes its block, and the longer prompts hit it, whoever comes first."""
    prompts = [list(b"abcd"), list(b"abcdefgh"), list(b"abcdefghi"), list(b"xyz")]
    requests = Requests.of([Request(prompt_token_ids=p, output_tokens=1) for p in prompts], 4)
    assert studies.reuse_bound(requests) == (2 * 4 + 1 * 4) / 24


def test_static_batches_are_slower_than_continuous_ones() -> None:
    rng = np.random.default_rng(0)
    requests = [Request(prompt_token_ids=[i] * 50, output_tokens=int(rng.integers(1, 200))) for i in range(64)]
    base = Settings(num_gpu_blocks=2000, max_num_seqs=8)
    table = studies.compare(requests, studies.static_vs_continuous(base), COST).to_pandas().set_index("variant")
    assert table["request_throughput"]["continuous"] > 1.3 * table["request_throughput"]["static"]


def test_the_same_memory_in_other_blocks() -> None:
    sizes = studies.block_sizes(Settings(num_gpu_blocks=129, block_size=16), (1, 256))
    assert [v.num_gpu_blocks for v in sizes.values()] == [2049, 9]
    table = studies.compare(shared_prefixes(2, 4, 300), sizes, COST, max_concurrency=1)
    small, large = table["hit_rate"].to_pylist()
    assert small == pytest.approx(6 / 8 * 300 / 332)
    assert large == pytest.approx(6 / 8 * 256 / 332)


@pytest.mark.parametrize("variants", [studies.scheduler_policies, studies.chunked_prefill])
def test_every_variant_serves_everything(variants: object) -> None:
    base = Settings(num_gpu_blocks=300, max_num_seqs=4)
    table = studies.compare(shared_prefixes(3, 5, 64), variants(base), COST)  # type: ignore[operator]
    assert (table["request_throughput"].to_numpy() > 0).all()


def test_radix_and_blocks_reuse_about_the_same_where_memory_suffices() -> None:
    variants = studies.radix_vs_blocks(Settings(num_gpu_blocks=2, max_num_seqs=2), [300, 3000])
    table = studies.compare(shared_prefixes(20, 10, 256), variants, COST).to_pandas().set_index("variant")
    assert table["hit_rate"]["radix 3000"] == pytest.approx(table["hit_rate"]["blocks 3000"], abs=0.02)


def test_overtaking_is_counted() -> None:
    first = Request(prompt_token_ids=[0] * 16, output_tokens=5)
    low = Request(prompt_token_ids=[1] * 16, output_tokens=1, arrival_s=1.0, priority=9)
    high = [Request(prompt_token_ids=[2] * 16, output_tokens=1, arrival_s=t) for t in (2.0, 3.0)]
    result = simulate([first, low, *high], Settings(num_gpu_blocks=9, max_num_seqs=1, policy="priority"))
    assert overtaken(result).tolist() == [0, 2, 0, 0]
