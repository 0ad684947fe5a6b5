"""The whole config of one run, and how YAML becomes it."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from llmexp import secrets
from llmexp.errors import ConfigError
from llmexp.schema.engine import CacheConfig, EngineConfig, GpuConfig, KvConfig, ModelConfig, SchedulerConfig
from llmexp.schema.load import ClientConfig, LoadConfig, SloConfig
from llmexp.schema.section import FOLDER_NAME, InFlight, Section
from llmexp.schema.simulation import SimulationConfig
from llmexp.schema.study import StudyConfig
from llmexp.schema.workloads import WorkloadConfig


class WarmUpConfig(Section):
    """What is sent before the first round."""

    prompts: Literal["neutral", "workload"] = Field(
        default="neutral",
        description="neutral shares no block with the workload; workload replays it, which voids the run",
    )


# To MLflow 3.13 folders of files are no store any more.
STORE = r"^(https?|sqlite|postgresql|mysql|mssql)(\+\w+)?://\S+$|^databricks(://\S+)?$"


class TrackingConfig(Section):
    """Where MLflow keeps the runs."""

    enabled: bool = Field(default=True, description="false: no MLflow; the run's folder holds everything all the same")
    uri: str | None = Field(
        default=None,
        pattern=STORE,
        description="http://HOST:PORT of a tracking server, or a database; null: a SQLite store under `dir`",
    )
    dir: str = Field(default="mlruns", min_length=1, description="folder of the SQLite store and its artifacts")
    experiment: str = Field(default="llmexp", min_length=1, description="MLflow experiment")


def _from_json(value: Any) -> Any:
    # A study hands a cell over as JSON, because its keys have dots and Hydra's grammar has no such keys.
    return json.loads(value) if isinstance(value, str) else value


class RunPlace(Section):
    """A run's place in its study; set by the study, not by hand."""

    name: str | None = Field(default=None, pattern=FOLDER_NAME, max_length=200, description="its folder in the study's")
    arm: str | None = Field(default=None, description="value of the key under comparison")
    cell: Annotated[dict[str, str], BeforeValidator(_from_json)] = Field(
        default_factory=dict, description="values of the other swept keys"
    )
    trial: NonNegativeInt = Field(default=0, description="number of the launch")
    position: NonNegativeInt = Field(default=0, description="place in the order of execution")
    planned: str | None = Field(default=None, description="hash of config, workload and model as planned")
    parent_run_id: str | None = Field(default=None, description="the study's MLflow run")


class Config(Section):
    """Everything that determines one run."""

    model: ModelConfig
    gpu: GpuConfig
    kv: KvConfig
    cache: CacheConfig
    workload: WorkloadConfig
    load: LoadConfig
    engine: EngineConfig
    scheduler: SchedulerConfig
    client: ClientConfig
    slo: SloConfig
    warm_up: WarmUpConfig
    study: StudyConfig
    tracking: TrackingConfig
    run: RunPlace
    simulation: SimulationConfig | None = Field(
        default=None, discriminator="kind", description="a study of the simulator in place of a run; null: a run"
    )
    max_num_seqs: InFlight = Field(description="most requests that the engine runs at once")
    rounds: PositiveInt = Field(le=100_000, description="replays of the workload in a run, each from an empty cache")
    reset_cache: bool = Field(default=True, description="empty the prefix cache before each round; false voids the run")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of workload, arrivals and engine")
    runs_dir: str = Field(default="runs", min_length=1, description="folder that receives studies and runs")
    arm: str | None = Field(default=None, description="free label, to compare runs that are otherwise equal")

    @model_validator(mode="after")
    def _one_kv_budget(self) -> "Config":
        budgets = ("gpu_memory_utilization", "cache_memory_bytes", "num_blocks")
        given = [f"kv.{name}={getattr(self.kv, name)}" for name in budgets if getattr(self.kv, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: set one KV budget at most")
        return self


# Sections without a group of files: their defaults come from the schema alone.
_SECTIONS: dict[str, type[Section]] = {
    "scheduler": SchedulerConfig,
    "client": ClientConfig,
    "slo": SloConfig,
    "warm_up": WarmUpConfig,
    "study": StudyConfig,
    "run": RunPlace,
}


def register_defaults() -> None:
    """Makes the sections that have no files known to Hydra, under the name that conf/config.yaml uses."""
    from hydra.core.config_store import ConfigStore

    defaults = {name: section().model_dump(mode="json") for name, section in _SECTIONS.items()}
    ConfigStore.instance().store(name="sections", node=OmegaConf.create(defaults))


def validate(composed: DictConfig) -> Config:
    """Checks a composed config against the schema.

    Raises ConfigError that names each wrong key, its value and what is accepted.
    """
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        values: Any = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or ""
        raise ConfigError(f"{key}: this choice of {key.partition('.')[0]} needs it set") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from None
    if reason := secrets.in_settings(values):
        raise ConfigError(reason)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explained(error, values))) from None


_WORDED = ("value_error", "extra_forbidden", "missing")  # kinds of errors that name no accepted value
_SHOWN_CHARACTERS = 80
_UNITS = {"%": 0.01, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {f"{letter}{end}": 1024.0**power for power, letter in enumerate("kmgt", 1) for end in ("i", "ib")}


def _explained(error: ValidationError, values: Any) -> list[str]:
    """A line a key, plain keys first; a key that only passes on another's wrong value is left out."""
    first: dict[tuple[str, str], str] = {}
    lines: dict[str, str] = {}
    for item in sorted(error.errors(), key=lambda item: len(item["loc"])):
        key = _key(item, values)
        if first.setdefault((repr(item["input"]), item["msg"]), key) != key:
            continue
        if key in lines and item["type"] not in _WORDED:  # what another member of a union accepts
            lines[key] += f", or {_accepted(item)}"
        else:
            lines.setdefault(key, _line(key, item))
    return list(lines.values())


def _key(error: Any, values: Any) -> str:
    """The dotted key of an error, without the names of a union's members, which users do not write."""
    parts = []
    for i, part in enumerate(error["loc"]):
        inside = part in values if isinstance(values, Mapping) else isinstance(values, list) and isinstance(part, int)
        if inside:
            values = values[part]
        if inside or (error["type"] == "missing" and i == len(error["loc"]) - 1):
            parts.append(str(part))
    return ".".join(parts) or "config"


def _line(key: str, error: Any) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return f"{key}: {no_such_key(key)}"
    if error["type"] == "missing":
        return f"{key}: it needs to be set"
    got = repr(error["input"])
    if len(got) > _SHOWN_CHARACTERS:
        got = f"{got[:_SHOWN_CHARACTERS]}… ({len(got)} characters)"
    return f"{key}: got {got}; accepted is {_accepted(error)}{_without_unit(error)}"


def _accepted(error: Any) -> str:
    text = str(error["msg"]).removeprefix("Input should be ").partition(", unable to parse")[0]
    text = text.replace("String should have", "text of").replace("String should match pattern", "text of the pattern")
    return (
        text.replace("a valid integer", "an integer")
        .replace("a valid tuple", "a list, such as [8,16]")
        .replace("a valid ", "a ")
    )


def _without_unit(error: Any) -> str:
    """A hint for a number with a unit, such as 1k, 4GiB or 5%."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z%]+)", str(error["input"]))
    if not found or not error["type"].startswith(("int_", "float_")) or found[2].lower() not in _UNITS:
        return ""
    return f", written out: {float(found[1]) * _UNITS[found[2].lower()]:.15g}"


def no_such_key(key: str) -> str:
    """What to say of a key that is not there: which kind of its group has it, or what it was meant to be."""
    group = key.partition(".")[0]
    if key in Config.model_fields:
        return f"it takes the name of a file, as in {key}=NAME; its keys are set one by one, as in {key}.KEY=VALUE"
    owners = [kind for kind, section in _kinds(group) if key in keys(section, f"{group}.")]
    if owners:
        return f"no key of this {group}; it is one of the kind {' or '.join(owners)}"
    return f"no such key{nearest(key, list(keys()))}"


def _kinds(group: str) -> Iterator[tuple[str, type[Section]]]:
    """The members of a group that is a union, by their kind."""
    field = Config.model_fields.get(group)
    for kind in get_args(field.annotation) if field else ():
        if isinstance(kind, type) and issubclass(kind, Section) and "kind" in kind.model_fields:
            yield str(kind.model_fields["kind"].default), kind


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the config in dotted form, those of all kinds of a union included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in {field.annotation, *get_args(field.annotation)}:
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from keys(kind, f"{prefix}{name}.")


def nearest(value: str, options: list[str]) -> str:
    """`; did you mean …?` for a mistyped option, or nothing where none is near."""
    near = difflib.get_close_matches(value, sorted(set(options)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
