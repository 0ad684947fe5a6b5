"""A calibration as a file: what an engine's steps cost, which engine that was, and how well the fit holds."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmexp.errors import ConfigError
from llmexp.schema.accepted import explained
from llmexp.simulate.cost import FrontEnd, StepCost, Work


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Residuals(_Record):
    """How far the fit is off for one kind of span (``llmexp.simulate.measured.device_spans``) or for launches: how many
    steps those have, their share of all time, the sum of errors over the sum of times (positive: the fit is too fast),
    and percentiles of each one's absolute relative error."""

    steps: int
    time_share: float
    bias: float
    error_p50: float
    error_p95: float


class CalibrationFile(_Record):
    """Seconds per unit of work (``llmexp.simulate.cost``), of one model on one device under one engine."""

    model: str
    gpu: str
    dtype: str
    tensor_parallel_size: int
    engine: str
    engine_version: str | None
    async_scheduling: bool
    block_size: int
    num_gpu_blocks: int
    max_num_batched_tokens: int | None
    cost: Mapping[str, Mapping[str, float]]
    prefill_launch_s: float = Field(ge=0, allow_inf_nan=False)
    front_end: Mapping[str, float]
    steps: int
    runs: tuple[str, ...]
    residuals: Mapping[str, Residuals]

    @model_validator(mode="after")
    def _known_terms(self) -> "CalibrationFile":
        try:
            assert self.step_cost and self.delays
        except TypeError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def step_cost(self) -> StepCost:
        parts = {part: Work(**terms) for part, terms in self.cost.items()}
        return StepCost(**parts, prefill_launch_s=self.prefill_launch_s)

    @property
    def delays(self) -> FrontEnd:
        return FrontEnd(**self.front_end)


def cost_as_mapping(cost: StepCost) -> dict[str, dict[str, float]]:
    """The coefficients that are not zero, by part and term."""
    parts = {"fixed": cost.fixed, "compute": cost.compute, "memory": cost.memory}
    return {
        part: {term: seconds for term, seconds in work._asdict().items() if seconds} for part, work in parts.items()
    }


def save(calibration: CalibrationFile, path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(calibration.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--output: got {str(path)!r}, which cannot be written ({error.strerror})") from None


def load(path: str | Path) -> CalibrationFile:
    """Reads a file that `llmexp calibrate` wrote. Raises ConfigError that says what is wrong with it."""
    try:
        content = json.loads(Path(path).read_bytes())
        return CalibrationFile.model_validate(content)
    except OSError as error:
        raise ConfigError(f"engine.calibration: got {str(path)!r}, which cannot be read ({error.strerror})") from None
    except ValidationError as error:
        wrong = explained(error, CalibrationFile, content)[0]
    except (ValueError, RecursionError) as error:
        wrong = f"not JSON: {error}"
    raise ConfigError(f"engine.calibration: got {str(path)!r}, which `llmexp calibrate` did not write ({wrong})")
