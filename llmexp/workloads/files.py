"""Reading source files so that whatever is wrong is told with file and line."""

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from llmexp.errors import WorkloadError
from llmexp.schema.section import Section

Line = TypeVar("Line", bound=Section)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, for the recipe. Raises WorkloadError if there is none."""
    with _opened(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_json_lines(path: str | Path, kind: type[Line], limit: int | None = None) -> Iterator[tuple[str, Line]]:
    """Every non-empty line as a `kind`, with its place (`file:line`).

    Raises WorkloadError for a line that is no JSON or does not fit.
    """
    found = 0
    with _opened(path).open(encoding="utf-8") as handle:
        for number, text in enumerate(handle, start=1):
            if found == limit:
                return
            if text.strip():
                place = f"{path}:{number}"
                try:
                    value = json.loads(text)
                except ValueError as error:
                    raise WorkloadError(f"{place}: not JSON ({error}); got {text.strip()[:60]!r}") from None
                yield place, parse(place, value, kind)
                found += 1


def read_csv(path: str | Path, kind: type[Line], columns: dict[str, str], limit: int | None = None) -> Iterator[Line]:
    """Every row of a CSV file with a header as a `kind`, whose fields come from the named `columns`.

    Raises WorkloadError if a column is missing or a row does not fit.
    """
    with _opened(path).open(newline="", encoding="utf-8") as handle:
        reader = csv.DictReader(handle)
        present = reader.fieldnames or []
        for column in columns.values():
            if column not in present:
                raise WorkloadError(f"{path}:1: no column {column!r}; the file has {', '.join(present) or 'none'}")
        for found, row in enumerate(reader):
            if found == limit:
                return
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise WorkloadError(f"{place}: the row has another number of fields than the header's {len(present)}")
            yield parse(place, {field: row[column] for field, column in columns.items()}, kind)


def csv_columns(path: str | Path, at_least: int) -> list[str]:
    """The names in a CSV file's header. Raises WorkloadError if there are fewer than `at_least`."""
    with _opened(path).open(newline="", encoding="utf-8") as handle:
        names = next(csv.reader(handle), [])
    if len(names) < at_least:
        raise WorkloadError(f"{path}:1: {len(names)} columns; {at_least} are needed")
    return names


def read_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises WorkloadError if it is none."""
    try:
        return json.loads(_opened(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkloadError(f"{path}: not JSON ({error})") from None


def parse(place: str, value: Any, kind: type[Line]) -> Line:
    """`value` as a `kind`. Raises WorkloadError that tells the place and the first misfit."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] == "missing" else f"; got {str(first['input'])[:60]!r}"
        raise WorkloadError(f"{place}: {where + ': ' if where else ''}{first['msg']}{got}") from None


def _opened(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise WorkloadError(f"workload.path: no file {str(path)!r}")
    return file
