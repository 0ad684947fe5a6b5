"""Config of every workload: what is sent. One class per `workload.kind`; `Workload` is their union."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from llmexp.schema.section import Section


class SharedPrefix(Section):
    """Prompts that share one of a few prefixes, each with its own suffix."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: PositiveInt = Field(16, description="requests in a round")
    num_prefixes: PositiveInt = Field(1, description="distinct shared prefixes")
    prefix_tokens: PositiveInt = Field(512, description="length of each prefix")
    suffix_tokens: PositiveInt = Field(32, description="tokens after the prefix, different in every prompt")
    output_tokens: PositiveInt = Field(8, description="tokens to generate per request")
    seed: NonNegativeInt = 0


class UniquePrefix(Section):
    """The length-matched control of shared_prefix: the same lengths, first block distinct between prompts."""

    kind: Literal["unique_prefix"] = "unique_prefix"
    num_requests: PositiveInt = Field(16, description="requests in a round")
    prefix_tokens: PositiveInt = Field(512, description="tokens that stand in place of the shared prefix")
    suffix_tokens: PositiveInt = Field(32, description="tokens after them")
    output_tokens: PositiveInt = Field(8, description="tokens to generate per request")
    seed: NonNegativeInt = 0


WorkloadConfig = Annotated[SharedPrefix | UniquePrefix, Field(discriminator="kind")]
