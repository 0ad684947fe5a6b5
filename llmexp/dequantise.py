"""Turns a GGUF file into a model folder with full-precision weights: `python -m llmexp.dequantise GGUF FOLDER`.

A program of its own, because it needs torch and transformers for a minute and nothing else here does.
"""

import sys
from pathlib import Path


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes config, tokenizer and float32 safetensors of the model in `gguf` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
