"""The user's own requests."""

import json
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from llmexp.errors import ConfigError, WorkloadError
from llmexp.models import Model
from llmexp.schema import section
from llmexp.schema.section import Section
from llmexp.schema.workloads import Custom
from llmexp.workloads import store
from llmexp.workloads.draws import permutation
from llmexp.workloads.files import read_json_lines, sha256_of
from llmexp.workloads.text import ChatTemplate, encode, load_tokenizer
from llmexp.workloads.workload import SENDING, Tokens, Workload, packed

_Number = Annotated[int, Field(ge=0, lt=2**31)]


class CustomLine(Section):
    """One request of a custom workload."""

    prompt: str | None = None
    token_ids: list[_Number] | None = None
    messages: list[dict[str, Any]] | None = None
    output_tokens: section.Tokens | None = None
    arrival_s: NonNegativeFloat | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    deadline_s: PositiveFloat | None = None
    conversation: _Number | None = None
    think_s: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "CustomLine":
        given = [name for name in ("prompt", "token_ids", "messages") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"exactly one of prompt, token_ids and messages is needed, and not empty; got {given}")
        return self


ABSENT = {"priority": 0, "deadline_s": np.inf, "conversation": -1, "think_s": 0.0}


def custom(config: Custom, model: Model) -> Workload:
    """Requests of a JSON Lines file, or of a saved workload.

    Raises WorkloadError with file and line for a broken one.
    """
    is_saved = config.path.endswith(".parquet")
    workload = store.load(config.path) if is_saved else _from_json_lines(config, model)
    require_known_tokens(config.path, workload, model)
    kept = np.arange(len(workload))[: config.limit]
    if config.order == "shuffled":
        if workload.arrivals_s is not None or "conversation" in workload.columns:
            raise ConfigError("workload.order=shuffled: the requests have arrivals or conversations; use order=file")
        kept = kept[permutation(len(kept), config.seed, "order")]
    recipe = {"file_sha256": sha256_of(config.path), "saved_recipe": dict(workload.recipe)}
    return replace(selected(workload, kept), name=config.kind, recipe=recipe)


def require_known_tokens(path: str, workload: Workload, model: Model) -> None:
    """Raises WorkloadError if prompts that came from a file hold token ids that the model does not have."""
    for i, prompt in enumerate(workload.prompts()):
        if prompt.max(initial=0) >= model.vocab_size or prompt.min(initial=0) < 0:
            wrong = prompt.max() if prompt.max() >= model.vocab_size else prompt.min()
            raise WorkloadError(
                f"{path}: request {i} has token id {wrong}; {model.name} has ids below {model.vocab_size}"
            )


def selected(workload: Workload, kept: NDArray[np.int64]) -> Workload:
    """The requests `kept` of a workload, in that order."""
    arrivals = workload.arrivals_s
    columns = {name: values[kept] for name, values in workload.columns.items()}
    if "answer_in" in columns:
        place = np.full(len(workload) + 1, -1)  # the last stands for -1
        place[kept] = np.arange(len(kept))
        columns["answer_in"] = place[columns["answer_in"]]
    return replace(
        workload,
        prompt_at=lambda i: workload.prompt_at(int(kept[i])),
        prompt_tokens=workload.prompt_tokens[kept],
        output_tokens=workload.output_tokens[kept],
        arrivals_s=None if arrivals is None else arrivals[kept],
        columns=columns,
    )


def _from_json_lines(config: Custom, model: Model) -> Workload:
    lines: list[CustomLine] = []
    for place, line in read_json_lines(config.path, CustomLine, config.limit):
        _require_order(place, line, lines)
        lines.append(line)
    if not lines:
        raise WorkloadError(f"{config.path}: no requests")
    prompt_at, prompt_tokens = packed(_prompts(lines, model))
    arrivals = [line.arrival_s for line in lines if line.arrival_s is not None]
    return Workload(
        name=config.kind,
        recipe={},
        prompt_at=prompt_at,
        prompt_tokens=prompt_tokens,
        output_tokens=np.array([line.output_tokens or config.output_tokens for line in lines], np.int32),
        arrivals_s=np.array(arrivals) if arrivals else None,
        columns=_columns(lines),
    )


def _require_order(place: str, line: CustomLine, before: list[CustomLine]) -> None:
    if not before:
        return
    last = before[-1].arrival_s
    if (last is None) != (line.arrival_s is None):
        raise WorkloadError(f"{place}: arrival_s on some lines only; give it on every line or on none")
    if last is not None and line.arrival_s is not None and line.arrival_s < last:
        raise WorkloadError(f"{place}: arrival_s {line.arrival_s:g} goes back; {last:g} came before")


def _prompts(lines: list[CustomLine], model: Model) -> list[Tokens]:
    """Text with the special tokens that open a prompt; a chat template writes its own."""
    prompts: list[Tokens] = [np.array(line.token_ids or [], np.int32) for line in lines]
    texts = [i for i, line in enumerate(lines) if line.prompt]
    chats = [i for i, line in enumerate(lines) if line.messages]
    tokenizer = load_tokenizer(model) if texts or chats else None
    if tokenizer and texts:
        for i, ids in zip(texts, encode(tokenizer, [lines[i].prompt or "" for i in texts]), strict=True):
            prompts[i] = ids
    if tokenizer and chats:
        template = ChatTemplate(model)
        rendered = [template.render(lines[i].messages or []) for i in chats]
        for i, ids in zip(chats, encode(tokenizer, rendered, special=False), strict=True):
            prompts[i] = ids
    return prompts


def _columns(lines: list[CustomLine]) -> dict[str, NDArray[Any]]:
    """The columns that any line gives, and the texts or messages if all lines are such."""
    columns: dict[str, NDArray[Any]] = {}
    for name in SENDING:
        values = [getattr(line, name) for line in lines]
        if any(value is not None for value in values):
            columns[name] = np.array([ABSENT[name] if value is None else value for value in values])
    if all(line.prompt for line in lines):
        columns["prompt_text"] = np.array([line.prompt for line in lines], object)
    if all(line.messages for line in lines):
        columns["messages"] = np.array([json.dumps(line.messages) for line in lines], object)
    return columns
