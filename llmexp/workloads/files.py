"""Reading source files so that whatever is wrong is told with file and line."""

import codecs
import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from llmexp.errors import WorkloadError
from llmexp.schema.accepted import explained
from llmexp.schema.section import Section

Line = TypeVar("Line", bound=Section)

_LONGEST_LINE_BYTES = 64 * 2**20
_SHOWN_CHARACTERS, _SHOWN_PATH = 60, 500


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, for the recipe. Raises WorkloadError if there is none."""
    file = _file(path)
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror})") from None


def lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 file, each with its end.

    Raises WorkloadError if there is no such file, or with the place of what is no text.
    """
    file = _file(path)
    try:
        with file.open("rb") as handle:
            number = 0
            while line := handle.readline(_LONGEST_LINE_BYTES + 1):
                number += 1
                if len(line) > _LONGEST_LINE_BYTES:
                    raise WorkloadError(f"{path}:{number}: a line of more than {_LONGEST_LINE_BYTES >> 20} MiB")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield _decoded(f"{path}:{number}", line)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror})") from None


def read_json_lines(path: str | Path, kind: type[Line], limit: int | None = None) -> Iterator[tuple[str, Line]]:
    """Every non-empty line as a `kind`, with its place (`file:line`).

    Raises WorkloadError for a line that is no JSON or does not fit.
    """
    found = 0
    for number, text in enumerate(lines(path), start=1):
        if found == limit:
            return
        if text.strip():
            place = f"{path}:{number}"
            yield place, parse(place, _from_json(place, text), kind)
            found += 1


def read_csv(path: str | Path, kind: type[Line], columns: dict[str, str], limit: int | None = None) -> Iterator[Line]:
    """Every row of a CSV file with a header as a `kind`, whose fields come from the named `columns`.

    Raises WorkloadError if a column is missing or a row does not fit.
    """
    rows = csv_rows(path)
    _, present = next(rows, ("", []))
    for column in columns.values():
        if column not in present:
            names = ", ".join(present) or "none"
            raise WorkloadError(f"{path}:1: no column {column!r}; the file has {shown(names)}")
    where = {field: present.index(column) for field, column in columns.items()}
    for found, (place, row) in enumerate(rows):
        if found == limit:
            return
        if len(row) != len(present):
            raise WorkloadError(f"{place}: the row has another number of fields than the header's {len(present)}")
        yield parse(place, {field: row[i] for field, i in where.items()}, kind, strict=False)


def csv_rows(path: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Every row of a CSV file that is not empty, with its place. Raises WorkloadError for what is no CSV."""
    reader = csv.reader(lines(path), strict=True)
    try:
        for row in reader:
            if row:
                yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def csv_columns(path: str | Path, at_least: int) -> list[str]:
    """The names in a CSV file's header. Raises WorkloadError if there are fewer than `at_least`."""
    _, names = next(csv_rows(path), ("", []))
    if len(names) < at_least:
        raise WorkloadError(f"{path}:1: {len(names)} columns; {at_least} are needed")
    return names


def read_json(path: str | Path) -> Any:
    """The content of a JSON file. Raises WorkloadError if it is none."""
    file = _file(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read ({error.strerror})") from None
    return _from_json(str(path), _decoded(str(path), content.removeprefix(codecs.BOM_UTF8)))


def parse(place: str, value: Any, kind: type[Line], strict: bool = True) -> Line:
    """`value` as a `kind`; not `strict`: numbers may be text, as in CSV.

    Raises WorkloadError that tells the place and the first misfit.
    """
    try:
        return kind.model_validate(value, strict=strict)
    except ValidationError as error:
        raise WorkloadError(f"{place}: {explained(error, kind, value)[0]}") from None


def shown(text: str) -> str:
    """The start of a text, fit for a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _from_json(place: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise WorkloadError(f"{place}: not JSON ({error}); got {shown(text.strip())!r}") from None


def _decoded(place: str, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise WorkloadError(f"{place}: the file is UTF-16; save it as UTF-8") from None
        byte = f"byte 0x{line[error.start]:02x} at {error.start}"
        raise WorkloadError(f"{place}: not UTF-8 ({byte} of the line); save the file as UTF-8") from None


def _file(path: str | Path) -> Path:
    file = Path(path).expanduser()
    try:
        present = file.is_file()  # a pipe or device might never end
    except (OSError, ValueError):  # a name too long, or with a NUL
        present = False
    if not present:
        raise WorkloadError(f"workload.path: no file {str(path)[:_SHOWN_PATH]!r}")
    return file
