"""Where weights and tokenizers come from: a folder, an installed package, the Hub, or made on the spot."""

import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from llmexp.errors import ConfigError, LlmexpError
from llmexp.schema.engine import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Model:
    """A model folder in Hugging Face layout, read without torch or transformers.

    `config` is its config.json. `special_token_ids` are those that a prompt of plain tokens must not hold.
    `max_model_len` is the most tokens, prompt and output together, that a request may have.
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


def locate(config: ModelConfig) -> Model:
    """Finds the model, fetching or making its folder where need be.

    Raises ConfigError if it is nowhere to be found, or if `max_model_len` exceeds what the model takes.
    """
    return _read(config, _folder(config))


def _folder(config: ModelConfig) -> Path:
    if config.path is not None:
        if Path(config.path).is_dir():
            return Path(config.path).absolute()
        if config.path.startswith((".", "/", "~")) or config.path.count("/") != 1:
            raise ConfigError(f"model.path: got {config.path!r}; accepted is a model folder or a Hub id (OWNER/NAME)")
        return _from_hub(config.path, config)
    if config.generated is not None:
        return _made_once("tiny_llama-1", _make_tiny_llama)
    if config.package is not None and (gguf := _packaged_gguf(config.package)) is not None:
        return _made_once(f"{config.name}-{gguf.stem}", lambda folder: _dequantise(gguf, folder))
    if config.hub_id is not None:
        return _from_hub(config.hub_id, config)
    raise ConfigError(f"model={config.name}: set model.path to a model folder or a Hub id")


def _read(config: ModelConfig, folder: Path) -> Model:
    try:
        facts = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path: got {str(folder)!r}; accepted is a folder with a config.json") from None
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'}: not JSON ({error})") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("vocab_size"), int):
        raise ConfigError(f"{folder / 'config.json'}: not a model's config; it has no vocab_size")
    longest = facts.get("max_position_embeddings", config.max_model_len or 2048)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"model.max_model_len: got {config.max_model_len}; {config.name} takes {longest} tokens at most"
        )
    return Model(
        name=config.name,
        path=folder,
        vocab_size=facts["vocab_size"],
        special_token_ids=frozenset(_special_token_ids(facts, folder)),
        max_model_len=config.max_model_len or longest,
        config=facts,
    )


def _special_token_ids(facts: Mapping[str, Any], folder: Path) -> Iterator[int]:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        ids = facts.get(key)
        yield from ids if isinstance(ids, list) else [] if ids is None else [ids]
    if (folder / "tokenizer.json").exists():
        added = json.loads((folder / "tokenizer.json").read_text()).get("added_tokens", [])
        yield from (token["id"] for token in added if token.get("special"))


def _from_hub(repository: str, config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    weights = [] if config.load_format == "dummy" else ["*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(
            snapshot_download(
                repository,
                revision=config.revision,
                allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", *weights],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model={config.name}: {repository} could not be had from the Hugging Face Hub "
            f"({str(error).splitlines()[0]}); set model.path to a folder that holds it"
        ) from None


def _packaged_gguf(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the user's cache that `make` fills, whole or not at all, once for all processes."""
    target = Path(platformdirs.user_cache_dir("llmexp")) / "models" / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{target.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder for models"
        ) from None
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
            try:
                make(partial)
                partial.chmod(0o755)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _dequantise(gguf: Path, folder: Path) -> None:
    print(f"Dequantising {gguf.name} into the cache; once, about a minute.", file=sys.stderr)
    command = [sys.executable, "-m", "llmexp.dequantise", str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise LlmexpError(f"{gguf.name} could not be dequantised: {lines[-1] if lines else 'no reason given'}")


def _make_tiny_llama(folder: Path) -> None:
    """A two-layer Llama's config and a tokenizer of 2,048 one-piece words; weights are vLLM's dummies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"w{i}" for i in range(2048 - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(words),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
