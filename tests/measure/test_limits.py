"""The floor of a round, against a count token by token and against figures worked out by hand."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.architecture import Architecture
from llmexp.client.records import TRACE_SCHEMA
from llmexp.compose import compose
from llmexp.measure.limits import Limit, Rates, cost_measures, kv_bytes_per_token, limit, limit_measures

QWEN_7B = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN = Architecture.of(QWEN_7B)
TINY = Architecture(
    num_layers=2, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=32
)
H200 = Rates(flops_per_s=989e12, bandwidth_bytes_per_s=4.8e12)
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9)), min_size=1, max_size=6)


def of(
    requests: list[tuple[int, int, int]], model: Architecture | None = TINY, rates: Rates = H200, max_num_seqs: int = 4
) -> Limit:
    prompt, cached, output = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    assert model is not None
    return limit(
        model,
        rates,
        prompt_tokens=prompt,
        cached_tokens=np.minimum(cached, prompt - 1),
        output_tokens=output,
        max_num_seqs=max_num_seqs,
    )


@given(REQUESTS)
def test_it_counts_what_a_loop_over_tokens_counts(requests: list[tuple[int, int, int]]) -> None:
    unit = Rates(flops_per_s=1.0, bandwidth_bytes_per_s=1.0)
    layer_weights = 8 * 4 * (2 + 1 + 1 + 2) + 3 * 8 * 16  # q, k, v, o and the gated MLP
    head_weights = 8 * 32
    kv_bytes = 0
    for prompt, _, output in requests:
        for position in range(prompt + 1, prompt + output):
            kv_bytes += position * 2 * 2 * 4 * 2  # layers, keys and values, head_dim, two bytes
    prefill = sum(_prefill_flops(p, min(c, p - 1), layer_weights, head_weights) for p, c, _ in requests)
    found = of(requests, rates=unit)
    assert found.prefill_s == pytest.approx(prefill)
    passes = max(max(o - 1 for _, _, o in requests), -(-sum(o - 1 for _, _, o in requests) // 4))
    weights = (2 * layer_weights + head_weights) * 2
    assert found.decode_s == pytest.approx(passes * weights + kv_bytes)


def _prefill_flops(prompt: int, cached: int, layer_weights: int, head_weights: int) -> int:
    flops = 2 * head_weights
    for position in range(cached + 1, prompt + 1):
        scores = 2 * 4 * position  # one query's dot products of length 4 with every key, as multiply and add
        mixed = 2 * 4 * position  # the same for the values
        flops += 2 * (2 * layer_weights + 2 * (scores + mixed))  # two layers, two heads
    return flops


def test_a_prefill_heavy_round_of_qwen_7b_on_an_h200() -> None:
    # By hand: 128 x 4,000 tokens x 2 x 6.525e9 weights = 6.68e15 FLOPs, attention 128 x 8.0e6 pairs x 401,408
    # = 0.41e15, together 7.09e15 at 989e12 a second = 7.17 s.
    found = of([(4000, 0, 8)] * 128, QWEN, max_num_seqs=128)
    assert found.prefill_s == pytest.approx(7.17, rel=0.01)
    assert found.total_s == found.compute_s > found.prefill_s


def test_a_single_answer_is_bound_by_reading_the_weights() -> None:
    # By hand: 14.14e9 bytes of weights at 4.8e12 a second are 2.95 ms a token.
    found = of([(10, 0, 101)], QWEN, max_num_seqs=1)
    assert found.decode_s / 100 == pytest.approx(2.95e-3, rel=0.01)
    assert found.total_s == found.memory_s


def test_cached_tokens_lower_the_floor_and_two_gpus_halve_it() -> None:
    alone = of([(1000, 0, 1)])
    assert of([(1000, 990, 1)]).prefill_s < 0.05 * alone.prefill_s
    assert of([(1000, 0, 1)], rates=replace(H200, devices=2)).prefill_s == pytest.approx(alone.prefill_s / 2)


def test_all_reduce_moves_the_hidden_states_twice_a_layer() -> None:
    # Two GPUs pass on half of the data twice: 28 layers x 2 x 16 x 3,593 tokens x 7,168 bytes at 450e9 a second.
    rates = replace(H200, link_bytes_per_s=450e9, devices=2)
    found = of([(3593, 0, 1)] * 16, QWEN, rates, max_num_seqs=64)
    assert found.all_reduce_s == pytest.approx(56 * 16 * 3593 * 7168 / 450e9)


def _trace(cached: int | None) -> pa.Table:
    row = dict.fromkeys(TRACE_SCHEMA.names)
    row |= {"round": 0, "sent_s": 0.0, "end_s": 2.0, "prompt_tokens": 4000, "cached_tokens": cached, "output_tokens": 8}
    return pa.Table.from_pylist([row], schema=TRACE_SCHEMA)


def test_a_run_states_its_floor_and_the_share_of_it_that_was_reached() -> None:
    config = compose(["gpu=h200", "cache=off"])
    found = limit_measures(config, QWEN_7B, _trace(None))  # with the cache off nothing can be cached
    assert found["limit_share"] == pytest.approx(found["limit_s"] / 2.0)
    assert found["limit_prefill_s"] == pytest.approx(7.17 / 128, rel=0.01)


def test_weights_are_read_once_for_as_many_as_are_sent_at_once() -> None:
    def decode_s(*load: str) -> float:
        config = compose(["gpu=h200", "cache=off", "max_num_seqs=64", *load])
        two = pa.concat_tables([_trace(None)] * 2)
        return limit_measures(config, QWEN_7B, two)["limit_decode_s"]

    assert decode_s("load.concurrency=1") > 1.9 * decode_s("load.concurrency=64")
    assert decode_s("load=poisson", "load.max_in_flight=1") == decode_s("load.concurrency=1")
    assert decode_s("load=poisson") == decode_s("load.concurrency=64") == decode_s("load.concurrency=4096")


@pytest.mark.parametrize("overrides", [["gpu=cpu", "cache=off"], ["gpu=h200", "cache=on"]])
def test_without_datasheet_or_usage_there_is_no_floor(overrides: list[str]) -> None:
    assert limit_measures(compose(overrides), QWEN_7B, _trace(None)) == {}


def test_cost_and_throughput_count_the_devices() -> None:
    config = compose(["gpu=h200", "gpu.tensor_parallel_size=2", "gpu.cost_per_hour=3.6"])
    found = cost_measures(config, {"throughput_req_per_s": 10.0, "throughput_total_tokens_per_s": 1000.0})
    assert found["throughput_req_per_s_per_gpu"] == 5.0
    # Two devices at 3.60 an hour are 0.002 a second, which buys 1,000 tokens.
    assert found["cost_per_million_tokens"] == pytest.approx(2.0)


def test_kv_heads_are_copied_where_devices_outnumber_them() -> None:
    devices = {n: compose(["gpu=h200", f"gpu.tensor_parallel_size={n}"]) for n in (1, 4, 8)}
    bytes_per_token = {n: kv_bytes_per_token(config, QWEN_7B) for n, config in devices.items()}
    assert bytes_per_token == {1: 57_344, 4: 57_344, 8: 2 * 57_344}  # of 4 KV heads
    assert kv_bytes_per_token(devices[1], {"num_experts": 8}) is None


def test_the_weights_are_those_that_the_models_have() -> None:
    # Published totals less the input embedding (untied), norms and biases: 7,615,616,512 - 544,997,376 - 0.3 million.
    assert QWEN is not None
    assert QWEN.layer_weights + QWEN.head_weights == pytest.approx(7_615_616_512 - 544_997_376, rel=1e-4)
    assert QWEN.kv_values_per_token * 2 == 57_344  # bytes, the figure that vLLM's capacities follow


@pytest.mark.parametrize("other", [{"num_experts": 8}, {"num_hidden_layers": None}])
def test_other_kinds_have_no_dimensions(other: dict[str, int | None]) -> None:
    config = {key: value for key, value in (QWEN_7B | other).items() if value is not None}
    assert Architecture.of(config) is None
