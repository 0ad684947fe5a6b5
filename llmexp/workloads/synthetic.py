"""Synthetic prompts with exactly known reuse: shared_prefix, and its control unique_prefix."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from llmexp.errors import WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import SharedPrefix, UniquePrefix
from llmexp.workloads.draws import Vocabulary, lengths, permutation, popular
from llmexp.workloads.workload import Tokens, Workload

PREFIXES_IN_MEMORY = 256


def shared_prefix(config: SharedPrefix, model: Model) -> Workload:
    """Prompts of `prefix_tokens + suffix_tokens`, sharing exactly a prefix with those of the same group.

    Raises WorkloadError if a suffix is too short to tell prompts apart, or lengths cannot give `reuse`.
    """
    vocabulary = Vocabulary(model, config.seed)
    count = config.num_requests
    group = _in_order(popular(count, config.num_prefixes, config.zipf, config.seed, "popularity"), config)
    prompt_tokens = config.prefix_tokens + lengths(config.suffix_tokens, count, config.seed, "suffix")
    marks = vocabulary.mark_tokens(config.num_prefixes + count)
    if config.reuse is None:
        shared = np.full(count, config.prefix_tokens, np.int32)
    else:
        shared = shared_for_reuse(config.reuse, config.reuse_block_size, prompt_tokens, group, marks)
    return Workload(
        name=config.kind,
        recipe={},
        prompt_at=sharing_prompts(vocabulary, group, shared, prompt_tokens, config.num_prefixes),
        prompt_tokens=prompt_tokens,
        output_tokens=lengths(config.output_tokens, count, config.seed, "output"),
        columns={"prefix": group},
    )


def unique_prefix(config: UniquePrefix, model: Model) -> Workload:
    """Prompts of the same lengths as `shared_prefix` with the same seed, all different from the start."""
    count = config.num_requests
    prompt_tokens = config.prefix_tokens + lengths(config.suffix_tokens, count, config.seed, "suffix")
    return Workload(
        name=config.kind,
        recipe={},
        prompt_at=distinct_prompts(Vocabulary(model, config.seed), prompt_tokens),
        prompt_tokens=prompt_tokens,
        output_tokens=lengths(config.output_tokens, count, config.seed, "output"),
    )


def sharing_prompts(
    vocabulary: Vocabulary,
    group: NDArray[np.int64],
    shared: NDArray[np.int32],
    prompt_tokens: NDArray[np.int32],
    num_prefixes: int,
) -> Callable[[int], Tokens]:
    """`prompt_at` for prompts whose first `shared[i]` tokens are prefix `group[i]`, the rest their own.

    All arrays have shape `(n,)`. Two prompts of a group share exactly the smaller of their `shared` tokens,
    two of different groups none. Raises WorkloadError if a prompt has too few tokens of its own.
    """
    marks = vocabulary.mark_tokens(num_prefixes + len(group))
    own = prompt_tokens - shared
    if own.min(initial=marks) < marks:
        raise WorkloadError(
            f"request {own.argmin()} has {own.min()} tokens of its own after the shared prefix; "
            f"telling {len(group)} prompts apart with {len(vocabulary.marks)} first tokens takes {marks}"
        )
    longest = np.zeros(num_prefixes, np.int32)
    np.maximum.at(longest, group, shared)

    @lru_cache(maxsize=PREFIXES_IN_MEMORY)
    def prefix(number: int) -> Tokens:
        return vocabulary.passage(number, int(longest[number]), marks, "prefix")

    def prompt_at(i: int) -> Tokens:
        own_passage = vocabulary.passage(num_prefixes + i, int(own[i]), marks, "own")
        return np.concatenate([prefix(int(group[i]))[: shared[i]], own_passage]) if shared[i] else own_passage

    return prompt_at


def distinct_prompts(vocabulary: Vocabulary, prompt_tokens: NDArray[np.int32]) -> Callable[[int], Tokens]:
    """`prompt_at` for prompts of given lengths, shape `(n,)`, that differ from their first tokens on."""
    nothing = np.zeros_like(prompt_tokens)
    return sharing_prompts(vocabulary, nothing.astype(np.int64), nothing, prompt_tokens, num_prefixes=1)


def _in_order(group: NDArray[np.int64], config: SharedPrefix) -> NDArray[np.int64]:
    if config.order == "shuffled":
        group = group[permutation(len(group), config.seed, "order")]
    if config.order == "interleaved":
        turn = np.arange(len(group)) - np.searchsorted(group, group)
        group = group[np.lexsort((group, turn))]
    return group


def shared_for_reuse(
    target: float, block: int, prompt_tokens: NDArray[np.int32], group: NDArray[np.int64], marks: int
) -> NDArray[np.int32]:
    """Shared tokens per prompt, in whole blocks, so that `target` of all prompt tokens can be hits.

    The first prompt of a group brings the prefix in and hits nothing; each later one can share as much as
    both are long. The blocks wanted are spread over them in proportion, and rounding falls on the earliest.
    """
    first = np.unique(group, return_index=True)[1]
    bringer = first[np.searchsorted(group[first], group)]
    room = (np.minimum(prompt_tokens, prompt_tokens[bringer]) - marks) // block
    room[first] = 0
    wanted = round(target * int(prompt_tokens.sum()) / block)
    if wanted > room.sum():
        most = int(room.sum()) * block / int(prompt_tokens.sum())
        raise WorkloadError(
            f"workload.reuse={target}: {len(group)} prompts of {prompt_tokens.mean():.0f} tokens in "
            f"{len(first)} prefix groups can reuse at most {most:.3f} in blocks of {block}"
        )
    blocks = np.diff(np.cumsum(room, dtype=np.int64) * wanted // max(int(room.sum()), 1), prepend=0)
    np.maximum.at(blocks, bringer, blocks)
    return (blocks * block).astype(np.int32)
