"""Config of every workload: what is sent. One class per `workload.kind`; `WorkloadConfig` is their union."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    Tag,
    model_validator,
)

from llmexp.schema.section import MOST_REQUESTS, Requests, Section, Tokens


class Uniform(Section):
    """Lengths that are all equally likely between two ends, both included."""

    distribution: Literal["uniform"]
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _ends(self) -> "Uniform":
        if self.min > self.max:
            raise ValueError(f"lengths from min={self.min} to max={self.max}: the one is above the other")
        return self


class LogNormal(Section):
    """Lengths whose logarithm is normal, truncated to [min, max]: the usual shape of chat traffic."""

    distribution: Literal["lognormal"]
    median: PositiveFloat
    sigma: PositiveFloat = Field(description="standard deviation of the logarithm")
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _ends(self) -> "LogNormal":
        if self.min > self.max:
            raise ValueError(f"lengths from min={self.min} to max={self.max}: the one is above the other")
        return self


def _shape(lengths: Any) -> Any:
    if isinstance(lengths, Mapping):
        return lengths.get("distribution")
    return getattr(lengths, "distribution", "fixed")


Lengths = Annotated[
    Annotated[Tokens, Tag("fixed")] | Annotated[Uniform, Tag("uniform")] | Annotated[LogNormal, Tag("lognormal")],
    Discriminator(_shape),
]
Zipf = Annotated[NonNegativeFloat, Field(description="Zipf exponent of prefix popularity; 0: all alike")]
Reuse = Annotated[
    float | None,
    Field(ge=0, lt=1, description="share of prompt tokens that hits can serve; lengths stay, sharing adapts"),
]
Seed = Annotated[int, Field(ge=0, lt=2**32, description="everything random follows from it")]


class SharedPrefix(Section):
    """Prompts that share one of a few prefixes, each with its own suffix."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: Requests = Field(16, description="requests in a round")
    num_prefixes: Requests = Field(1, description="distinct shared prefixes")
    zipf: Zipf = 0.0
    prefix_tokens: Tokens = Field(512, description="length of each prefix")
    suffix_tokens: Lengths = Field(32, description="tokens after the prefix, different in every prompt")
    output_tokens: Lengths = Field(8, description="tokens to generate per request")
    order: Literal["shuffled", "grouped", "interleaved"] = Field(
        "shuffled", description="of the prefixes: at random, one after the other, or in turn"
    )
    reuse: Reuse = None
    reuse_block_size: Tokens = Field(16, description="block size that `reuse` is reckoned in; conf/: the engine's")
    seed: Seed = 0


class UniquePrefix(Section):
    """The length-matched control of shared_prefix: the same lengths, first block distinct between prompts."""

    kind: Literal["unique_prefix"] = "unique_prefix"
    num_requests: Requests = Field(16, description="requests in a round")
    prefix_tokens: Tokens = Field(512, description="tokens that stand in place of the shared prefix")
    suffix_tokens: Lengths = Field(32, description="tokens after them")
    output_tokens: Lengths = Field(8, description="tokens to generate per request")
    seed: Seed = 0


class Custom(Section):
    """Your own requests, from JSON Lines or from a workload that llmexp saved as Parquet.

    A line is an object with one of `prompt` (text), `token_ids` or `messages` (chat), and optionally
    `output_tokens`, `arrival_s` (on every line or on none), `priority`, `deadline_s`, `conversation` and
    `think_s`.
    """

    kind: Literal["custom"] = "custom"
    path: str = Field(description="a .jsonl file, or a .parquet file of a saved workload")
    output_tokens: Tokens = Field(128, description="where a line does not say")
    order: Literal["file", "shuffled"] = Field("file", description="shuffled cannot go with arrivals")
    limit: Requests | None = Field(None, description="keep only the first requests of the file")
    seed: Seed = 0


class _Trace(Section):
    path: str = Field(description="the trace file")
    speed: PositiveFloat = Field(1.0, ge=1e-6, le=1e6, description="2 makes all gaps between arrivals half as long")
    limit: Requests | None = Field(None, description="keep only the first requests")
    scale_lengths: PositiveFloat = Field(1.0, le=1000, description="factor on all lengths, for small machines")
    seed: Seed = 0


class Mooncake(_Trace):
    """A trace with block hashes: JSON Lines of timestamp (ms), input_length, output_length, hash_ids.

    Equal ids become equal tokens, so prefixes are shared as they were in production.
    """

    kind: Literal["mooncake"] = "mooncake"
    block_tokens: Tokens = Field(512, ge=2, description="tokens that one hash id stands for in the trace")


class Azure(_Trace):
    """A trace of arrivals and lengths, nothing shared: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

    kind: Literal["azure"] = "azure"


class _Dataset(Section):
    path: str = Field(description="CSV of token lengths, or the data set's original JSON")
    content: Literal["random", "text"] = Field(
        "random", description="random tokens of the data set's lengths, or (JSON only) its texts"
    )
    prompt_column: str | None = Field(None, description="CSV column of prompt lengths; null: the first")
    output_column: str | None = Field(None, description="CSV column of output lengths; null: the second")
    num_requests: Requests | None = Field(256, description="requests in a round, sampled; null: all")
    min_tokens: Tokens = Field(4, description="leave out rows with a shorter prompt or answer")
    max_prompt_tokens: Tokens | None = Field(1024, description="leave out rows with a longer prompt")
    max_total_tokens: Tokens | None = Field(2048, description="leave out rows longer in sum")
    seed: Seed = 0


class ShareGpt(_Dataset):
    """First turns of ShareGPT conversations and the lengths of their answers."""

    kind: Literal["sharegpt"] = "sharegpt"


class Alpaca(_Dataset):
    """Alpaca's instructions in their template, and the lengths of their answers."""

    kind: Literal["alpaca"] = "alpaca"


class TrafficClass(Section):
    """One kind of request in a mix."""

    weight: PositiveFloat = Field(1.0, description="share of the requests, relative to the other classes")
    num_prefixes: Requests = Field(1, description="distinct shared prefixes (system prompts, documents)")
    zipf: Zipf = 0.0
    prefix_tokens: int = Field(0, ge=0, lt=2**31, description="length of each prefix; 0: nothing is shared")
    suffix_tokens: Lengths = Field(32, description="tokens after the prefix, different in every prompt")
    output_tokens: Lengths = Field(8, description="tokens to generate per request")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower is served first")
    deadline_s: PositiveFloat | None = Field(None, description="latest useful completion after the request is due")


class Bursts(Section):
    """Regular bursts on top of Poisson arrivals."""

    every_s: PositiveFloat = Field(description="from the start of one burst to that of the next")
    duration_s: PositiveFloat = Field(description="of each burst")
    factor: PositiveFloat = Field(description="rate within a burst over the rate between bursts")

    @model_validator(mode="after")
    def _pauses(self) -> "Bursts":
        if self.duration_s >= self.every_s:
            raise ValueError(f"duration_s={self.duration_s} must be below every_s={self.every_s}")
        return self


class Mixed(Section):
    """A mix of traffic classes with Poisson arrivals, in bursts if asked for."""

    kind: Literal["mixed"] = "mixed"
    num_requests: Requests = Field(64, description="requests in a round")
    classes: dict[str, TrafficClass] = Field(min_length=1, description="by name")
    rate_per_s: PositiveFloat = Field(4.0, description="mean arrivals per second, where load=trace asks for them")
    bursts: Bursts | None = Field(None, description="a higher rate at regular times; null: none")
    send_priority: bool = Field(False, description="send the priorities; needs scheduler.policy=priority")
    reuse: Reuse = None
    reuse_block_size: Tokens = Field(16, description="block size that `reuse` is reckoned in; conf/: the engine's")
    seed: Seed = 0


class MultiTurn(Section):
    """Conversations: each prompt is the one before, its answer and what the user says next.

    The answers in the prompts are made from the seed unless they are recorded, by `llmexp record`.
    """

    kind: Literal["multi_turn"] = "multi_turn"
    num_conversations: Requests = Field(4, description="held side by side")
    turns: Requests = Field(4, description="requests of each conversation")
    system_tokens: int = Field(128, ge=0, lt=2**31, description="opening that all conversations share")
    user_tokens: Lengths = Field(64, description="what the user adds at each turn")
    output_tokens: Lengths = Field(32, description="tokens to generate at each turn")
    think_s: NonNegativeFloat = Field(0.0, description="mean pause of the user before each turn but the first")
    think: Literal["fixed", "exponential"] = Field("fixed", description="distribution of the pause")
    answers: str | None = Field(None, description="file that `llmexp record` wrote; null: made-up answers")
    seed: Seed = 0

    @model_validator(mode="after")
    def _requests(self) -> "MultiTurn":
        if self.num_conversations * self.turns > MOST_REQUESTS:
            raise ValueError(
                f"workload.num_conversations={self.num_conversations} with workload.turns={self.turns}: "
                f"{MOST_REQUESTS} requests are the most"
            )
        return self


class Mmlu(Section):
    """MMLU's test questions after solved examples, scored by the one letter that is generated."""

    kind: Literal["mmlu"] = "mmlu"
    path: str | None = Field(
        None, description="folder with dev/SUBJECT_dev.csv and test/SUBJECT_test.csv; null: the Hub's cais/mmlu"
    )
    shots: int = Field(5, ge=0, le=5, description="solved examples before each question")
    subjects: tuple[str, ...] | None = Field(None, min_length=1, strict=False, description="null: all")
    prefix: Literal["per_subject", "fixed"] = Field(
        "per_subject", description="examples from the question's subject, or one block before all questions"
    )
    num_questions: Requests | None = Field(500, description="questions in a round, sampled; null: all")
    order: Literal["shuffled", "sorted", "by_subject"] = Field("shuffled", description="sorted: by token length")
    chat_template: bool = Field(False, description="ask through the model's chat template")
    seed: Seed = 0


WorkloadConfig = Annotated[
    SharedPrefix | UniquePrefix | Mixed | MultiTurn | Mmlu | Custom | Mooncake | Azure | ShareGpt | Alpaca,
    Field(discriminator="kind"),
]
