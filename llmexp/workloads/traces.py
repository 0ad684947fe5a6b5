"""Production traces: arrivals and lengths as they were, prompts that share what the trace shared."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from llmexp.errors import WorkloadError
from llmexp.models import Model
from llmexp.schema import section
from llmexp.schema.section import Section
from llmexp.schema.workloads import Azure, Mooncake
from llmexp.workloads.draws import Vocabulary
from llmexp.workloads.files import read_csv, read_json_lines, sha256_of
from llmexp.workloads.synthetic import distinct_prompts
from llmexp.workloads.workload import Tokens, Workload

BLOCKS_IN_MEMORY = 8192
MOST_TOKENS = 2**31 - 1  # what is longer after scaling is too long for any model all the same


class MooncakeLine(Section):
    """One request of a Mooncake trace; the timestamp is in milliseconds."""

    timestamp: float
    input_length: section.Tokens
    output_length: section.Tokens
    hash_ids: list[NonNegativeInt]


class AzureRow(Section):
    """One request of an Azure trace."""

    arrival: datetime
    prompt_tokens: section.Tokens
    output_tokens: section.Tokens


def mooncake(config: Mooncake, model: Model) -> Workload:
    """A trace with block hashes (Qin et al., Mooncake, 2024), prompts made on demand.

    An id stands for `block_tokens` tokens, the last one of a prompt for what is left. Scaling shrinks the
    block, so that every prompt keeps its ids. Raises WorkloadError with file and line for a broken trace.
    """
    block = round(config.block_tokens * config.scale_lengths)
    if block < 2:
        raise WorkloadError(
            f"workload.scale_lengths={config.scale_lengths} makes blocks of {block} tokens out of "
            f"{config.block_tokens}; the least is 2"
        )
    numbers: dict[int, int] = {}
    requests, prompt_tokens, output_tokens = [], [], []
    timestamps: list[float] = []
    for place, line in read_json_lines(config.path, MooncakeLine, config.limit):
        if timestamps and line.timestamp < timestamps[-1]:
            raise WorkloadError(f"{place}: timestamp {line.timestamp:g} goes back; {timestamps[-1]:g} came before")
        ids = -(-line.input_length // config.block_tokens)
        if len(line.hash_ids) != ids:
            raise WorkloadError(
                f"{place}: {len(line.hash_ids)} hash_ids for input_length={line.input_length}; "
                f"blocks of {config.block_tokens} tokens make {ids}"
            )
        requests.append(np.array([numbers.setdefault(each, len(numbers)) for each in line.hash_ids], np.int64))
        full, rest = divmod(line.input_length, config.block_tokens)
        scaled_rest = min(-(-rest * block // config.block_tokens), block - 1)
        prompt_tokens.append(min(full * block + scaled_rest, MOST_TOKENS))
        output_tokens.append(line.output_length)
        timestamps.append(line.timestamp)

    vocabulary = Vocabulary(model, config.seed)
    marks = vocabulary.mark_tokens(len(numbers))

    @lru_cache(maxsize=BLOCKS_IN_MEMORY)
    def passage(number: int) -> Tokens:
        return vocabulary.passage(number, block, marks, "block")

    def prompt_at(i: int) -> Tokens:
        return np.concatenate([passage(number) for number in requests[i].tolist()])[: prompt_tokens[i]]

    return Workload(
        name=config.kind,
        recipe={"file_sha256": sha256_of(config.path)},
        prompt_at=prompt_at,
        prompt_tokens=np.array(prompt_tokens, np.int32),
        output_tokens=_scaled(output_tokens, config.scale_lengths),
        arrivals_s=_since_first(np.array(timestamps) / 1000, config.speed),
    )


def azure(config: Azure, model: Model) -> Workload:
    """A trace of Azure's LLM inference services (Patel et al., Splitwise, 2024): no prompt shares anything.

    Raises WorkloadError with file and line for a broken trace.
    """
    columns = {"arrival": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}
    rows = list(read_csv(config.path, AzureRow, columns, config.limit))
    clock = [row.arrival.replace(tzinfo=UTC) for row in rows]  # as the files are
    arrivals = np.array([time.timestamp() for time in clock])
    back = np.flatnonzero(np.diff(arrivals) < 0)
    if len(back):
        raise WorkloadError(f"{config.path}:{back[0] + 3}: TIMESTAMP {rows[back[0] + 1].arrival} goes back")
    prompt_tokens = _scaled([row.prompt_tokens for row in rows], config.scale_lengths)
    return Workload(
        name=config.kind,
        recipe={"file_sha256": sha256_of(config.path)},
        prompt_at=distinct_prompts(Vocabulary(model, config.seed), prompt_tokens),
        prompt_tokens=prompt_tokens,
        output_tokens=_scaled([row.output_tokens for row in rows], config.scale_lengths),
        arrivals_s=_since_first(arrivals, config.speed),
    )


def _scaled(counts: Sequence[int], factor: float) -> NDArray[np.int32]:
    scaled: NDArray[np.float64] = np.clip(np.rint(np.array(counts, np.float64) * factor), 1, MOST_TOKENS)
    return scaled.astype(np.int32)


def _since_first(seconds: NDArray[np.float64], speed: float) -> NDArray[np.float64]:
    return (seconds - seconds[:1]) / speed
