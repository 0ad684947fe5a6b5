"""What is wrong with a value, in words: its key, what was got, and what the schema accepts there."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from llmexp.schema.section import Words
from llmexp.words import count, either

_SHOWN_CHARACTERS = 80
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ%]*)")
_SIZES = {"%": 0.01, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SIZES |= {f"{letter}{end}": 1024.0**power for power, letter in enumerate("kmgt", 1) for end in ("i", "ib")}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def explained(
    error: ValidationError,
    schema: type[BaseModel],
    values: Any,
    no_such_key: Callable[[str], str] = lambda key: "no such key",
) -> list[str]:
    """What is wrong with `values`, a line a key, plain keys first; `no_such_key` words a key that the schema lacks.

    A key that only passes on another's wrong value is left out, and so is a list for what is wrong within it.
    """
    said: dict[str, str] = {}
    for item in sorted(error.errors(include_url=False), key=lambda item: len(item["loc"])):
        place = _place(item, schema, values)
        unknown = item["type"] == "extra_forbidden"
        said.setdefault(place.key, no_such_key(place.key) if unknown else _what(item, place))
    first: dict[str, str] = {}
    for key, what in said.items():
        if not any(other.startswith((f"{key}.", f"{key}[")) for other in said):
            first.setdefault(what, key)
    return [what if not key or what.startswith(key) else f"{key}: {what}" for what, key in first.items()]


def accepted(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """What a type of the schema accepts, with its bounds: `an integer from 1 to 65536, or null`."""
    members = list(_members(kind, metadata))
    if {int, float} <= {member for member, _ in members}:
        members = [member for member in members if member[0] is not int]
    members.sort(key=lambda member: member[0] is NoneType)
    return ", or ".join(dict.fromkeys(_option(*member) for member in members))


@dataclass(frozen=True)
class _Place:
    """Where an error is: the key as users write it, what the schema has there with its bounds, and the value."""

    key: str
    kind: Any
    metadata: Sequence[Any]
    value: Any


def _place(error: Any, schema: type[BaseModel], values: Any) -> _Place:
    """Follows an error's path, past the members of unions that pydantic tried, which users do not write."""
    place = _Place("", schema, (), values)
    for i, part in enumerate(error["loc"]):
        at = place.value
        if part == "[key]" and i and error["type"] != "extra_forbidden":  # pydantic's word for a mapping's key
            return _Place(place.key, get_args(place.kind)[0], (), error["loc"][i - 1])
        inside = part in at if isinstance(at, Mapping) else isinstance(at, list | tuple) and isinstance(part, int)
        if inside or (error["type"] == "missing" and i == len(error["loc"]) - 1):
            key = f"{place.key}[{part}]" if isinstance(part, int) else f"{place.key}.{part}".removeprefix(".")
            place = _Place(key, *_within(place, part), at[part] if inside else None)
    if error["type"].startswith("union_tag") and isinstance(place.value, Mapping):
        tags = [tag for member, _ in _members(place.kind, ()) for tag in _tags(member).items()]
        name = tags[0][0]
        return _Place(f"{place.key}.{name}", Literal[tuple(value for _, value in tags)], (), place.value.get(name))
    return place


def _within(place: _Place, part: Any) -> tuple[Any, Sequence[Any]]:
    """The type, with its bounds, of a field, an entry or an element."""
    for member, _ in _members(place.kind, ()):
        if _is_section(member):
            if part in member.model_fields and all(place.value.get(name, v) == v for name, v in _tags(member).items()):
                return member.model_fields[part].annotation, member.model_fields[part].metadata
        elif (origin := get_origin(member)) is not None and origin is not Literal:
            return get_args(member)[-1 if issubclass(origin, Mapping) else 0], ()
    return Any, ()


def _members(kind: Any, metadata: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The types of a union, or the one that it is, each with what is stated of it."""
    if get_origin(kind) is Annotated:
        inner, *stated = get_args(kind)
        flat = [one for each in stated for one in (each.metadata if isinstance(each, FieldInfo) else [each])]
        yield from _members(inner, (*metadata, *flat))
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member, metadata)
    else:
        yield kind, metadata


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _tags(kind: Any) -> dict[str, Any]:
    """By which values of which fields a section is told from the others of its union."""
    fields = kind.model_fields if _is_section(kind) else {}
    literals = {name: get_args(f.annotation) for name, f in fields.items() if get_origin(f.annotation) is Literal}
    return {name: values[0] for name, values in literals.items() if len(values) == 1}


def _what(error: Any, place: _Place) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    accepts = f"accepted is {accepted(place.kind, place.metadata)}"
    if error["type"] == "missing":
        return f"it needs to be set; {accepts}"
    return f"got {_shown(place.value)}; {accepts}{_written_out(place)}"


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"


def _written_out(place: _Place) -> str:
    """A hint for a number with a unit or an exponent, such as 4GiB, 5%, 200ms or 1e6, where it would be accepted."""
    number = place.value if isinstance(place.value, float) else None
    if isinstance(place.value, str) and (found := _NUMBER.fullmatch(place.value.strip())):
        factor = _units(place.key).get(found[2].lower(), 1.0 if not found[2] else None)
        number = None if factor is None else float(found[1]) * factor
    if number is None:
        return ""
    there: Any = Annotated[place.kind, *place.metadata] if place.metadata else place.kind
    taken: TypeAdapter[Any] = TypeAdapter(there)
    for candidate in ([int(number)] if number.is_integer() else []) + [number]:
        try:
            taken.validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return f"; did you mean {candidate:.15g}?"
    return ""


def _units(key: str) -> Mapping[str, float]:
    if key.endswith("_ms"):
        return {unit: 1e3 * seconds for unit, seconds in _SECONDS.items()}
    return _SECONDS if key.endswith("_s") and not key.endswith("_per_s") else _SIZES


def _option(kind: Any, metadata: Sequence[Any]) -> str:
    """What one type accepts."""
    if kind is NoneType:
        return "null"
    if kind in (int, float):
        return _number(kind, metadata)
    if kind is str:
        return _text(metadata)
    if kind is bool:
        return "true or false"
    if kind is Path:
        return "a path"
    if kind is datetime:
        return "a date and time"
    if get_origin(kind) is Literal:
        return either(get_args(kind))
    if _is_section(kind):
        tags = _tags(kind)
        return "{" + ", ".join(f"{name}: {tags[name]}" if name in tags else name for name in kind.model_fields) + "}"
    origin = get_origin(kind)
    if origin is None:
        return "any value"
    size = _size(metadata, "entry" if issubclass(origin, Mapping) else "element")
    if issubclass(origin, Mapping):
        return f"a mapping{size}, NAME: VALUE, each value {accepted(get_args(kind)[-1])}"
    return f"a list{size}, each {accepted(get_args(kind)[0])}"


def _stated(metadata: Sequence[Any], *names: str) -> Iterator[tuple[str, Any]]:
    for each in metadata:
        for name in names:
            if (value := getattr(each, name, None)) is not None:
                yield name, value


def _number(kind: type, metadata: Sequence[Any]) -> str:
    lows = [(value, name == "gt") for name, value in _stated(metadata, "gt", "ge")]
    highs = [(value, name == "le") for name, value in _stated(metadata, "lt", "le")]
    if kind is int:
        lows = [(value + beyond, False) for value, beyond in lows]
        highs = [(value - (not included), True) for value, included in highs]
    noun = "an integer" if kind is int else "a number"
    low, beyond = max(lows, default=(None, False))
    high, included = min(highs, default=(None, True))
    if low is not None and high is not None and not beyond and included:
        return f"{noun} from {_digits(low)} to {_digits(high)}"
    bounds = [] if low is None else [f"above {_digits(low)}" if beyond else f"of at least {_digits(low)}"]
    bounds += [] if high is None else [f"at most {_digits(high)}" if included else f"below {_digits(high)}"]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _text(metadata: Sequence[Any]) -> str:
    size = _size(metadata, "character")
    words = next((each.said for each in metadata if isinstance(each, Words)), None)
    return f"text{size}" if words is None else f"{words}{size and ','}{size}"


def _size(metadata: Sequence[Any], noun: str) -> str:
    words = {"min_length": "at least", "max_length": "at most"}
    bounds = [f"{words[name]} {count(value, noun)}" for name, value in _stated(metadata, *words)]
    return f" of {' and '.join(bounds)}" if bounds else ""
