"""Numbers and choices in sentences."""

import difflib
from collections.abc import Iterable


def count(n: int, noun: str) -> str:
    """`1 trial`, `2 trials`; a noun in -ch takes -es."""
    return f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('ch') else 's'}"


def either(options: Iterable[object]) -> str:
    """`on, off or salted`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(value: str, options: Iterable[str]) -> str:
    """`; did you mean …?` for a mistyped option, or nothing where none is near."""
    known = {option.lower(): option for option in sorted(options)}
    for cutoff in (0.9, 0.6):
        if near := difflib.get_close_matches(value.lower(), known, n=3, cutoff=cutoff):
            return f"; did you mean {either(known[name] for name in near)}?"
    return ""
