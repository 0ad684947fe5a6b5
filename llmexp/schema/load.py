"""Config of how a workload is offered (arrivals), sent (client) and held to account (SLO)."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from llmexp.schema.section import InFlight, Section

Rate = Annotated[float, Field(ge=1e-4, le=1e6)]


class ClosedLoop(Section):
    """A fixed number of requests in flight: the next is sent when one completes.

    Where the workload has conversations, a slot holds one conversation until its last turn, pauses included.
    """

    kind: Literal["closed_loop"] = "closed_loop"
    concurrency: InFlight = Field(default=16, description="requests in flight")


class OpenLoop(Section):
    """Arrivals that do not wait for answers. Latency counts from when a request was due."""

    max_in_flight: InFlight | None = Field(
        default=None,
        description="cap on requests in flight; a request that waits for it is counted as capped",
    )


class Constant(OpenLoop):
    """Evenly spaced arrivals."""

    kind: Literal["constant"] = "constant"
    rate: Rate = Field(default=4.0, description="requests per second")


class Poisson(OpenLoop):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate: Rate = Field(default=4.0, description="requests per second, on average")


class Gamma(OpenLoop):
    """Gaps from a gamma distribution: burstier than Poisson below burstiness 1, smoother above."""

    kind: Literal["gamma"] = "gamma"
    rate: Rate = Field(default=4.0, description="requests per second, on average")
    burstiness: PositiveFloat = Field(default=0.5, description="shape of the gaps' gamma distribution; 1 is Poisson")


class Ramp(OpenLoop):
    """Arrivals whose rate changes linearly from the first request to the last."""

    kind: Literal["ramp"] = "ramp"
    start_rate: Rate = Field(default=1.0, description="requests per second at the start")
    end_rate: Rate = Field(default=8.0, description="requests per second at the end")


class Trace(OpenLoop):
    """The workload's own arrival offsets."""

    kind: Literal["trace"] = "trace"
    speed: PositiveFloat = Field(default=1.0, description="2 replays the trace in half its time")


LoadConfig = Annotated[
    ClosedLoop | Constant | Poisson | Gamma | Ramp | Trace,
    Field(discriminator="kind"),
]


class ClientConfig(Section):
    """The load generator."""

    transport: Literal["lean", "openai"] = Field(
        default="lean",
        description="lean: our own streaming HTTP client; openai: the openai package, as a reference",
    )
    api: Literal["completions", "chat"] = Field(
        default="completions", description="/v1/completions or /v1/chat/completions"
    )
    prompt: Literal["ids", "text"] = Field(
        default="ids",
        description="send token ids, or the text that they come from; client.api=chat sends messages",
    )
    workers: Annotated[int, Field(gt=0, le=256)] | Literal["auto"] = Field(default=1, description="client processes")
    timeout_s: PositiveFloat = Field(default=600.0, description="longest time a request may take, from when it was due")
    lag_limit_ms: PositiveFloat | None = Field(
        None, description="p99 of the client's own lag that voids a round; null: 2 ms or 5% of the median TTFT"
    )
    ignore_eos: bool = Field(default=True, description="generate exactly the asked number of tokens")
    temperature: float = Field(default=0.0, ge=0, description="of sampling; 0 is greedy")
    seed: NonNegativeInt = Field(default=0, description="sampling seed sent to the engine")


class SloConfig(Section):
    """Service level objectives; goodput counts the requests that meet all that are set."""

    ttft_ms: PositiveFloat | None = Field(default=None, description="longest time to first token")
    tpot_ms: PositiveFloat | None = Field(
        default=None, description="longest mean time per output token after the first"
    )
    e2e_ms: PositiveFloat | None = Field(default=None, description="longest time from due to last token")
