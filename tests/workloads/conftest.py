import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmexp.models import Model
from llmexp.workloads.workload import Workload, packed


def make_model(vocab_size: int = 1000, special: tuple[int, ...] = (0, 1, 2), max_model_len: int = 4096) -> Model:
    return Model("made", Path("/nowhere"), vocab_size, frozenset(special), max_model_len, {})


def from_prompts(prompts: list[list[int]], output_tokens: int = 1, **fields: object) -> Workload:
    """A workload of literal prompts."""
    prompt_at, lengths = packed([np.array(prompt, np.int32) for prompt in prompts])
    outputs = fields.pop("outputs", [output_tokens] * len(prompts))
    return Workload("literal", {}, prompt_at, lengths, np.array(outputs, np.int32), **fields)  # type: ignore[arg-type]


CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def make_text_model(folder: Path, max_model_len: int = 4096) -> Model:
    """A model folder with a byte-level tokenizer that opens every text with `<s>`, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {"<s>": 0} | {char: 1 + i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "bos_token": "<s>"}))
    return Model("bytes", folder, len(vocab), frozenset([0]), max_model_len, {})


@pytest.fixture
def text_model(tmp_path: Path) -> Model:
    folder = tmp_path / "model"
    folder.mkdir()
    return make_text_model(folder)


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
