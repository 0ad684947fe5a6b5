"""Config of how a workload is offered (arrivals), sent (client) and held to account (SLO)."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from llmexp.schema.section import Section


class ClosedLoop(Section):
    """A fixed number of requests in flight: the next is sent when one completes."""

    kind: Literal["closed_loop"] = "closed_loop"
    concurrency: PositiveInt = Field(16, description="requests in flight")


LoadConfig = ClosedLoop


class ClientConfig(Section):
    """The load generator."""

    transport: Literal["lean", "openai"] = "lean"
    api: Literal["completions", "chat"] = "completions"
    workers: PositiveInt | Literal["auto"] = Field(1, description="client processes")
    timeout_s: PositiveFloat = Field(600.0, description="longest time a request may take, from when it was due")
    ignore_eos: bool = Field(True, description="generate exactly the asked number of tokens")
    temperature: float = Field(0.0, ge=0)
    seed: NonNegativeInt = Field(0, description="sampling seed sent to the engine")


class SloConfig(Section):
    """Service level objectives; goodput counts the requests that meet all that are set."""

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None
    e2e_ms: PositiveFloat | None = None
