"""Where weights and tokenizers come from: a folder, an installed package, the Hub, or made on the spot."""

import fcntl
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmexp.errors import ConfigError, LlmexpError
from llmexp.schema.accepted import explained
from llmexp.schema.engine import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_WORDS = 2048
_GENERATED: Mapping[str, Mapping[str, Any]] = {
    "tiny_llama": {
        "vocab_size": _WORDS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "llama_8b": {  # Llama 3.1's
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}


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

    @property
    def most_tokens(self) -> int:
        """What `max_model_len` could be set to."""
        return max(self.max_model_len, self.config.get("max_position_embeddings") or 0)

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
        dimensions = _GENERATED[config.generated]
        return _made_once(f"{config.generated}-1", lambda folder: _make_llama(folder, dimensions))
    if config.package is not None and (gguf := _packaged_gguf(config.package)) is not None:
        name = re.sub(r"[^\w-]", "_", config.name)  # may be anything; the cache is one folder
        return _made_once(f"{name}-{gguf.stem}", lambda folder: _dequantise(gguf, folder))
    if config.hub_id is not None:
        return _from_hub(config.hub_id, config)
    raise ConfigError(f"model={config.name}: set model.path to a model folder or a Hub id")


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Facts(BaseModel):
    """What we read of a config.json."""

    model_config = ConfigDict(strict=True)

    vocab_size: int = Field(gt=0, lt=2**31)
    max_position_embeddings: int | None = Field(None, gt=0, lt=2**31)
    bos_token_id: TokenId | list[TokenId] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: int | None = None  # -1 in some
    unk_token_id: TokenId | None = None


class _AddedToken(BaseModel):
    model_config = ConfigDict(strict=True)

    id: TokenId
    special: bool = False


class _Tokenizer(BaseModel):
    """What we read of a tokenizer.json."""

    added_tokens: list[_AddedToken] = []


def _read(config: ModelConfig, folder: Path) -> Model:
    content = _json(folder / "config.json")
    if content is None:
        raise ConfigError(f"model.path: got {str(folder)!r}; accepted is a folder with a config.json")
    facts = _checked(folder / "config.json", content, _Facts)
    longest = facts.max_position_embeddings or config.max_model_len or 2048
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"model.max_model_len: got {config.max_model_len}; {config.name} takes {longest} tokens at most"
            f"{with_longer_context(config.max_model_len)}"
        )
    tokenizer = _json(folder / "tokenizer.json")
    added = [] if tokenizer is None else _checked(folder / "tokenizer.json", tokenizer, _Tokenizer).added_tokens
    return Model(
        name=config.name,
        path=folder,
        vocab_size=facts.vocab_size,
        special_token_ids=frozenset(_special_token_ids(facts, added)),
        max_model_len=config.max_model_len or longest,
        config=content,
    )


def with_longer_context(tokens: int) -> str:
    """Which model takes so many tokens and is always at hand; nothing where it does not either."""
    most = int(_GENERATED["llama_8b"]["max_position_embeddings"])
    return f"; model=random_8b takes {most}, for audits and engine=simulator" if tokens <= most else ""


def _special_token_ids(facts: _Facts, added: Sequence[_AddedToken]) -> Iterator[int]:
    for ids in (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id, facts.unk_token_id):
        yield from ids if isinstance(ids, list) else [] if ids is None or ids < 0 else [ids]
    yield from (token.id for token in added if token.special)


def _json(file: Path) -> dict[str, Any] | None:
    """The object in a file of a model's; None where there is no such file. Raises ConfigError for anything else."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a model's; a JSON object is expected, got {type(content).__name__}")
    return content


Checked = TypeVar("Checked", bound=BaseModel)


def _checked(file: Path, content: Mapping[str, Any], kind: type[Checked]) -> Checked:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{file}: not a model's; {explained(error, kind, content)[0]}") from None


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


def _make_llama(folder: Path, dimensions: Mapping[str, Any]) -> None:
    """A Llama's config and a tokenizer of 2,048 one-piece words; weights are vLLM's dummies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"w{i}" for i in range(_WORDS - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dimensions,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
