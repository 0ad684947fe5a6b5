"""Numbers and choices in sentences."""

from collections.abc import Iterable


def count(n: int, noun: str) -> str:
    """`1 trial`, `2 trials`; a noun in -ch takes -es."""
    return f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('ch') else 's'}"


def either(options: Iterable[object]) -> str:
    """`on, off or salted`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last
