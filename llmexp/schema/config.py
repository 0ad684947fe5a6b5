"""The whole config of one run, and how YAML becomes it."""

import difflib
import json
from collections.abc import Iterator
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

from llmexp.errors import ConfigError
from llmexp.schema.engine import CacheConfig, EngineConfig, GpuConfig, KvConfig, ModelConfig, SchedulerConfig
from llmexp.schema.load import ClientConfig, LoadConfig, SloConfig
from llmexp.schema.section import FOLDER_NAME, Section
from llmexp.schema.study import StudyConfig
from llmexp.schema.workloads import WorkloadConfig


class WarmUpConfig(Section):
    """What is sent before the first round."""

    prompts: Literal["neutral", "workload"] = Field(
        default="neutral",
        description="neutral shares no block with the workload; workload replays it, which voids the run",
    )


class TrackingConfig(Section):
    """Where MLflow keeps the runs."""

    enabled: bool = True
    uri: str | None = Field(default=None, description="a tracking server; null: a SQLite store under `dir`")
    dir: str = Field(default="mlruns", description="folder of the SQLite store and its artifacts")
    experiment: str = Field(default="llmexp", min_length=1, description="MLflow experiment")


def _from_json(value: Any) -> Any:
    # A study hands a cell over as JSON, because its keys have dots and Hydra's grammar has no such keys.
    return json.loads(value) if isinstance(value, str) else value


class RunPlace(Section):
    """A run's place in its study; set by the study, not by hand."""

    name: str | None = Field(default=None, pattern=FOLDER_NAME, max_length=200)
    arm: str | None = None
    cell: Annotated[dict[str, str], BeforeValidator(_from_json)] = Field(default_factory=dict)
    trial: NonNegativeInt = 0
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
    max_num_seqs: PositiveInt = Field(description="most requests that the engine runs at once")
    rounds: PositiveInt = Field(description="replays of the workload in a run, each from an empty cache")
    reset_cache: bool = Field(default=True, description="empty the prefix cache before each round; false voids the run")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of workload, arrivals and engine")
    runs_dir: str = Field(default="runs", description="folder that receives studies and runs")
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
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explained(error, values))) from None


def _explained(error: ValidationError, values: Any) -> list[str]:
    """A line an error, plain keys first; a key that only passes on another's wrong value is left out."""
    found = sorted(error.errors(), key=lambda item: len(item["loc"]))
    lines: dict[tuple[str, str], str] = {}
    for item in found:
        lines.setdefault((repr(item["input"]), item["msg"]), _explain(item, values))
    return list(lines.values())


def _explain(error: Any, values: Any) -> str:
    location = list(error["loc"])
    # In a union the kind stands in the location as an element of its own, which users do not write.
    if len(location) > 2 and values[location[0]].get("kind") == location[1]:
        del location[1]
    key = ".".join(str(part) for part in location) or "config"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return f"{key}: no such key{nearest(key, list(keys()))}"
    accepted = (
        error["msg"]
        .replace("Input should be", "accepted is")
        .replace("a valid integer", "an integer")
        .replace("a valid ", "a ")
    )
    return f"{key}: got {error['input']!r}; {accepted}"


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
