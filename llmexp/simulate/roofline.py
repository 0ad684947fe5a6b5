"""A step's time from the model's dimensions and the GPU's datasheet."""

from dataclasses import dataclass

from llmexp.architecture import Architecture
from llmexp.errors import ConfigError
from llmexp.simulate.cost import StepCost, Work


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Datasheet figures of one device: dense FLOP/s at the model's dtype, bytes/s of its memory, and, for
    tensor parallelism, bytes/s and latency of a device's link to its neighbour in one direction."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0


def all_reduce_s(num_bytes: float, gpu: Gpu, tensor_parallel_size: int) -> float:
    """A ring all-reduce of ``num_bytes`` over p GPUs: 2 (p - 1) rounds that each pass on 1/p of the data
    (Patarasuk and Yuan 2009). Raises ``ConfigError`` without a link bandwidth."""
    if tensor_parallel_size == 1:
        return 0.0
    if gpu.link_bytes_per_s is None:
        raise ConfigError(f"tensor_parallel_size={tensor_parallel_size} needs the GPU's link_bytes_per_s")
    rounds = 2 * (tensor_parallel_size - 1)
    return rounds * (num_bytes / tensor_parallel_size / gpu.link_bytes_per_s + gpu.link_latency_s)


def roofline(
    model: Architecture,
    gpu: Gpu,
    *,
    weight_bytes: int = 2,
    kv_bytes: int = 2,
    tensor_parallel_size: int = 1,
    overhead_s: float = 0.0,
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 1.0,
) -> StepCost:
    """A step takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al. 2009),
    and the communication of tensor parallelism and ``overhead_s`` on top.

    Arithmetic: 2 FLOPs per weight and token, and 4 x head_dim FLOPs per head for each (query, key) pair. Memory:
    all weights once, and the KV of every sequence's context once. Communication: two all-reduces of the hidden
    states per layer (Shoeybi et al. 2019, Megatron-LM). With efficiencies of 1 the result is a lower bound.
    """
    flops = gpu.flops_per_s * compute_efficiency * tensor_parallel_size
    bandwidth = gpu.bandwidth_bytes_per_s * memory_efficiency
    layers, head = model.layer_weights, model.head_weights
    pair = 4 * model.num_layers * model.num_heads * model.head_dim
    weights = (layers + head) * weight_bytes / tensor_parallel_size
    kv = model.kv_values_per_token * kv_bytes / model.kv_shards(tensor_parallel_size)
    reduces = 2 * model.num_layers
    latency_s = reduces * all_reduce_s(0, gpu, tensor_parallel_size)
    token = reduces * all_reduce_s(model.hidden_size * weight_bytes, gpu, tensor_parallel_size) - latency_s
    return StepCost(
        fixed=Work(overhead_s + latency_s, token, token, 0, 0, 0),
        compute=Work(0, 2 * layers / flops, 2 * layers / flops, 2 * head / flops, pair / flops, 0),
        memory=Work(weights / bandwidth, kv / bandwidth, kv / bandwidth, 0, 0, kv / bandwidth),
    )
