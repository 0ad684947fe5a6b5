"""Server-sent events, cut from bytes that arrive in any portions.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

MAX_EVENT_BYTES = 64 * 2**20


class MalformedEventError(Exception):
    """Bytes that are no server-sent event; the message shows the first of them."""


class EventStream:
    """The events of one response body."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that these bytes complete.

        Raises MalformedEventError for a line that is neither a field of the format nor a comment.
        """
        if self._tail:
            data = self._tail + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # half of a line end, perhaps
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blocks = data.split(b"\n\n")
        self._tail = blocks.pop() + held
        if len(self._tail) > MAX_EVENT_BYTES:
            raise MalformedEventError(f"an event longer than {MAX_EVENT_BYTES} bytes: {shown(self._tail)}")
        payloads = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                payloads.append(block[6:])
            elif (payload := _payload(block)) is not None:
                payloads.append(payload)
        return payloads

    def end(self) -> list[bytes]:
        """The payload of a last event that no blank line followed, if there is one."""
        return self.feed(b"\n\n")


def _payload(block: bytes) -> bytes | None:
    values = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
        elif name not in (b"", b"event", b"id", b"retry"):  # an empty name is a comment, or no line at all
            raise MalformedEventError(f"no server-sent event: {shown(line)}")
    return b"\n".join(values) if values else None


def shown(data: bytes) -> str:
    """The first bytes, fit for a message."""
    return repr(data[:120])[1:] + (f" … ({len(data)} bytes)" if len(data) > 120 else "")
