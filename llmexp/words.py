"""Numbers in sentences."""


def count(n: int, noun: str) -> str:
    """`1 trial`, `2 trials`; a noun in -ch takes -es."""
    return f"{n} {noun}{'' if n == 1 else 'es' if noun.endswith('ch') else 's'}"
