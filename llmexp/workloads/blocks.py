"""Which cache blocks the prompts of a workload are made of, by content.

The engine identifies a full block by the hash of itself and all before it, that is, by the whole prefix that
it ends. Here the key of a prefix is the sum, modulo 2**64, of a mixed 64-bit word for each (position, token).
A sum extends token by token, so that all keys of a prompt come from one `cumsum`. Two given prefixes share a
key with a chance of 2**-64; in a workload of 25 million distinct blocks any do with a chance of 2e-5.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmexp.errors import WorkloadError
from llmexp.workloads.workload import Tokens, Workload

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Blocks:
    """The full blocks of every request of a workload.

    Request i leaves blocks `keys[starts[i]:starts[i + 1]]` behind: those of its prompt, of which there are
    `in_prompt[i]`, and, where the workload knows the generated answer, those that decode fills. The last
    sampled token never gets KV. `whole[i]` is the key of the whole prompt. Shapes: keys (blocks,), starts
    (n + 1,), in_prompt, whole and prompt_tokens (n,).
    """

    size: int
    keys: Keys
    starts: NDArray[np.int64]
    in_prompt: NDArray[np.int64]
    whole: Keys
    prompt_tokens: NDArray[np.int64]


def prefix_keys(tokens: Tokens) -> Keys:
    """The key of every prefix of `tokens`, shape `(len(tokens),)`: SplitMix64's finaliser, summed."""
    words = tokens.astype(np.uint64)
    words <<= np.uint64(32)
    words += np.arange(len(tokens), dtype=np.uint64)
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return np.cumsum(words, dtype=np.uint64)


def blocks_of(workload: Workload, size: int) -> Blocks:
    """The blocks of `size` tokens of a workload, reading one prompt at a time.

    Raises WorkloadError if a prompt's length is not the declared one.
    """
    count = len(workload)
    prompt_tokens = workload.prompt_tokens.astype(np.int64)
    kept_tokens = prompt_tokens.copy()
    answer_in = workload.columns.get("answer_in", np.full(count, -1))
    known = answer_in >= 0
    kept_tokens[known] += workload.output_tokens[known] - 1
    starts = np.concatenate([[0], np.cumsum(kept_tokens // size)])
    keys = np.empty(starts[-1], np.uint64)
    whole = np.empty(count, np.uint64)
    for i in range(count):
        tokens = workload.prompt_at(i)
        if len(tokens) != prompt_tokens[i]:
            raise WorkloadError(f"request {i} declares {prompt_tokens[i]} prompt tokens and has {len(tokens)}")
        if known[i]:
            tokens = workload.prompt_at(int(answer_in[i]))[: kept_tokens[i]]
        prefixes = prefix_keys(tokens)
        whole[i] = prefixes[prompt_tokens[i] - 1]
        keys[starts[i] : starts[i + 1]] = prefixes[size - 1 :: size]
    return Blocks(size, keys, starts, prompt_tokens // size, whole, prompt_tokens)


def shared_blocks_between(a: Workload, b: Workload, block_size: int) -> int:
    """How many distinct full blocks both workloads hold."""
    return len(np.intersect1d(blocks_of(a, block_size).keys, blocks_of(b, block_size).keys))
