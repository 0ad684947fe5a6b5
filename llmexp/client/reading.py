"""What the chunks of a streamed answer say: which carry a token, what the usage is, how it ended."""

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from llmexp.client.call import Call
from llmexp.client.sse import MalformedEventError, shown

DONE = b"[DONE]"
_OPENING = {
    "completions": b'"choices":[{"index":0,"text":"',
    "chat": b'"choices":[{"index":0,"delta":{"content":"',
}
_UNFINISHED = b'"finish_reason":null'
_USAGE = b'"usage":{'


class Reading:
    """Reads one answer's chunks into its call.

    A chunk carries a token if it has text, reasoning, part of a tool call, or token ids. A chunk with only a
    role, with empty text or with only usage carries none by itself. But if the usage counts just as many more
    tokens than chunks as there were chunks with empty text, each of those carried one: a part of a character,
    whose text came later, or a stop token. Of any other number, the chunk with the finish reason carried one.
    """

    __slots__ = ("_api", "_call", "_empty", "_finish_at", "_keep", "_opening", "_silent", "done")

    def __init__(self, call: Call, api: Literal["completions", "chat"], keep_text: bool) -> None:
        self._call = call
        self._api = api
        self._keep = keep_text
        self._opening = _OPENING[api]
        self._empty = self._opening + b'"'
        self._finish_at: float | None = None
        self._silent: list[float] = []
        self.done = False

    def event(self, payload: bytes, now: float) -> None:
        """Takes the payload of an event that came at `now`. Raises MalformedEventError if it is no chunk."""
        # Almost every chunk looks like this. A quote within a JSON string is escaped, so none of the searched
        # byte strings, each with a plain quote before a bracket or colon, can occur within generated text.
        if (
            self._opening in payload
            and self._empty not in payload
            and _UNFINISHED in payload
            and _USAGE not in payload
            and payload.endswith(b"}")
            and not self._keep
        ):
            self._call.chunks.append(now)
        elif payload == DONE:
            self.done = True
        else:
            try:
                self.chunk(orjson.loads(payload), now)
            except (ValueError, TypeError, AttributeError, KeyError, IndexError):
                raise MalformedEventError(f"no chunk of a completion: {shown(payload)}") from None

    def chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        """Takes a parsed chunk."""
        call = self._call
        if error := chunk.get("error"):
            call.error = f"error in the stream: {error.get('message', error) if isinstance(error, Mapping) else error}"
            return
        for choice in chunk["choices"]:
            text, other = self._content(choice)
            if self._keep:
                call.text = (call.text or "") + text
                if call.logprobs is None and (logprobs := choice.get("logprobs")):
                    call.logprobs = _first_token(logprobs)
            carries_token = bool(text or other or choice.get("token_ids"))
            if carries_token:
                call.chunks.append(now)
            elif not (choice.get("delta") or {}).get("role"):
                self._silent.append(now)
            if choice.get("finish_reason"):
                call.finish_reason = _text(choice["finish_reason"])
                if not carries_token:
                    self._finish_at = now
        if usage := chunk.get("usage"):
            call.prompt_tokens = _count(usage["prompt_tokens"])
            call.output_tokens = _count(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            call.cached_tokens = None if cached is None else _count(cached)

    def _content(self, choice: Mapping[str, Any]) -> tuple[str, Any]:
        """The answer's text, and what else was generated."""
        if self._api == "completions":
            return _text(choice.get("text") or ""), None
        delta = choice.get("delta") or {}
        other = delta.get("reasoning") or delta.get("reasoning_content")
        return _text(delta.get("content") or ""), other or delta.get("refusal") or delta.get("tool_calls")

    def end(self) -> None:
        """Settles the call once the response is complete."""
        call = self._call
        if call.error is None and not self.done and call.finish_reason is None:
            call.error = f"the stream ended without a finish reason or {DONE.decode()}, {len(call.chunks)} chunks in"
        missing = (call.output_tokens or 0) - len(call.chunks)
        if missing == len(self._silent):
            call.chunks = sorted([*call.chunks, *self._silent])
        elif missing > 0 and self._finish_at is not None:
            call.chunks.append(self._finish_at)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _count(value: Any) -> int:
    """A number of tokens, as the trace can hold it."""
    if not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError
    return value


def _first_token(logprobs: Mapping[str, Any]) -> str | None:
    """The first token's alternatives and their log probabilities, as JSON of {token: log probability}."""
    found: Mapping[str, Any] | None = None
    if top := logprobs.get("top_logprobs"):  # completions
        found = top[0]
    elif content := logprobs.get("content"):  # chat
        found = {entry["token"]: entry["logprob"] for entry in content[0]["top_logprobs"]}
    if found is None:
        return None
    return orjson.dumps({_text(token): float(value) for token, value in found.items()}).decode()
