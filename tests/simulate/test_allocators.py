import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmexp.simulate.allocators import Allocator, Contiguous, Paged, beam_blocks, memory_usage
from llmexp.simulate.errors import RequestNeverFitsError

ALLOCATORS = {
    "max": lambda: Contiguous(4096, "max", 256),
    "pow2": lambda: Contiguous(4096, "pow2", 256),
    "oracle": lambda: Contiguous(4096, "oracle", 256),
    "paged": lambda: Paged(4096, 16),
}
# The last one is preempted when it has 129 tokens, for which the 8 blocks that are free then are too few.
PREEMPTED = [
    *[(1, 1)] * 6, *[(1, 33)] * 9, *[(17, 33)] * 5, *[(33, 33)] * 5, *[(49, 33)] * 6, *[(65, 33)] * 7, *[(81, 33)] * 8,
    *[(97, 33)] * 3, (98, 32),
]  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100)), min_size=50, max_size=60),
    st.sampled_from(sorted(ALLOCATORS)),
)
@example(PREEMPTED, "paged")
def test_shares_add_up_and_paging_wastes_less_than_a_block_a_request(lengths: list[tuple[int, int]], name: str) -> None:
    prompts, outputs = np.array(lengths).T
    try:
        usage = memory_usage(prompts, outputs, ALLOCATORS[name]())
    except ValueError as error:
        assert "no request ever waited" in str(error)
        return
    assert sum(usage) == pytest.approx(1.0)
    assert min(usage) >= -1e-12
    if name == "paged":
        # at most 15 of each request's 16 or more tokens of the last block
        assert usage.internal + usage.later <= 15 * 4096 / 16 / 4096
        # Less than the next request needs, which may have been preempted with all of its tokens but one.
        longest = int((prompts + outputs).max()) - 1
        assert usage.external < -(-longest // 16) * 16 / 4096
    if name == "max":
        assert usage.external == pytest.approx(0.0)  # ranges of equal size leave no gaps


def test_equal_requests_worked_out_by_hand() -> None:
    """Prompts of 64 and answers of 64 in 1024 tokens. Contiguous, 8 run at once and hold 64 to 127 tokens."""
    prompts, outputs = [64] * 80, [64] * 80
    oracle = memory_usage(prompts, outputs, Contiguous(1024, "oracle", 512))
    assert oracle.tokens == pytest.approx(8 * np.mean(range(64, 128)) / 1024)
    assert oracle.internal == oracle.external == 0.0
    most = memory_usage(prompts, outputs, Contiguous(1024, "max", 512))
    assert most.tokens == pytest.approx(2 * np.mean(range(64, 128)) / 1024)
    assert most.internal == pytest.approx(2 * (512 - 128) / 1024)
    assert memory_usage(prompts, outputs, Paged(1024, 16)).tokens > 0.9


def test_buddies_merge_back() -> None:
    memory: Allocator = Contiguous(96, "oracle", 96)
    small = [memory.admit(1, 8) for _ in range(12)]
    assert all(small) and memory.admit(1, 1) is None
    for grant in small:
        assert grant is not None
        memory.release(grant)
    assert memory.admit(1, 64) is not None and memory.admit(1, 32) is not None and memory.admit(1, 1) is None


@pytest.mark.parametrize("allocator", [Contiguous(64, "oracle", 512), Paged(64, 16)])
def test_a_request_larger_than_the_memory_is_refused(allocator: Allocator) -> None:
    with pytest.raises(RequestNeverFitsError, match="64 tokens"):
        memory_usage([10, 40, 5], [4, 40, 5], allocator)


def test_parallel_samples_share_the_prompt() -> None:
    """20 prompt tokens, 3 samples of 20: block 1 is shared, block 2 copied by all writers but the last."""
    shared, alone = beam_blocks(20, [[0, 0, 0], *[[0, 1, 2]] * 19], 16)
    assert shared[0] == 1 + 3 and alone[0] == 6
    assert shared[-1] == 1 + 3 * 2 and alone[-1] == 9


def test_beams_drop_what_only_dead_beams_held() -> None:
    """Blocks of 2: both beams go on from beam 0, so beam 1's own block is gone."""
    shared, alone = beam_blocks(2, [[0, 0], [0, 1], [0, 0]], 2)
    assert shared == [1 + 2, 1 + 2, 1 + 1 + 2]
    assert alone == [4, 4, 6]
