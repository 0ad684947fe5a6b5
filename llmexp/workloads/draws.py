"""Everything random in a workload, reproducible on any platform and NumPy version.

A stream is named by its parts (seed, purpose, index, …): their BLAKE2b hash is the key of a Philox counter
generator, of which only the raw words are used. NumPy guarantees those, but not how a `Generator` turns
them into variates.
"""

import hashlib
import json

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from llmexp.errors import WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import Lengths, LogNormal, Uniform
from llmexp.workloads.workload import Tokens


def words(count: int, *parts: int | str) -> NDArray[np.uint64]:
    """`count` random 64-bit words of the stream that `parts` name, shape `(count,)`."""
    key = hashlib.blake2b(json.dumps(parts, default=int).encode(), digest_size=16).digest()
    return np.asarray(np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count))


def uniforms(count: int, *parts: int | str) -> NDArray[np.float64]:
    """`count` numbers in (0, 1), shape `(count,)`."""
    return ((words(count, *parts) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def integers(count: int, bound: int, *parts: int | str) -> NDArray[np.int64]:
    """`count` integers in [0, bound), bound at most 2**31; bias below bound / 2**32."""
    halves = words((count + 1) // 2, *parts).astype("<u8").view("<u4")[:count]
    return ((halves.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def permutation(count: int, *parts: int | str) -> NDArray[np.int64]:
    """A random order of 0 … count - 1."""
    return np.argsort(words(count, *parts), kind="stable")


def lengths(spec: Lengths, count: int, *parts: int | str) -> NDArray[np.int32]:
    """`count` token counts of the given distribution, shape `(count,)`."""
    if isinstance(spec, Uniform):
        return (spec.min + integers(count, spec.max - spec.min + 1, *parts)).astype(np.int32)
    if isinstance(spec, LogNormal):
        ends = np.log([spec.min - 0.5, spec.max + 0.5]) - np.log(spec.median)
        low, high = ndtr(ends / spec.sigma)
        logs = np.log(spec.median) + spec.sigma * ndtri(low + (high - low) * uniforms(count, *parts))
        counts: NDArray[np.float64] = np.clip(np.rint(np.exp(logs)), spec.min, spec.max)
        return counts.astype(np.int32)
    return np.full(count, spec, np.int32)


def apportioned(weights: ArrayLike, count: int, *parts: int | str) -> NDArray[np.int64]:
    """`count` choices from 0 … len(weights) - 1 in ascending order, each in proportion to its weight.

    Systematic sampling: every choice comes as often as expected, rounded up or down, so that the mix does not
    vary from seed to seed.
    """
    share = np.cumsum(np.asarray(weights, np.float64))
    points = (np.arange(count) + uniforms(1, *parts)) / count
    return np.minimum(np.searchsorted(share / share[-1], points, side="right"), len(share) - 1)


def popular(count: int, choices: int, zipf: float, *parts: int | str) -> NDArray[np.int64]:
    """`count` choices from 0 … choices - 1 in ascending order, choice k with weight (k + 1)**-zipf."""
    return apportioned(np.arange(1, choices + 1, dtype=np.float64) ** -zipf, count, *parts)


class Vocabulary:
    """The token ids that synthetic prompts may hold, in two disjoint halves drawn by the seed.

    *Marks* open a passage and number it; *body* tokens fill it. As no body token is a mark, two passages
    with different numbers differ within their first `mark_tokens` (one, unless there are more passages than
    marks), and a passage that opens where another goes on ends what the two prompts share. No chance is
    involved, whatever the size of the vocabulary, and for any block that holds the marks.
    """

    def __init__(self, model: Model, seed: int) -> None:
        """Raises WorkloadError if too few tokens are left to write numbers with."""
        plain = np.setdiff1d(np.arange(model.vocab_size, dtype=np.int32), list(model.special_token_ids))
        if len(plain) < 4:
            raise WorkloadError(
                f"model {model.name}: {len(plain)} tokens that are not special; synthetic prompts need 4"
            )
        shuffled = plain[permutation(len(plain), seed, "vocabulary")]
        self.marks: Tokens = shuffled[: len(plain) // 2]
        self.body: Tokens = shuffled[len(plain) // 2 :]
        self._seed = seed

    def mark_tokens(self, count: int) -> int:
        """How many tokens number `count` passages."""
        digits = 1
        while len(self.marks) ** digits < count:
            digits += 1
        return digits

    def mark(self, number: int, digits: int) -> Tokens:
        """The tokens that number a passage, the fastest changing first, shape `(digits,)`."""
        base = len(self.marks)
        return self.marks[[number // base**digit % base for digit in range(digits)]]

    def passage(self, number: int, count: int, digits: int, *parts: int | str) -> Tokens:
        """`count` tokens, of which the first `digits` tell `number`, shape `(count,)`."""
        tokens = self.body[integers(count, len(self.body), self._seed, *parts, number)]
        tokens[:digits] = self.mark(number, digits)[:count]
        return tokens
