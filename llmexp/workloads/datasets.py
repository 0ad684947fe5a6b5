"""ShareGPT and Alpaca: real lengths, and real texts where the original JSON is given."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from llmexp.errors import ConfigError, WorkloadError
from llmexp.models import Model
from llmexp.schema.section import Section
from llmexp.schema.workloads import Alpaca, ShareGpt
from llmexp.workloads.draws import Vocabulary, permutation
from llmexp.workloads.files import csv_columns, read_csv, read_json, sha256_of
from llmexp.workloads.synthetic import distinct_prompts
from llmexp.workloads.text import TEXTS_AT_ONCE, encode, load_tokenizer
from llmexp.workloads.workload import Tokens, Workload, packed

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


_Length = Annotated[int, Field(ge=0, lt=2**30)]  # so that two add up in 32 bits


class LengthRow(Section):
    """One request's lengths in tokens."""

    prompt: _Length
    output: _Length


@dataclass(frozen=True)
class Row:
    """A row of a data set; `ids` are its prompt's tokens where the text is known."""

    number: int
    prompt_tokens: int
    output_tokens: int
    ids: Tokens | None = None


def dataset(config: ShareGpt | Alpaca, model: Model) -> Workload:
    """A seeded sample of the rows within the limits, in random order.

    Raises WorkloadError with the place for a broken file, or if too few rows are within the limits.
    """
    is_json = config.path.endswith(".json")
    if config.content == "text" and not is_json:
        raise ConfigError(f"workload.content=text needs the original .json; workload.path is {config.path!r}")
    rows = _rows_of_json(config, model) if is_json else _rows_of_csv(config)
    kept = list(islice((row for row in rows if _within(row, config)), config.num_requests))
    if len(kept) < (config.num_requests or 1):
        raise WorkloadError(
            f"{config.path}: workload.num_requests={config.num_requests}, but {len(kept)} rows are within "
            f"min_tokens={config.min_tokens}, max_prompt_tokens={config.max_prompt_tokens} and "
            f"max_total_tokens={config.max_total_tokens}"
        )
    prompt_tokens = np.array([row.prompt_tokens for row in kept], np.int32)
    if config.content == "text":
        prompt_at, _ = packed([row.ids for row in kept if row.ids is not None])
    else:
        prompt_at = distinct_prompts(Vocabulary(model, config.seed), prompt_tokens)
    return Workload(
        name=config.kind,
        recipe={"file_sha256": sha256_of(config.path)},
        prompt_at=prompt_at,
        prompt_tokens=prompt_tokens,
        output_tokens=np.array([row.output_tokens for row in kept], np.int32),
        columns={"row": np.array([row.number for row in kept])},
    )


def _within(row: Row, config: ShareGpt | Alpaca) -> bool:
    longest_prompt = config.max_prompt_tokens or row.prompt_tokens
    longest_total = config.max_total_tokens or row.prompt_tokens + row.output_tokens
    return (
        min(row.prompt_tokens, row.output_tokens) >= config.min_tokens
        and row.prompt_tokens <= longest_prompt
        and row.prompt_tokens + row.output_tokens <= longest_total
    )


def _rows_of_csv(config: ShareGpt | Alpaca) -> Iterator[Row]:
    present = csv_columns(config.path, at_least=2)
    columns = {"prompt": config.prompt_column or present[0], "output": config.output_column or present[1]}
    lengths = list(read_csv(config.path, LengthRow, columns))
    for number in permutation(len(lengths), config.seed, "sample").tolist():
        yield Row(number, lengths[number].prompt, lengths[number].output)


def _rows_of_json(config: ShareGpt | Alpaca, model: Model) -> Iterator[Row]:
    """Tokenises as many texts as are asked for, some at a time."""
    content = read_json(config.path)
    if not isinstance(content, list):
        raise WorkloadError(f"{config.path}: a list of objects is expected; got {type(content).__name__}")
    texts_of = _sharegpt_texts if config.kind == "sharegpt" else _alpaca_texts
    texts = [texts_of(f"{config.path}: entry {number}", entry) for number, entry in enumerate(content)]
    tokenizer = load_tokenizer(model)
    order = [number for number in permutation(len(texts), config.seed, "sample").tolist() if texts[number]]
    for start in range(0, len(order), TEXTS_AT_ONCE):
        some = order[start : start + TEXTS_AT_ONCE]
        prompts = encode(tokenizer, [texts[number][0] for number in some])
        answers = encode(tokenizer, [texts[number][1] for number in some], special=False)
        for number, prompt, answer in zip(some, prompts, answers, strict=True):
            yield Row(number, len(prompt), len(answer), prompt)


def _sharegpt_texts(place: str, entry: Any) -> tuple[str, ...]:
    """The first human turn and its answer; nothing if the conversation opens otherwise."""
    try:
        turns = [(turn["from"], str(turn["value"])) for turn in entry["conversations"][:2]]
    except (KeyError, TypeError) as error:
        raise WorkloadError(f"{place}: expected conversations of from and value; {error!r}") from None
    opens = [speaker for speaker, _ in turns] == ["human", "gpt"]
    return tuple(text for _, text in turns) if opens else ()


def _alpaca_texts(place: str, entry: Any) -> tuple[str, ...]:
    try:
        template = WITH_INPUT if entry.get("input") else WITHOUT_INPUT
        return template.format(instruction=entry["instruction"], input=entry.get("input")), str(entry["output"])
    except (KeyError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{place}: expected instruction, input and output; {error!r}") from None
