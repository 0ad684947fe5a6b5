"""How fast a round could have been on this hardware: the floor that arithmetic and memory traffic set."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmexp.architecture import Architecture
from llmexp.schema.config import Config
from llmexp.schema.load import ClosedLoop

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2}

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Rates:
    """What the device can do, by its datasheet: of each of `devices` alike. `link_bytes_per_s` is the bandwidth of
    the link to the others in one direction, None where it is not known."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float | None = None
    devices: int = 1


@dataclass(frozen=True)
class Limit:
    """Seconds that no engine can beat, each for what it names. The parts may overlap, so the longest counts."""

    prefill_s: float  # arithmetic of the uncached prompt tokens
    decode_s: float  # weights and KV read for the generated tokens
    compute_s: float  # all arithmetic
    memory_s: float  # all reading
    all_reduce_s: float  # the partial sums of tensor parallelism

    @property
    def total_s(self) -> float:
        """The floor of the whole round."""
        return max(self.compute_s, self.memory_s, self.all_reduce_s)


def limit(
    model: Architecture,
    rates: Rates,
    *,
    prompt_tokens: Counts,
    cached_tokens: Counts,
    output_tokens: Counts,
    max_num_seqs: int,
    weight_bytes: int = 2,
    kv_bytes: int = 2,
) -> Limit:
    """The floor of serving these requests, each array of shape `(n,)`, at most `max_num_seqs` at a time.

    Arithmetic: 2 FLOPs a weight and token (Kaplan et al. 2020, table 1), the output projection for sampled
    tokens only, and for attention 4 x head_dim FLOPs a head for each query and key before it (Chowdhery et al.
    2022, PaLM, appendix B). Reading: every forward pass reads all weights; the passes are at least the longest
    answer, and at least all generated tokens over `max_num_seqs`; a generated token reads the KV of its context.
    Tensor parallelism divides all of these and adds two all-reduces of the hidden states a layer (Shoeybi et al.
    2019, Megatron-LM), each of which sends 2 (n - 1) / n of its data over every link (Patarasuk and Yuan 2009).
    KV heads are copied where there are more devices than heads.
    """
    n = rates.devices
    p, c, out = (values.astype(np.float64) for values in (prompt_tokens, cached_tokens, output_tokens))
    later = np.maximum(out - 1, 0)  # the first token comes from the prefill
    layers, head = model.layer_weights, model.head_weights
    pair = 4 * model.num_layers * model.num_heads * model.head_dim

    pairs = (p * (p + 1) - c * (c + 1)) / 2
    prefill_flops = float((2 * layers * (p - c) + 2 * head + pair * pairs).sum())
    # Generated token j, from 1 to later, is the query of position p + j and sees p + j keys.
    contexts = later * p + later * (later + 1) / 2
    decode_flops = float((2 * (layers + head) * later + pair * contexts).sum())

    weights = (layers + head) * weight_bytes / n
    kv = model.kv_values_per_token * kv_bytes / model.kv_shards(n)
    passes = max(float(later.max(initial=0.0)), math.ceil(later.sum() / max_num_seqs))
    decode_bytes = weights * passes + kv * float(contexts.sum())

    reduced_s = 0.0
    if n > 1 and rates.link_bytes_per_s is not None:
        hidden_bytes = float((p - c + later).sum()) * model.hidden_size * weight_bytes
        reduced_s = 2 * model.num_layers * hidden_bytes * 2 * (n - 1) / n / rates.link_bytes_per_s
    return Limit(
        prefill_s=prefill_flops / (rates.flops_per_s * n),
        decode_s=decode_bytes / rates.bandwidth_bytes_per_s,
        compute_s=(prefill_flops + decode_flops) / (rates.flops_per_s * n),
        memory_s=(decode_bytes + weights) / rates.bandwidth_bytes_per_s,  # a prefill reads the weights too
        all_reduce_s=reduced_s,
    )


def limit_measures(config: Config, model_config: Mapping[str, Any], trace: pa.Table) -> dict[str, float]:
    """The floor of a round and the share of it that was reached, by their names in the catalog.

    Empty where the device's rates, the model's dimensions or weights, or the tokens served are not known.
    """
    gpu, model = config.gpu, Architecture.of(model_config)
    if gpu.flops_per_s is None or gpu.bandwidth_bytes_per_s is None or model is None or not len(trace):
        return {}
    if model.is_compressed:
        return {}  # an upper bound of the weights gives no floor
    cached = trace["cached_tokens"]
    if not config.cache.enable_prefix_caching or config.cache.salt_requests:
        cached = pa.chunked_array([pa.array(np.zeros(len(trace), np.int32))])
    columns = [trace["prompt_tokens"], cached, trace["output_tokens"]]
    if any(column.null_count for column in columns):
        return {}
    width = BYTES[gpu.dtype or "auto"]
    in_flight = config.load.concurrency if isinstance(config.load, ClosedLoop) else config.load.max_in_flight
    prompt_tokens, cached_tokens, output_tokens = (column.to_numpy().astype(np.int64) for column in columns)
    floor = limit(
        model,
        Rates(gpu.flops_per_s, gpu.bandwidth_bytes_per_s, gpu.link_bytes_per_s, gpu.tensor_parallel_size),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        max_num_seqs=min(config.max_num_seqs, in_flight or config.max_num_seqs),
        weight_bytes=width,
        kv_bytes=KV_BYTES.get(config.kv.dtype, width),
    )
    duration_s = float(trace["end_s"].to_numpy().max() - trace["sent_s"].to_numpy().min())
    measures = {"limit_prefill_s": floor.prefill_s, "limit_decode_s": floor.decode_s, "limit_s": floor.total_s}
    if gpu.tensor_parallel_size > 1 and gpu.link_bytes_per_s is not None:
        measures["limit_all_reduce_s"] = floor.all_reduce_s
    if duration_s > 0:
        measures["limit_share"] = floor.total_s / duration_s
    return measures


def kv_bytes_per_token(config: Config, model_config: Mapping[str, Any]) -> int | None:
    """What the KV cache takes for a token, on all devices together; None where the model's dimensions are not known.

    KV heads are copied where there are more devices than heads.
    """
    model, devices = Architecture.of(model_config), config.gpu.tensor_parallel_size
    if model is None:
        return None
    width = KV_BYTES.get(config.kv.dtype, BYTES[config.gpu.dtype or "auto"])
    return model.kv_values_per_token * width * devices // model.kv_shards(devices)


def cost_measures(config: Config, measures: Mapping[str, float]) -> dict[str, float]:
    """What follows from the number of devices and their price: throughput a GPU, cost a million tokens."""
    devices = config.gpu.tensor_parallel_size
    derived = {}
    if "throughput_req_per_s" in measures:
        derived["throughput_req_per_s_per_gpu"] = measures["throughput_req_per_s"] / devices
    tokens_per_s = measures.get("throughput_total_tokens_per_s", 0.0)
    if config.gpu.cost_per_hour is not None and tokens_per_s > 0:
        derived["cost_per_million_tokens"] = config.gpu.cost_per_hour * devices / 3600 / tokens_per_s * 1e6
    return derived
