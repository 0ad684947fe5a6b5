"""Text to tokens, with the model's own tokenizer and chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmexp.errors import WorkloadError
from llmexp.models import Model
from llmexp.workloads.workload import Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS_AT_ONCE = 512


def load_tokenizer(model: Model) -> "Tokenizer":
    """The model's tokenizer, without the truncation or padding that its file may ask for.

    Raises WorkloadError if the model's folder has none that can be read.
    """
    if not (model.path / "tokenizer.json").is_file():
        raise WorkloadError(f"model {model.name}: no tokenizer.json in {str(model.path)!r}; text prompts need one")
    try:
        tokenizer = model.tokenizer()
    except Exception as error:  # tokenizers has no narrower one
        reason = str(error).partition("\n")[0][:200]
        raise WorkloadError(f"model {model.name}: {model.path / 'tokenizer.json'} is no tokenizer ({reason})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: "Tokenizer", texts: Sequence[str], special: bool = True) -> list[Tokens]:
    """The token ids of each text; `special` adds what the tokenizer opens a prompt with (such as BOS)."""
    ids: list[Tokens] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        batch = list(texts[start : start + TEXTS_AT_ONCE])
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=special)
        ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
    return ids


class ChatTemplate:
    """The chat template that comes with a model's tokenizer, rendered as Transformers renders it."""

    def __init__(self, model: Model) -> None:
        """Raises WorkloadError if the model has no chat template that can be read."""
        self._model = model
        try:
            self._template, self._tokens = self._read()
        except WorkloadError:
            raise
        except Exception as error:  # whatever another's file and template may hold
            raise self._broken("cannot be read", error) from None

    def _read(self) -> tuple[Any, dict[str, str]]:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        model = self._model
        config_file, template_file = model.path / "tokenizer_config.json", model.path / "chat_template.jinja"
        facts: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
        template = template_file.read_text() if template_file.is_file() else facts.get("chat_template")
        if isinstance(template, list):
            template = next((each["template"] for each in template if each["name"] == "default"), None)
        if not template:
            raise WorkloadError(f"model {model.name}: no chat template in {str(model.path)!r}; chat prompts need one")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = self._refuse
        named = {name: facts.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in named.items() if token
        }
        return environment.from_string(template), tokens

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text that asks for the assistant's next message.

        Raises WorkloadError if the template refuses the messages.
        """
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **self._tokens))
        except WorkloadError:
            raise
        except Exception as error:  # it is a program of the model's
            raise self._broken("fails on the messages", error) from None

    def _broken(self, what: str, error: Exception) -> WorkloadError:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return WorkloadError(f"model {self._model.name}: its chat template {what} ({reason})")

    def _refuse(self, reason: str) -> str:
        raise WorkloadError(f"model {self._model.name}: its chat template refuses the messages: {reason}")
