"""`llmexp --help`: every group and every key, with type, default and meaning, drawn from conf/ and the schema."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich import box
from rich.console import Console
from rich.table import Table

from llmexp.compose import conf_dir
from llmexp.schema.config import Config
from llmexp.schema.section import Section

_USAGE = """\
[bold]llmexp[/]: controlled experiments on LLM serving

  python -m llmexp KEY=VALUE …               one run
  python -m llmexp -m KEY=A,B …              a study of all combinations, arms paired
  python -m llmexp -m experiment=NAME        a study that a file of conf/experiment describes
  python -m llmexp audit workload=NAME …     what caching can do for a workload; sends nothing
  python -m llmexp report FOLDER             the report of a study again
  python -m llmexp --cfg job KEY=VALUE …     the config that a run would have
"""


def print_help() -> None:
    """Writes the help to standard output."""
    console = Console(width=100)
    console.print(_USAGE, highlight=False)
    groups = Table(title="Groups: NAME=VALUE", title_justify="left", box=box.SIMPLE_HEAD)
    groups.add_column("group", style="bold")
    groups.add_column("values")
    for folder in sorted(path for path in conf_dir().iterdir() if path.is_dir()):
        groups.add_row(folder.name, " ".join(sorted(file.stem for file in folder.glob("*.yaml"))))
    console.print(groups)
    keys = Table(title="Keys: KEY=VALUE", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("key", "default", "meaning"):
        keys.add_column(column, style="bold" if column == "key" else "", no_wrap=column == "key")
    for key, default, meaning in _rows(Config, ""):
        keys.add_row(key, default, meaning)
    console.print(keys)


def _rows(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        kinds = _sections(field.annotation)
        for kind in kinds:
            label = kind.model_fields["kind"].default if "kind" in kind.model_fields else None
            yield f"\n{key}" + (f" ({label})" if label else ""), "", f"\n{_first_line(kind)}"
            yield from _rows(kind, f"{key}.")
        if not kinds and name != "kind":
            yield key, _default(field), field.description or ""


def _sections(annotation: Any) -> list[type[Section]]:
    parts = [annotation, *(part for part in get_args(annotation))]
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def _first_line(kind: type[Section]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
