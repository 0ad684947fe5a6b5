"""Golden values are worked out by hand from the published dimensions."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.architecture import Architecture
from llmexp.errors import ConfigError
from llmexp.simulate import StepCost, Work
from llmexp.simulate.calibrate import fit
from llmexp.simulate.errors import CalibrationError
from llmexp.simulate.roofline import Gpu, all_reduce_s, roofline

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GPU = Gpu(flops_per_s=1e15, bandwidth_bytes_per_s=4e12, link_bytes_per_s=4e11, link_latency_s=1e-6)


def architecture(config: dict[str, int]) -> Architecture:
    found = Architecture.of(config)
    assert found is not None
    return found


MODEL = architecture(LLAMA_3_8B)


def test_llama_3_8b_has_eight_billion_parameters() -> None:
    embedding = MODEL.head_weights
    assert MODEL.layer_weights + MODEL.head_weights + embedding == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_3_8B, 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        # OPT-13B, multi-head: the PagedAttention paper gives 800 KB a token
        (
            {
                "hidden_size": 5120,
                "intermediate_size": 20480,
                "num_attention_heads": 40,
                "num_hidden_layers": 40,
                "vocab_size": 50272,
            },
            819_200,
        ),
        # the attention of DeepSeek-V2: 60 layers x (512 + 64) x 2 bytes
        (
            {
                "hidden_size": 5120,
                "intermediate_size": 12288,
                "num_attention_heads": 128,
                "num_hidden_layers": 60,
                "vocab_size": 102400,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            69_120,
        ),
    ],
)
def test_kv_bytes_per_token(config: dict[str, int], expected: int) -> None:
    assert 2 * architecture(config).kv_values_per_token == expected


def test_cross_layer_sharing_shrinks_the_kv_cache() -> None:
    assert 2 * replace(MODEL, kv_sharing_layers=2).kv_values_per_token == 131_072 / 2


def test_kv_heads_are_split_over_gpus_until_they_are_copied() -> None:
    assert [MODEL.kv_shards(devices) for devices in (1, 8, 16)] == [1, 8, 8]
    assert replace(MODEL, kv_lora_rank=512).kv_shards(8) == 1


def test_decode_is_bound_by_weights_and_prefill_by_arithmetic() -> None:
    cost = roofline(MODEL, GPU)
    weights = (8.03e9 - 128256 * 4096) * 2
    one = Work(1, 0, 1, 1, 1, 1)
    assert cost.duration_s(one) == pytest.approx(weights / 4e12, rel=1e-3)
    n = 8192
    prefill = Work(1, n, 0, 1, n * (n + 1) // 2, n)
    linear = 2 * MODEL.layer_weights * n / 1e15
    attention = 4 * 32 * 32 * 128 * n * (n + 1) / 2 / 1e15
    assert cost.duration_s(prefill) == pytest.approx(linear + attention, rel=1e-3)


def test_ring_all_reduce() -> None:
    assert all_reduce_s(4e9, GPU, 1) == 0.0
    # p=2: the whole buffer crosses the link once, in 2 rounds
    assert all_reduce_s(4e9, GPU, 2) == pytest.approx(4e9 / 4e11 + 2e-6)
    # p=8: 14 rounds of an eighth
    assert all_reduce_s(4e9, GPU, 8) == pytest.approx(14 * (0.5e9 / 4e11 + 1e-6))
    with pytest.raises(ConfigError, match="link_bytes_per_s"):
        all_reduce_s(1.0, Gpu(flops_per_s=1e15, bandwidth_bytes_per_s=4e12), 2)


def test_tensor_parallelism_halves_the_work_and_adds_two_all_reduces_a_layer() -> None:
    work = Work(1, 0, 64, 64, 64 * 1000, 64 * 1000)
    alone, both = (roofline(MODEL, GPU, tensor_parallel_size=p).duration_s(work) for p in (1, 2))
    communication = 64 * all_reduce_s(64 * 4096 * 2, GPU, 2)
    assert both == pytest.approx(alone / 2 + communication)


works = st.lists(st.builds(Work, st.just(1), *[st.integers(0, 5000)] * 5), min_size=30, max_size=60, unique=True)


@given(work=works, truth=st.builds(Work, *[st.floats(1e-6, 1e-2)] * 6))
def test_calibration_finds_the_cost_that_made_the_times(work: list[Work], truth: Work) -> None:
    matrix = np.array(work)
    seconds = matrix @ np.array(truth)
    try:
        calibration = fit(work, seconds)
    except CalibrationError:
        assert np.linalg.matrix_rank(matrix / seconds[:, None]) < 6
        return
    assert np.allclose(calibration.residuals_s, 0.0, atol=1e-6 * seconds.max())
    assert calibration.relative_error < 1e-5


def test_calibration_never_fits_a_negative_cost() -> None:
    work = [Work(1, n, 0, 0, 0, 0) for n in (1, 2, 3, 4)]
    calibration = fit(work, [4.0, 3.0, 2.0, 1.0], terms=("steps", "prefill_tokens"))
    assert calibration.cost.fixed.prefill_tokens == 0.0
    assert calibration.residuals_s.shape == (4,)


@pytest.mark.parametrize(
    ("work", "seconds", "terms", "message"),
    [
        ([Work(1, 5), Work(1, 6)], [0.1, 0.2], ("steps", "prefill_tokens"), "2 steps cannot fit 2 terms"),
        ([Work(1, 5)] * 9, [0.1] * 9, ("steps", "prefill_tokens"), "tell only 1 of 2 terms apart"),
        ([Work(1, 5), Work(1, 6)], [0.1, 0.0], ("steps",), "positive"),
        ([Work(1, 5), Work(1, 6)], [0.1, math.inf], ("steps",), "finite"),
        ([Work(1, 5), Work(1, 6)], [0.1], ("steps",), "2 steps have 1"),
        ([Work(1, 5), Work(1, 6)], [0.1, 0.2], ("speed",), "speed"),
    ],
)
def test_calibration_says_what_it_lacks(
    work: list[Work], seconds: list[float], terms: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        fit(work, seconds, terms)


def test_cost_takes_the_slower_resource_on_top_of_what_is_fixed() -> None:
    cost = StepCost(Work(steps=1.0), Work(prefill_tokens=2.0), Work(decode_tokens=3.0))
    assert cost.duration_s(Work(1, 3, 1)) == 7.0
    assert cost.duration_s(Work(1, 1, 3)) == 10.0
