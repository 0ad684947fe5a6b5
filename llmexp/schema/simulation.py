"""Config of the studies that only the simulator can make. One class per `simulation.kind`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from llmexp.schema.section import InFlight, Requests, Section, Tokens

Share = Annotated[float, Field(gt=0, le=1)]
SeveralTokens = Annotated[tuple[Tokens, ...], Field(min_length=1, strict=False)]


class _Timed(Section):
    """A study whose steps take time: the roofline of `model` on `gpu`, at what an engine reaches of it."""

    compute_efficiency: Share = Field(0.5, description="share of the GPU's FLOP/s that a step reaches")
    memory_efficiency: Share = Field(0.7, description="share of the GPU's memory bandwidth that a step reaches")
    step_overhead_ms: NonNegativeFloat = Field(2.0, description="what a step takes on top, whatever it computes")


class PagedMemory(Section):
    """What share of the KV memory holds tokens, by how it is reserved; and what sharing saves."""

    kind: Literal["paged_memory"] = "paged_memory"
    capacity_tokens: Tokens = Field(15_700, description="KV memory; OPT-13B leaves so much on an A100 of 40 GB")
    max_model_len: Tokens = Field(2048, description="what a reservation of the maximum holds")
    block_sizes: SeveralTokens = Field((1, 8, 16, 32, 64, 128, 256), description="of paged memory, in tokens")
    group_sizes: tuple[Annotated[int, Field(ge=2, le=64)], ...] = Field(
        (2, 4, 6), min_length=1, strict=False, description="parallel samples, or beams, of a request"
    )
    sharing_block_size: Tokens = Field(16, description="block size that samples and beams share in")
    sharing_requests: Requests = Field(200, description="requests that are sampled and beam-searched")
    beam_uncertainty: PositiveFloat = Field(
        0.5, description="how open the next token is; the likeliest has 1 / (1 + this) of the probability on average"
    )


class BlockSize(_Timed):
    """What the size of a KV block costs and gains, with the same memory."""

    kind: Literal["block_size"] = "block_size"
    block_sizes: SeveralTokens = Field((8, 16, 32, 64, 128, 256), description="in tokens")
    capacity_tokens: SeveralTokens = Field(description="KV memories, in tokens")


class RadixVsBlocks(_Timed):
    """SGLang's radix tree against vLLM's hashed blocks, in several memories."""

    kind: Literal["radix_vs_blocks"] = "radix_vs_blocks"
    capacity_shares: tuple[Share, ...] = Field(
        min_length=1, strict=False, description="KV memories, as shares of what holds the whole workload"
    )


class SchedulingOrder(_Timed):
    """Orders of the queue: what they reuse, against the bound, and how long they let requests wait."""

    kind: Literal["scheduling_order"] = "scheduling_order"
    capacity_tokens: SeveralTokens = Field(description="KV memories, in tokens; all requests come at once")
    in_flight: tuple[InFlight, ...] = Field(
        min_length=1, strict=False, description="requests in flight in the smallest memory: running, and in the queue"
    )


class StaticVsContinuous(_Timed):
    """Static batches, iteration-level batching, and vLLM's with chunked prefill, as requests come faster."""

    kind: Literal["static_vs_continuous"] = "static_vs_continuous"
    rates_per_s: tuple[PositiveFloat, ...] = Field(min_length=1, strict=False, description="Poisson arrivals")
    whole_batched_tokens: Tokens = Field(
        16_384, description="max_num_batched_tokens where prefills are whole: at least the longest request"
    )


class SchedulerPolicies(_Timed):
    """Who leaves the queue first: deadlines met, latencies by class, and who starves."""

    kind: Literal["scheduler_policies"] = "scheduler_policies"


class ChunkedPrefill(_Timed):
    """A step's token budget, with chunked prefill and without: TTFT, ITL and throughput."""

    kind: Literal["chunked_prefill"] = "chunked_prefill"
    token_budgets: SeveralTokens = Field(description="values of max_num_batched_tokens")


SimulationConfig = (
    PagedMemory | BlockSize | RadixVsBlocks | SchedulingOrder | StaticVsContinuous | SchedulerPolicies | ChunkedPrefill
)
