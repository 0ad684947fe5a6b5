"""What a worker needs to know of the workload, and the requests' JSON made from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray


@dataclass(frozen=True)
class Requests:
    """The requests of a round. Arrays have shape `(n,)`, by index in the workload.

    `prompts` is a file of int32 token ids, of request i from `bounds[i]` to `bounds[i + 1]`. `texts`, or chat
    `messages` as JSON, are sent in their place if given. `salt` makes every request's `cache_salt` its own if not
    empty.
    """

    prompts: Path
    bounds: NDArray[np.int64]
    output_tokens: NDArray[np.int32]
    common: Mapping[str, Any]  # fields of every request
    texts: Sequence[str] | None = None
    messages: Sequence[str] | None = None
    priority: NDArray[np.int64] | None = None
    salt: str = ""


class Bodies:
    """Makes the requests' fields and bodies."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        size = int(requests.bounds[-1])
        self._tokens = np.asarray(np.memmap(requests.prompts, np.int32, "r")) if size else np.empty(0, np.int32)
        self._bounds = requests.bounds.tolist()
        self._output_tokens = requests.output_tokens.tolist()

    def fields(self, index: int) -> dict[str, Any]:
        """The fields of a request's body; the prompt is a list of token ids or text."""
        fields = self._fields(index)
        if isinstance(fields.get("prompt"), np.ndarray):
            fields["prompt"] = fields["prompt"].tolist()
        return fields

    def json(self, index: int) -> bytes:
        """The body of a request."""
        return orjson.dumps(self._fields(index), option=orjson.OPT_SERIALIZE_NUMPY)

    def _fields(self, index: int) -> dict[str, Any]:
        requests = self._requests
        fields = {**requests.common, "max_tokens": self._output_tokens[index]}
        if requests.messages is not None:
            fields["messages"] = orjson.loads(requests.messages[index])
        elif requests.texts is not None:
            fields["prompt"] = requests.texts[index]
        else:
            fields["prompt"] = self._tokens[self._bounds[index] : self._bounds[index + 1]]
        if requests.priority is not None:
            fields["priority"] = int(requests.priority[index])
        if requests.salt:
            fields["cache_salt"] = f"{requests.salt}-{index}"
        return fields
