"""A model's dimensions, as its config.json gives them, and what follows from them for arithmetic and memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with gated MLPs, of the Llama and Qwen2 kind."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Architecture | None":
        """From a config.json; None where it is of another kind: a mixture of experts, latent attention, or one
        that lacks a dimension."""
        if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")):
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
            )
        except (KeyError, ValueError, TypeError, ArithmeticError):
            return None

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' projections and MLPs; norms and biases, well below 1%, are left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights of the output projection onto the vocabulary."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache keeps of one token: keys and values of every KV head in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
