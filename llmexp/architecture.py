"""A model's dimensions, as its config.json gives them, and what follows from them for arithmetic and memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with gated MLPs, of the Llama, Qwen2 or dense DeepSeek-V2 kind.

    `kv_lora_rank` > 0 means multi-head latent attention (MLA). `kv_sharing_layers` is how many consecutive layers use
    one layer's KV (cross-layer attention); 1 means none do.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    kv_sharing_layers: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Architecture | None":
        """From a config.json; None where it is of another kind: a mixture of experts, whose weights are not all read
        in a step, or one that lacks a dimension or has none that is a number."""
        if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
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
                kv_lora_rank=int(config.get("kv_lora_rank") or 0),
                qk_rope_head_dim=int(config.get("qk_rope_head_dim") or 0),
            )
        except (KeyError, ValueError, TypeError, ArithmeticError):
            return None

    @property
    def is_compressed(self) -> bool:
        """Whether keys and values are one latent vector a token (MLA). Its weights are then only bounded above."""
        return self.kv_lora_rank > 0

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' projections and MLPs; norms and biases, well below 1%, are left out.

        MLA's attention is counted as if it projected keys and values without compression, an upper bound.
        """
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output projection onto the vocabulary, used once per sampled token."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps of one token, on a device that holds the whole model.

        MHA and GQA: keys and values of every KV head in every layer (Ainslie et al. 2023, GQA). MLA: one latent
        vector and one decoupled rotary key a layer (DeepSeek-V2, 2024, section 2.1). Cross-layer attention: one layer
        in `kv_sharing_layers` has its own (Brandon et al. 2024).
        """
        if self.is_compressed:
            values = self.kv_lora_rank + self.qk_rope_head_dim
        else:
            values = 2 * self.num_kv_heads * self.head_dim
        return values * -(-self.num_layers // self.kv_sharing_layers)

    def kv_shards(self, devices: int) -> int:
        """Among how many of `devices` a token's KV is split. KV heads are split, and copied once there are more
        devices than heads; MLA's latent has one head and is copied everywhere (as vLLM lays them out)."""
        return 1 if self.is_compressed else min(devices, self.num_kv_heads)
