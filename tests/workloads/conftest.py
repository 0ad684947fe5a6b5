from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmexp.models import Model
from llmexp.workloads.workload import Workload, packed


def make_model(
    vocab_size: int = 1000, special: tuple[int, ...] = (0, 1, 2), max_model_len: int = 4096
) -> Model:
    return Model("made", Path("/nowhere"), vocab_size, frozenset(special), max_model_len, {})


def from_prompts(prompts: list[list[int]], output_tokens: int = 1, **fields: object) -> Workload:
    """A workload of literal prompts."""
    prompt_at, lengths = packed([np.array(prompt, np.int32) for prompt in prompts])
    outputs = fields.pop("outputs", [output_tokens] * len(prompts))
    return Workload("literal", {}, prompt_at, lengths, np.array(outputs, np.int32), **fields)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Model:
    return make_model()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file
