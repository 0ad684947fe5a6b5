"""A step's time and a token's KV memory from the model's dimensions and the GPU's datasheet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmexp.errors import ConfigError
from llmexp.simulate.cost import StepCost, Work


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer with gated MLPs, as its Hugging Face ``config.json`` describes it.

    ``kv_lora_rank`` > 0 means multi-head latent attention (MLA). ``kv_sharing_layers`` is how many consecutive
    layers use one layer's KV (cross-layer attention); 1 means none do.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    dtype_bytes: int = 2
    kv_dtype_bytes: int = 2
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    kv_sharing_layers: int = 1

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, dtype_bytes: int = 2, kv_dtype_bytes: int = 2) -> "Model":
        """From a ``config.json`` of the Llama, Qwen2 or DeepSeek-V2 kind. Raises ``ConfigError`` if it lacks a
        dimension, or is a mixture of experts, whose weights are not all read in a step."""
        if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ConfigError("mixtures of experts have no roofline here: calibrate on measured steps instead")
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                vocab_size=int(config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype_bytes=dtype_bytes,
                kv_dtype_bytes=kv_dtype_bytes,
                kv_lora_rank=int(config.get("kv_lora_rank") or 0),
                qk_rope_head_dim=int(config.get("qk_rope_head_dim") or 0),
            )
        except KeyError as error:
            raise ConfigError(f"the model's config lacks {error}") from error

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' projections and MLPs (norms and biases, well below 1%, left out).

        MLA's attention is counted as if it projected keys and values without compression, an upper bound.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection onto the vocabulary, used once per sampled token."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache bytes of one token over all layers, on a GPU that holds the whole model.

        MHA and GQA: keys and values of every KV head (Ainslie et al. 2023, GQA). MLA: one latent vector and
        one decoupled rotary key (DeepSeek-V2, 2024, section 2.1). Cross-layer attention: one layer in
        ``kv_sharing_layers`` has its own (Brandon et al. 2024).
        """
        if self.kv_lora_rank:
            elements = self.kv_lora_rank + self.qk_rope_head_dim
        else:
            elements = 2 * self.num_kv_heads * self.head_dim
        return elements * self.kv_dtype_bytes * self.num_layers / self.kv_sharing_layers


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Datasheet figures of one device: dense FLOP/s at the model's dtype, bytes/s of its memory, and, for
    tensor parallelism, bytes/s and latency of a device's link to its neighbour in one direction."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0


def kv_bytes_per_token_and_gpu(model: Model, tensor_parallel_size: int) -> float:
    """KV cache bytes of a token on each of ``tensor_parallel_size`` GPUs. KV heads are split, and copied once
    there are more GPUs than heads; MLA's latent has one head and is copied everywhere (as vLLM lays them out).
    """
    shards = 1 if model.kv_lora_rank else min(tensor_parallel_size, model.num_kv_heads)
    return model.kv_bytes_per_token / shards


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
    model: Model,
    gpu: Gpu,
    *,
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
    layers, head = model.layer_parameters, model.head_parameters
    pair = 4 * model.num_layers * model.num_heads * model.head_dim
    weights = (layers + head) * model.dtype_bytes / tensor_parallel_size
    kv = kv_bytes_per_token_and_gpu(model, tensor_parallel_size)
    reduces = 2 * model.num_layers
    latency_s = reduces * all_reduce_s(0, gpu, tensor_parallel_size)
    token = reduces * all_reduce_s(model.hidden_size * model.dtype_bytes, gpu, tensor_parallel_size) - latency_s
    return StepCost(
        fixed=Work(overhead_s + latency_s, token, token, 0, 0, 0),
        compute=Work(0, 2 * layers / flops, 2 * layers / flops, 2 * head / flops, pair / flops, 0),
        memory=Work(weights / bandwidth, kv / bandwidth, kv / bandwidth, 0, 0, kv / bandwidth),
    )
