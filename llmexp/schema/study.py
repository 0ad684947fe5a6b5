"""Config of a study: what is compared, how often, and what is claimed."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from llmexp.schema.section import FolderName, Section, Words


def _swept_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f'YAML read this as the boolean {str(value).lower()}; quote it, such as "on", "off" or "true"')
    return str(value) if isinstance(value, int | float) else value


SweptValue = Annotated[str, BeforeValidator(_swept_value), Words("text or a number")]  # as written on the command line


class Claim(Section):
    """A hypothesis stated before the runs: in every cell that it covers, an effect lies beyond a threshold.

    The effect is the ratio to the baseline, or the difference from it for measures that may be 0
    (`llmexp.analyze.compare.scale_of` says which).
    """

    measure: str = Field(description="name of a reported measure, such as throughput_req_per_s")
    direction: Literal["higher", "lower", "equivalent"] = Field(
        description="higher or lower than the threshold, or equivalent to the baseline within study.margin"
    )
    threshold: float | None = Field(
        None, description="ratio to the baseline (default 1), or difference from it (default 0)"
    )
    cell: Mapping[str, SweptValue] = Field(
        default_factory=dict, description="swept keys and values that it is limited to; none: everywhere"
    )

    @model_validator(mode="after")
    def _margin_is_the_studys(self) -> Self:
        if self.direction == "equivalent" and self.threshold is not None:
            raise ValueError("direction=equivalent takes no threshold; set study.margin")
        return self


class StudyConfig(Section):
    """All runs that answer one question."""

    name: FolderName | None = Field(
        None,
        max_length=100,
        description="name of the study and of its folder, by which it is resumed; null: the time of its start",
    )
    trials: PositiveInt = Field(
        1, le=1000, description="independent engine launches per arm and cell; intervals need 3"
    )
    compare: str | None = Field(
        None, description="swept key whose values are the arms; default: cache if swept, else the first"
    )
    baseline: SweptValue | None = Field(
        None,
        description="arm that the others are compared with; default: off if it is an arm, else the first",
    )
    margin: float = Field(0.05, gt=0, lt=1, description="relative change too small to matter")
    confidence: float = Field(0.90, ge=0.5, lt=1, description="confidence of every interval")
    claims: tuple[Claim, ...] = Field((), strict=False, description="hypotheses that the report answers one by one")
    cells: tuple[Mapping[str, SweptValue], ...] = Field(
        (), strict=False, description="explicit cells, where they are not the product of the swept keys"
    )
    search: Literal["floor", "saturation"] | None = Field(
        None,
        description="instead of given values of `search_key`, bisect for the smallest that starts, or for where "
        "throughput stops rising or the SLO breaks",
    )
    search_key: str | None = Field(None, description="key that a search varies")
    search_low: int | float = Field(1, gt=0, description="smallest value tried; integers stay integers")
    search_high: int | float = Field(1024, gt=0, description="largest value tried")
    search_resolution: float = Field(0.1, gt=0, lt=1, description="share of itself within which it is found")
    plan_only: bool = Field(False, description="print the plan with its expected time and run nothing")

    @model_validator(mode="after")
    def _search_is_whole(self) -> Self:
        if self.search and self.search_key is None:
            raise ValueError(f"study.search={self.search} needs study.search_key, the key to vary")
        if self.search_low >= self.search_high:
            raise ValueError(f"study.search_low={self.search_low} must be below study.search_high={self.search_high}")
        return self
