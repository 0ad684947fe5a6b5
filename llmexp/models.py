"""Where weights and tokenizers come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Model:
    """A model folder in Hugging Face layout, read without torch or transformers.

    `config` is its config.json. `special_token_ids` are those that a prompt of plain tokens must not hold.
    """

    name: str
    path: Path
    vocab_size: int
    special_token_ids: frozenset[int]
    max_model_len: int
    config: Mapping[str, Any]

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of `tokenizer.json`."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / "tokenizer.json"))
