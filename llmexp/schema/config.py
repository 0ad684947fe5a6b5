"""The whole config of one run, and how YAML becomes it."""

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

from llmexp import secrets
from llmexp.errors import ConfigError
from llmexp.schema.accepted import explained
from llmexp.schema.engine import CacheConfig, EngineConfig, GpuConfig, KvConfig, ModelConfig, SchedulerConfig
from llmexp.schema.load import ClientConfig, LoadConfig, SloConfig
from llmexp.schema.section import FolderName, InFlight, Section, Words
from llmexp.schema.simulation import SimulationConfig
from llmexp.schema.study import StudyConfig
from llmexp.schema.workloads import WorkloadConfig
from llmexp.words import either, nearest


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
    uri: Annotated[str, Field(pattern=STORE), Words("http://HOST:PORT or the URL of a database")] | None = Field(
        default=None,
        description="http://HOST:PORT of a tracking server, or a database; null: a SQLite store under `dir`",
    )
    dir: str = Field(default="mlruns", min_length=1, description="folder of the SQLite store and its artifacts")
    experiment: str = Field(default="llmexp", min_length=1, description="MLflow experiment")


def _from_json(value: Any) -> Any:
    # A study hands a cell over as JSON, because its keys have dots and Hydra's grammar has no such keys.
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value  # no mapping, which is refused as such


class RunPlace(Section):
    """A run's place in its study; set by the study, not by hand."""

    name: FolderName | None = Field(default=None, max_length=200, description="its folder in the study's")
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

    @model_validator(mode="after")
    def _a_token_for_each(self) -> "Config":
        budget = self.scheduler.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs and self.engine.kind != "endpoint":
            raise ValueError(
                f"scheduler.max_num_batched_tokens: got {budget}; accepted is max_num_seqs={self.max_num_seqs} or more"
            )
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
    if (named := secrets.named_in(values)) is not None:
        raise ConfigError(no_secret(named))
    if reason := secrets.held_in(values):
        raise ConfigError(reason)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explained(error, Config, values, no_such_key))) from None


def no_such_key(key: str) -> str:
    """What to say of a key that is not there: which kind of its group has it, or what it was meant to be."""
    group = key.partition(".")[0]
    if key in Config.model_fields:
        return f"it takes the name of a file, as in {key}=NAME; its keys are set one by one, as in {key}.KEY=VALUE"
    owners = [kind for kind, section in _kinds(group) if key in keys(section, f"{group}.")]
    if owners:
        return f"no key of this {group}; it is one of the kind {either(owners)}"
    return f"no such key{nearest(key, keys())}"


def no_secret(key: str) -> str:
    """What to say of a key that is named like a secret, without its value: no key of ours is one, only those that a
    user may add."""
    if key.startswith(_OPEN):
        return f"{key}: {secrets.KEPT}; export it as a variable of the environment, which the engine inherits"
    return f"{key}: {no_such_key(key)} (its value is not shown; a secret is exported, not given by a key)"


_OPEN = ("engine.args.", "engine.env.", "hydra.")


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
