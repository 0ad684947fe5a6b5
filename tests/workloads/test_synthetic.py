import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from llmexp.errors import WorkloadError
from llmexp.schema.accepted import explained
from llmexp.schema.workloads import LogNormal, SharedPrefix, Uniform, UniquePrefix
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from llmexp.workloads.workload import Workload
from tests.workloads.conftest import make_model


def all_tokens(workload: Workload) -> set[int]:
    return {int(token) for prompt in workload.prompts() for token in prompt}


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 128])
def test_shared_prefix_reuses_exactly_the_prefix(block_size: int) -> None:
    workload = build(SharedPrefix(num_requests=12, prefix_tokens=100, suffix_tokens=9), make_model())
    assert {len(prompt) for prompt in workload.prompts()} == {109}
    account = audit(workload, block_size)
    assert account.reusable_tokens == 11 * (100 // block_size * block_size)
    assert (account.exact_duplicates, account.order_independent) == (0, True)


@pytest.mark.parametrize("vocab_size", [7, 12, 1000, 49152])
def test_control_shares_nothing_whatever_the_vocabulary(vocab_size: int) -> None:
    config = UniquePrefix(
        num_requests=60, prefix_tokens=20, suffix_tokens=Uniform(distribution="uniform", min=1, max=9)
    )
    workload = build(config, make_model(vocab_size))
    marks = 6 if vocab_size == 7 else 4  # 2 first tokens take 6 to number 60 prompts, 4 take 3
    assert audit(workload, marks).shared_blocks == 0
    assert not all_tokens(workload) & {0, 1, 2}
    assert max(all_tokens(workload)) < vocab_size


def test_first_tokens_of_the_control_are_distinct() -> None:
    workload = build(UniquePrefix(num_requests=400), make_model())
    assert len({int(prompt[0]) for prompt in workload.prompts()}) == 400


def test_control_has_the_lengths_of_shared_prefix() -> None:
    lengths = LogNormal(distribution="lognormal", median=40, sigma=1, min=4, max=300)
    shared = build(SharedPrefix(num_requests=50, suffix_tokens=lengths, output_tokens=lengths, seed=3), make_model())
    unique = build(UniquePrefix(num_requests=50, suffix_tokens=lengths, output_tokens=lengths, seed=3), make_model())
    assert shared.prompt_tokens.tolist() == unique.prompt_tokens.tolist()
    assert shared.output_tokens.tolist() == unique.output_tokens.tolist()
    assert len(set(shared.prompt_tokens.tolist())) > 10


def test_content_is_pinned() -> None:
    """Golden: a changed hash means that every stored comparison loses its counterpart."""
    workload = build(SharedPrefix(num_prefixes=3, zipf=1.0, seed=7), make_model())
    assert workload.sha256 == "9110d1674f880daaf9dbd0a0a2b3a916ecc716f788af07a605f171b427839f1a"


def test_same_recipe_same_content_other_seed_other_content() -> None:
    first, again, other = (build(SharedPrefix(seed=seed), make_model()) for seed in (1, 1, 2))
    assert first.sha256 == again.sha256 != other.sha256
    assert not all(np.array_equal(a, b) for a, b in zip(first.prompts(), other.prompts(), strict=True))


def test_popularity_follows_zipf() -> None:
    workload = build(SharedPrefix(num_requests=1100, num_prefixes=3, zipf=1.0, prefix_tokens=8), make_model())
    assert np.bincount(workload.columns["prefix"]) == pytest.approx(np.array([600, 300, 200]), abs=1)


def test_orders_of_prefixes() -> None:
    def groups(order: str) -> list[int]:
        config = SharedPrefix.model_validate({"num_requests": 7, "num_prefixes": 3, "order": order, "seed": 5})
        return [int(group) for group in build(config, make_model()).columns["prefix"]]

    grouped = groups("grouped")
    assert grouped == sorted(grouped)
    assert groups("interleaved")[:6] == [0, 1, 2, 0, 1, 2]
    assert sorted(groups("shuffled")) == grouped != groups("shuffled")


@given(
    st.floats(0, 0.7), st.sampled_from([1, 4, 16, 32]), st.integers(1, 3), st.floats(0, 1.5),
    st.integers(0, 99),
    st.sampled_from(["shuffled", "grouped", "interleaved"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_reuse_target_is_met_within_one_block(
    target: float, block: int, prefixes: int, zipf: float, seed: int, order: str
) -> None:
    config = SharedPrefix.model_validate(
        {
            "num_requests": 30, "num_prefixes": prefixes, "zipf": zipf, "prefix_tokens": 200, "order": order,
            "suffix_tokens": {"distribution": "uniform", "min": 1, "max": 60}, "reuse": target,
            "reuse_block_size": block, "seed": seed,
        }
    )  # fmt: skip
    workload = build(config, make_model())
    account = audit(workload, block)
    assert abs(account.reusable_tokens - target * account.prompt_tokens) <= block
    assert account.exact_duplicates == 0
    assert account.order_independent


def test_reuse_that_the_lengths_cannot_give() -> None:
    with pytest.raises(WorkloadError, match=r"workload.reuse=0.9.*at most 0\.7"):
        build(SharedPrefix(num_requests=4, reuse=0.9), make_model())


def test_suffix_too_short_to_differ() -> None:
    with pytest.raises(WorkloadError, match="telling 100 prompts apart"):
        build(SharedPrefix(num_requests=100, suffix_tokens=1), make_model(vocab_size=13))


def test_no_vocabulary() -> None:
    with pytest.raises(WorkloadError, match="3 tokens that are not special"):
        build(UniquePrefix(), make_model(vocab_size=6))


def test_request_longer_than_the_model_allows() -> None:
    with pytest.raises(WorkloadError, match="max_model_len is 551"):
        build(SharedPrefix(), make_model(max_model_len=551))
    build(SharedPrefix(), make_model(max_model_len=552))


@given(st.floats(1, 500), st.floats(0.1, 2), st.integers(1, 50), st.integers(50, 900), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_lognormal_lengths_stay_within_their_ends(median: float, sigma: float, low: int, high: int, seed: int) -> None:
    lengths = LogNormal(distribution="lognormal", median=median, sigma=sigma, min=low, max=high)
    drawn = build(UniquePrefix(output_tokens=lengths, num_requests=50, seed=seed), make_model()).output_tokens
    assert low <= drawn.min() <= drawn.max() <= high


def test_lognormal_median() -> None:
    lengths = LogNormal(distribution="lognormal", median=200, sigma=0.5, min=1, max=100_000)
    model = make_model(vocab_size=49152, max_model_len=200_000)
    drawn = build(UniquePrefix(output_tokens=lengths, num_requests=4000), model).output_tokens
    assert np.median(drawn) == pytest.approx(200, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.05)


def test_prompts_take_numpy_indices() -> None:
    workload = build(SharedPrefix(), make_model())
    assert all(np.array_equal(workload.prompt_at(i), workload.prompt_at(int(i))) for i in np.arange(16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"distribution": "uniform", "min": 9, "max": 3}, "from min=9 to max=3: the one is above"),
        (
            {"distribution": "normal", "mean": 9},
            "suffix_tokens.distribution: got 'normal'; accepted is uniform or lognormal",
        ),
        (0, "suffix_tokens: got 0; accepted is an integer from 1 to 536870911, or {distribution: uniform, min, max}"),
        ("many", "suffix_tokens: got 'many'; accepted is an integer"),
    ],
)
def test_wrong_lengths_are_told_once(lengths: object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SharedPrefix.model_validate({"suffix_tokens": lengths})
    (line,) = explained(caught.value, SharedPrefix, {"suffix_tokens": lengths})
    assert message in line
