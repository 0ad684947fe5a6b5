"""How fast a round could have been on this hardware: the floor that arithmetic and memory traffic set."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmexp.errors import ConfigError
from llmexp.schema.config import Config
from llmexp.simulate.roofline import Gpu, Model, all_reduce_s, kv_bytes_per_token_and_gpu

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
_KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2}


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
    model: Model,
    gpu: Gpu,
    *,
    prompt_tokens: NDArray[np.int64],
    cached_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
) -> Limit:
    """The floor of serving these requests, each array of shape `(n,)`, at most `max_num_seqs` at a time.

    Arithmetic: 2 FLOPs a weight and token (Kaplan et al. 2020, table 1), the output projection for sampled
    tokens only, and for attention 4 x head_dim FLOPs a head for each query and key before it (Chowdhery et al.
    2022, PaLM, appendix B). Reading: every forward pass reads all weights; the passes are at least the longest
    answer, and at least all generated tokens over `max_num_seqs`; a generated token reads the KV of its context.
    Tensor parallelism divides all of these and adds two all-reduces of the hidden states a layer (Shoeybi et al.
    2019, Megatron-LM); without a link bandwidth they are left out, which lowers the floor.
    """
    p, c, out = (values.astype(np.float64) for values in (prompt_tokens, cached_tokens, output_tokens))
    later = np.maximum(out - 1, 0)  # the first token comes from the prefill
    flops, bandwidth = gpu.flops_per_s * tensor_parallel_size, gpu.bandwidth_bytes_per_s
    pair = 4 * model.num_layers * model.num_heads * model.head_dim
    layers, head = 2 * model.layer_parameters, 2 * model.head_parameters

    pairs = (p * (p + 1) - c * (c + 1)) / 2
    prefill_flops = float((layers * (p - c) + head + pair * pairs).sum())
    # Generated token j, from 1 to later, is the query of position p + j and sees p + j keys.
    contexts = later * p + later * (later + 1) / 2
    decode_flops = float(((layers + head) * later + pair * contexts).sum())

    weights = (model.layer_parameters + model.head_parameters) * model.dtype_bytes / tensor_parallel_size
    kv = kv_bytes_per_token_and_gpu(model, tensor_parallel_size)
    steps = max(float(later.max(initial=0.0)), math.ceil(later.sum() / max_num_seqs))
    decode_bytes = weights * steps + kv * float(contexts.sum())

    reduced = 0.0
    if tensor_parallel_size > 1 and gpu.link_bytes_per_s is not None:
        hidden = float((p - c + later).sum()) * model.hidden_size * model.dtype_bytes
        reduced = 2 * model.num_layers * all_reduce_s(hidden, gpu, tensor_parallel_size)
    return Limit(
        prefill_s=prefill_flops / flops,
        decode_s=decode_bytes / bandwidth,
        compute_s=(prefill_flops + decode_flops) / flops,
        memory_s=(decode_bytes + (weights if len(p) else 0.0)) / bandwidth,
        all_reduce_s=reduced,
    )


def limit_measures(config: Config, model_config: Mapping[str, Any], trace: pa.Table) -> dict[str, float]:
    """The floor of a round and the share of it that was reached, by their names in the catalog.

    Empty where the device's rates, the model's dimensions or the tokens served are not known.
    """
    gpu = config.gpu
    if gpu.flops_per_s is None or gpu.bandwidth_bytes_per_s is None or not len(trace):
        return {}
    cached = trace["cached_tokens"]
    if not config.cache.enable_prefix_caching or config.cache.salt_requests:
        cached = pa.chunked_array([pa.array(np.zeros(len(trace), np.int32))])
    columns = [trace["prompt_tokens"], cached, trace["output_tokens"]]
    if any(column.null_count for column in columns):
        return {}
    width = _BYTES[gpu.dtype or "auto"]
    try:
        model = Model.of_config(model_config, dtype_bytes=width, kv_dtype_bytes=_KV_BYTES.get(config.kv.dtype, width))
    except ConfigError:
        return {}
    prompt_tokens, cached_tokens, output_tokens = (column.to_numpy().astype(np.int64) for column in columns)
    floor = limit(
        model,
        Gpu(
            flops_per_s=gpu.flops_per_s,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
            link_bytes_per_s=gpu.link_bytes_per_s,
        ),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=gpu.tensor_parallel_size,
    )
    duration_s = float(trace["end_s"].to_numpy().max() - trace["sent_s"].to_numpy().min())
    measures = {"limit_prefill_s": floor.prefill_s, "limit_decode_s": floor.decode_s, "limit_s": floor.total_s}
    if gpu.tensor_parallel_size > 1 and gpu.link_bytes_per_s is not None:
        measures["limit_all_reduce_s"] = floor.all_reduce_s
    if duration_s > 0:
        measures["limit_share"] = floor.total_s / duration_s
    return measures


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
