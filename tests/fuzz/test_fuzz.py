"""Every reader under hypothesis, briefly; `python -m tests.fuzz` does it at length, guided by coverage."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import targets

NAMES = sorted(targets())
# What breaks readers: other types, ends of ranges, depth, other encodings, and what has a meaning of its own.
PIECES = [b"null", b"true", b"-1", b"0", b"1e999", b"9" * 25, b"[]", b"{}", b"[" * 2000, b'"', b"\\ud800", b"\xff\xfe"]
PIECES += [b"\x00", b"\r", b"\n", b",", b"NaN", b"2147483648", b"\\", b"../", b"{{", b"\xc3", b"x" * 5000]


def changed(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The content with pieces in place of some of its parts."""
    for place, length, piece in changes:
        start = place % (len(content) + 1)
        content = content[:start] + piece + content[start + length :]
    return content


changes = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 9), st.sampled_from(PIECES) | st.binary(max_size=4)), max_size=3
)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_read(name: str) -> None:
    target = targets()[name]
    for seed in target.seeds:
        target.read(seed)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(number=st.integers(0, 9), edits=changes, garbage=st.none() | st.binary(max_size=40))
def test_nothing_but_named_errors_comes_out(
    name: str, number: int, edits: list[tuple[int, int, bytes]], garbage: bytes | None
) -> None:
    target = targets()[name]
    target(changed(target.seeds[number % len(target.seeds)], edits) if garbage is None else garbage)
