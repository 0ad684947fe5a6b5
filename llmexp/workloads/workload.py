"""A workload: an ordered list of requests as token ids, content-addressed by SHA-256."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

SENDING = ("priority", "deadline_s", "conversation", "think_s")
"""Columns that tell the client how to send a request, and so belong to what the hash covers."""


@dataclass(frozen=True)
class Workload:
    """An ordered list of requests. Prompts are made on demand, so that a large trace need not fit in memory.

    `recipe` holds everything that determines the content. `prompt_at(i)` returns the token ids of request i
    (int32, shape `(prompt_tokens[i],)`), the same at every call. `prompt_tokens` and `output_tokens` have
    shape `(n,)`; `arrivals_s` is None or has shape `(n,)`, non-decreasing, starting at or after 0.
    `columns` holds further per-request values of shape `(n,)`. Four of them tell the client how to send:

    - `priority`: scheduling priority, lower is served first;
    - `deadline_s`: latest useful completion, in seconds after the request was due;
    - `conversation`: requests with the same id are sent in turn, each after the one before has completed
      (-1: stands alone), plus `think_s` seconds.

    Two tell what a prompt was tokenised from, for servers that tokenise themselves: `prompt_text`, as the
    completions API takes it, or `messages`, the chat messages as JSON.

    `answer_in` names the request whose prompt holds this one's generated answer, right after this one's
    prompt; -1 where none does. All others (subject, answer, …) only describe.

    `request_fields` are extra fields of every request's body (`{"logprobs": 10}`); `keep_text` asks for the
    generated text in the trace.
    """

    name: str
    recipe: Mapping[str, Any]
    prompt_at: Callable[[int], Tokens]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    arrivals_s: NDArray[np.float64] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    request_fields: Mapping[str, Any] = field(default_factory=dict)
    keep_text: bool = False

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def prompts(self) -> Iterator[Tokens]:
        """The prompts in order, one at a time."""
        return (self.prompt_at(i) for i in range(len(self)))

    @cached_property
    def sha256(self) -> str:
        """Hash of what is sent and how: token ids, output lengths, arrivals, `SENDING` columns, fields."""
        digest = hashlib.sha256()
        digest.update(json.dumps(dict(self.request_fields), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.output_tokens, dtype="<i4").tobytes())
        if self.arrivals_s is not None:
            digest.update(np.ascontiguousarray(self.arrivals_s, dtype="<f8").tobytes())
        for name in SENDING:
            if name in self.columns:
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(self.columns[name], dtype="<f8").tobytes())
        for prompt in self.prompts():
            digest.update(len(prompt).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(prompt, dtype="<i4").tobytes())
        return digest.hexdigest()


def packed(prompts: Iterable[Tokens]) -> tuple[Callable[[int], Tokens], NDArray[np.int32]]:
    """`prompt_at` and `prompt_tokens` of prompts that fit in memory, kept as one array."""
    kept = [np.asarray(prompt, np.int32) for prompt in prompts]
    lengths = np.array([len(prompt) for prompt in kept], np.int32)
    return unpacked(np.concatenate(kept) if kept else np.empty(0, np.int32), lengths), lengths


def unpacked(flat: Tokens, lengths: NDArray[np.int32]) -> Callable[[int], Tokens]:
    """`prompt_at` of prompts that lie one after the other in `flat`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return lambda i: flat[ends[i] - lengths[i] : ends[i]]
