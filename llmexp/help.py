"""`llmexp --help`: every group and every key, with type, default and meaning, drawn from conf/ and the schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmexp.compose import conf_dir
from llmexp.schema.config import Config
from llmexp.schema.section import Section

WIDTH = 100

_USAGE = """\
[bold]llmexp[/]: controlled experiments on LLM serving

  python -m llmexp KEY=VALUE …               one run, such as cache=off max_num_seqs=4
  python -m llmexp -m KEY=A,B …              a study of all combinations, arms paired
  python -m llmexp -m experiment=NAME        a study that a file of conf/experiment describes
  python -m llmexp experiment=NAME …         a study of the simulator, such as paged_memory; no -m
  python -m llmexp audit workload=NAME …     what caching can do for a workload; sends nothing
  python -m llmexp record workload=NAME …    an engine's answers, to replay conversations with
  python -m llmexp calibrate RUN_FOLDER …    what recorded engine steps cost, for engine=simulator
  python -m llmexp report FOLDER             the report of a study again
  python -m llmexp log FOLDER                tell MLflow of a study or run that it has missed
  python -m llmexp doctor                    whether this machine can make runs, and what is left
  python -m llmexp --cfg job KEY=VALUE …     the config that a run would have

[bold]Exit codes[/]: 0 all is well; 1 something failed while it ran; 2 wrong input, before anything
starts; 3 a single run was measured, but is not valid; 130 Ctrl-C; 143 SIGTERM
"""


# What is turned most often, first.
_FIRST = ("max_num_seqs", "rounds", "seed", "reset_cache", "workload", "load", "cache", "kv", "model", "gpu", "engine")


def print_help() -> None:
    """Writes the help to standard output."""
    console = Console(width=WIDTH)
    console.print(_USAGE, highlight=False)
    base = OmegaConf.load(conf_dir() / "config.yaml")
    chosen = dict(item for each in base.defaults if isinstance(each, DictConfig) for item in each.items())
    console.print("[bold]Groups[/]: NAME=VALUE, the default in brackets\n", highlight=False)
    groups = Table.grid(padding=(0, 2))
    for folder in sorted(path for path in conf_dir().iterdir() if path.is_dir()):
        values = sorted(file.stem for file in folder.glob("*.yaml"))
        groups.add_row(
            f"  {folder.name}",
            Text(" ".join(f"[{value}]" if value == chosen.get(folder.name) else value for value in values)),
        )
    console.print(groups)
    console.print(
        "\n[bold]Keys[/]: KEY=VALUE, with the default and the meaning. A group's file may set another default; "
        "--cfg job shows it.",
        highlight=False,
    )
    plain = _Keys("", "The whole run.", [])
    sections = [plain, *_sections_of(Config, "", plain.rows, base)]
    sections.sort(key=lambda each: _FIRST.index(each.name) if each.name in _FIRST else len(_FIRST))
    for each in [plain, *(each for each in sections if each is not plain)]:
        console.print()
        if each.name:
            console.print(Text.assemble((each.title, "bold"), f": {each.meaning}"))
        keys = Table.grid(padding=(0, 2))
        keys.add_column(no_wrap=True, min_width=36)
        keys.add_column(overflow="fold", min_width=12, max_width=14)
        keys.add_column()
        for row in each.rows:
            keys.add_row(*(Text(text) for text in row))
        console.print(keys)


@dataclass(frozen=True)
class _Keys:
    """The keys of a section: rows of key, default and meaning."""

    name: str
    meaning: str
    rows: list[tuple[str, str, str]]
    kind: str | None = None

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})" if self.kind else self.name


def _sections_of(section: type[BaseModel], prefix: str, rows: list[tuple[str, str, str]], base: Any) -> Iterator[_Keys]:
    """Puts the section's own keys into `rows`; yields the sections in it, one for each kind of a union."""
    for name, field in section.model_fields.items():
        kinds = _kinds(field.annotation)
        for kind in kinds:
            label = kind.model_fields["kind"].default if "kind" in kind.model_fields else None
            inner = _Keys(f"{prefix}{name}", _first_sentence(kind), [], label)
            yield inner
            yield from _sections_of(kind, f"{prefix}{name}.", inner.rows, {})
        if not kinds and name != "kind":
            default = base[name] if name in base else field.get_default(call_default_factory=True, validated_data={})
            rows.append((f"  {prefix}{name}", _shown(default), _meaning(field)))


def _kinds(annotation: Any) -> list[type[Section]]:
    parts = [annotation, *get_args(annotation)]
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]


def _first_sentence(kind: type[Section]) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def _meaning(field: FieldInfo) -> str:
    """The description, and the values where there is a choice of a few."""
    literal = next((part for part in _parts(field.annotation) if get_origin(part) is Literal), None)
    choices = " | ".join(map(str, get_args(literal))) if literal else ""
    said = field.description or ""
    return f"{said} [{choices}]" if said and choices else said or choices


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _parts(part)


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "-"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
