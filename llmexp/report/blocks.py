"""Markdown's building blocks."""

from collections.abc import Sequence


def section(title: str, parts: Sequence[str]) -> list[str]:
    """A heading and its parts; nothing where there are none."""
    parts = [part for part in parts if part]
    return [f"## {title}", *parts] if parts else []


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; what a cell's text holds stays in the cell."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(_cell(text) for text in row) + " |" for row in rows)


def by_cell(header: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and lines whose first column names cells: without it where there is but one."""
    if len({line[0] for line in lines}) > 1:
        return header, lines
    return header[1:], [line[1:] for line in lines]


def filled(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table without the columns that hold nothing but `-`; empty if none is left beside the first."""
    kept = [i for i in range(len(header)) if i == 0 or any(line[i] != "-" for line in lines)]
    if len(kept) < 2:
        return ""
    return table([header[i] for i in kept], [[line[i] for i in kept] for line in lines])


def folded(title: str, content: str) -> str:
    """Content that opens on a click."""
    return f"<details><summary>{title}</summary>\n\n{content}\n\n</details>"


def _cell(text: str) -> str:
    """Text that stays in its cell: errors may hold line breaks and bars."""
    return " ".join(text.replace("|", "\\|").split())
