"""Config of every workload: what is sent. One class per `workload.kind`; `WorkloadConfig` is their union."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from llmexp.schema.section import Section


class Uniform(Section):
    """Lengths that are all equally likely between two ends, both included."""

    distribution: Literal["uniform"]
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ends(self) -> "Uniform":
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}")
        return self


class LogNormal(Section):
    """Lengths whose logarithm is normal, truncated to [min, max]: the usual shape of chat traffic."""

    distribution: Literal["lognormal"]
    median: PositiveFloat
    sigma: PositiveFloat = Field(description="standard deviation of the logarithm")
    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _ends(self) -> "LogNormal":
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}")
        return self


Lengths = PositiveInt | Annotated[Uniform | LogNormal, Field(discriminator="distribution")]
Zipf = Annotated[NonNegativeFloat, Field(description="Zipf exponent of prefix popularity; 0: all alike")]
Seed = Annotated[NonNegativeInt, Field(description="everything random follows from it")]


class SharedPrefix(Section):
    """Prompts that share one of a few prefixes, each with its own suffix."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: PositiveInt = Field(16, description="requests in a round")
    num_prefixes: PositiveInt = Field(1, description="distinct shared prefixes")
    zipf: Zipf = 0.0
    prefix_tokens: PositiveInt = Field(512, description="length of each prefix")
    suffix_tokens: Lengths = Field(32, description="tokens after the prefix, different in every prompt")
    output_tokens: Lengths = Field(8, description="tokens to generate per request")
    order: Literal["shuffled", "grouped", "interleaved"] = Field(
        "shuffled", description="of the prefixes: at random, one after the other, or in turn"
    )
    reuse: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of prompt tokens that hits can serve; lengths stay, sharing adapts",
    )
    reuse_block_size: PositiveInt = Field(
        16, description="block size that `reuse` is reckoned in: the engine's"
    )
    seed: Seed = 0


class UniquePrefix(Section):
    """The length-matched control of shared_prefix: the same lengths, first block distinct between prompts."""

    kind: Literal["unique_prefix"] = "unique_prefix"
    num_requests: PositiveInt = Field(16, description="requests in a round")
    prefix_tokens: PositiveInt = Field(512, description="tokens that stand in place of the shared prefix")
    suffix_tokens: Lengths = Field(32, description="tokens after them")
    output_tokens: Lengths = Field(8, description="tokens to generate per request")
    seed: Seed = 0


WorkloadConfig = Annotated[SharedPrefix | UniquePrefix, Field(discriminator="kind")]
