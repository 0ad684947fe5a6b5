"""The records of ended requests in compact arrays, on their way from a worker to the trace."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmexp.client.call import Call
from llmexp.secrets import redacted

LONGEST_ERROR = 2000  # characters
UNKNOWN = -1  # a token count that the server did not report

# One row a request; times are absolute.
ROW = np.dtype(
    [
        ("request", "i4"),
        ("intended", "f8"),
        ("ready", "f8"),
        ("sent", "f8"),
        ("end", "f8"),
        ("num_chunks", "i4"),
        ("prompt_tokens", "i4"),
        ("cached_tokens", "i4"),
        ("output_tokens", "i4"),
    ]
)


@dataclass(frozen=True)
class Records:
    """What a worker measured. `rows` has dtype ROW; `chunks` holds the chunk times of one row after another.

    `finish_reasons`, `errors`, `texts`, `logprobs` and `engine_times` are by position in `rows`, where there are any.
    """

    rows: NDArray[Any]
    chunks: NDArray[np.float64]
    finish_reasons: Sequence[str | None]
    errors: dict[int, str]
    texts: dict[int, str]
    logprobs: dict[int, str]
    engine_times: dict[int, tuple[float, float, float, float]]


def joined(parts: Sequence[Records]) -> Records:
    """Several records as one, in their order."""
    starts = np.cumsum([0, *(len(part.rows) for part in parts)]).tolist()

    def shifted(name: str) -> dict[int, Any]:
        return {
            start + position: value
            for start, part in zip(starts, parts, strict=False)
            for position, value in getattr(part, name).items()
        }

    return Records(
        rows=np.concatenate([part.rows for part in parts]) if parts else np.empty(0, dtype=ROW),
        chunks=np.concatenate([part.chunks for part in parts]) if parts else np.empty(0),
        finish_reasons=[reason for part in parts for reason in part.finish_reasons],
        errors=shifted("errors"),
        texts=shifted("texts"),
        logprobs=shifted("logprobs"),
        engine_times=shifted("engine_times"),
    )


class Ledger:
    """Takes ended calls, about 60 bytes a request and 8 a chunk, and holds them until they are drained."""

    def __init__(self) -> None:
        self.taken = 0
        self._seen_reasons: dict[str, str] = {}
        self._empty()

    def _empty(self) -> None:
        self.holds = 0
        names = ROW.names or ()
        self._columns: dict[str, array[Any]] = {name: array("i" if ROW[name] == "i4" else "d") for name in names}
        self._chunks = array("d")
        self._finish_reasons: list[str | None] = []
        self._errors: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._logprobs: dict[int, str] = {}
        self._engine_times: dict[int, tuple[float, float, float, float]] = {}
        self._append = [column.append for column in self._columns.values()]

    def add(self, call: Call) -> None:
        """Keeps a call that has ended."""
        position = self.holds
        self.holds += 1
        self.taken += 1
        values = (
            call.index,
            call.intended,
            call.ready,
            call.sent,
            call.end,
            len(call.chunks),
            UNKNOWN if call.prompt_tokens is None else call.prompt_tokens,
            UNKNOWN if call.cached_tokens is None else call.cached_tokens,
            UNKNOWN if call.output_tokens is None else call.output_tokens,
        )
        for append, value in zip(self._append, values, strict=True):
            append(value)
        self._chunks.fromlist(call.chunks)
        reason = call.finish_reason
        self._finish_reasons.append(self._seen_reasons.setdefault(reason, reason) if reason else None)
        if call.error is not None:
            self._errors[position] = redacted(call.error)[:LONGEST_ERROR]  # in the server's words, which may be an echo
        if call.text is not None:
            self._texts[position] = call.text
        if call.logprobs is not None:
            self._logprobs[position] = call.logprobs
        if call.engine_times is not None:
            self._engine_times[position] = call.engine_times

    def drain(self) -> Records:
        """What was taken since the last time, which is kept here no longer."""
        rows = np.empty(self.holds, dtype=ROW)
        for name, column in self._columns.items():
            rows[name] = np.frombuffer(column, dtype=ROW[name]) if self.holds else []
        records = Records(
            rows=rows,
            chunks=np.frombuffer(self._chunks, dtype=np.float64) if self._chunks else np.empty(0),
            finish_reasons=self._finish_reasons,
            errors=self._errors,
            texts=self._texts,
            logprobs=self._logprobs,
            engine_times=self._engine_times,
        )
        self._empty()
        return records
