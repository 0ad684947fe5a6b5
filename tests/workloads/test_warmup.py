import numpy as np
import pytest

from llmexp.schema.workloads import SharedPrefix, UniquePrefix
from llmexp.workloads.audit import shared_blocks_between
from llmexp.workloads.build import build
from llmexp.workloads.warmup import warm_up
from llmexp.workloads.workload import Workload
from tests.workloads.conftest import make_model


@pytest.mark.parametrize("config", [SharedPrefix(), UniquePrefix(num_requests=40)])
def test_shares_no_block_of_any_size(config: SharedPrefix | UniquePrefix) -> None:
    workload = build(config, make_model())
    warm = warm_up(workload, make_model(), concurrency=8, block_size=16, seed=0)
    assert [shared_blocks_between(warm, workload, size) for size in (1, 2, 16)] == [0, 0, 0]
    assert not {int(token) for prompt in warm.prompts() for token in prompt} & {0, 1, 2}


def test_all_first_tokens_taken() -> None:
    workload = build(UniquePrefix(num_requests=100, prefix_tokens=40), make_model(vocab_size=13))
    warm = warm_up(workload, make_model(vocab_size=13), concurrency=4, block_size=16, seed=0)
    assert shared_blocks_between(warm, workload, 16) == 0


def test_full_concurrency_at_bounded_cost() -> None:
    workload = build(UniquePrefix(num_requests=300, prefix_tokens=3000), make_model())
    warm = warm_up(workload, make_model(), concurrency=256, block_size=16, seed=0)
    assert len(warm) == 256
    assert warm.prompt_tokens.sum() <= 2048
    assert warm.prompt_tokens.max() == 1024
    assert set(warm.output_tokens.tolist()) == set(range(1, 9))


def test_small_workload_is_warmed_with_its_own_lengths() -> None:
    workload = build(UniquePrefix(num_requests=3, prefix_tokens=100, suffix_tokens=1, output_tokens=2), make_model())
    warm = warm_up(workload, make_model(), concurrency=8, block_size=16, seed=0)
    assert warm.prompt_tokens.tolist() == [101, 101, 101]
    assert warm.output_tokens.max() == 2


def test_deterministic() -> None:
    def warm(seed: int) -> Workload:
        return warm_up(build(SharedPrefix(), make_model()), make_model(), concurrency=4, block_size=16, seed=seed)

    assert warm(1).sha256 == warm(1).sha256 != warm(2).sha256
    assert not np.array_equal(warm(1).prompt_at(0), warm(2).prompt_at(0))
