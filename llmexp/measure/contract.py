"""The cache contract: what the prefix cache must have done in a round, against what the engine counted."""

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from llmexp.engines.counters import Counters
from llmexp.schema.config import Config
from llmexp.workloads.audit import Audit


@dataclass(frozen=True)
class Expectation:
    """Hit tokens that a round must show: exactly so many, or at most so many. `why` says what decides that."""

    hit_tokens: int
    kind: Literal["exact", "ceiling"]
    why: str
    at_least: int = 0  # where it is a ceiling


@dataclass(frozen=True)
class Contract:
    """An expectation beside what the engine tells. `observed_hit_tokens` is None where nothing does; both numbers count
    every request once, also where the engine's counters count a look-up at each attempt to admit it."""

    expected_hit_tokens: int
    kind: Literal["exact", "ceiling"]
    why: str
    observed_hit_tokens: int | None
    queried_tokens: int | None
    broken: tuple[str, ...]

    @property
    def held(self) -> bool:
        """Whether the engine did what it had to."""
        return not self.broken


def expect(config: Config, audit: Audit, num_gpu_blocks: int | None) -> Expectation:
    """What the audit of the workload, the cache's setting and the pool's size say about the hits of a round.

    vLLM registers a block's hash when it schedules the tokens that fill it, so with capacity to spare and
    first come, first served, the order of admission decides nothing and the hits equal the audit's bound
    (`vllm/v1/core/kv_cache_manager.py`, `allocate_slots`).
    """
    if not config.cache.enable_prefix_caching:
        return Expectation(0, "exact", "prefix caching is off")
    if config.cache.salt_requests:
        return Expectation(0, "exact", "every request has a cache salt of its own")
    bound = audit.reusable_tokens
    if num_gpu_blocks is None:
        return Expectation(bound, "ceiling", "the engine's capacity is unknown")
    if audit.blocks_to_hold > num_gpu_blocks:
        return Expectation(
            bound,
            "ceiling",
            f"the workload needs {audit.blocks_to_hold} KV blocks, the engine has {num_gpu_blocks}",
        )
    if config.scheduler.long_prefill_token_threshold:
        return Expectation(bound, "ceiling", "long prefills are cut by scheduler.long_prefill_token_threshold")
    if not audit.order_independent:
        return Expectation(bound, "ceiling", "the hits of this workload depend on the order of admission")
    if generated := audit.reusable_generated_tokens:
        return Expectation(
            bound, "ceiling", "the recorded answers count where the engine gives them again", at_least=bound - generated
        )
    return Expectation(bound, "exact", "the engine has room for every block of the workload")


def judge(expectation: Expectation, counted: Counters, trace: pa.Table) -> Contract:
    """Holds a round's counters and the server's per-request usage against the expectation.

    Without counters the usage alone has to do.
    """
    hits, queries = counted.prefix_cache_hits_tokens, counted.prefix_cache_queries_tokens
    usage = trace.column("cached_tokens")
    by_usage = pc.sum(usage).as_py() if len(trace) and usage.null_count == 0 else None
    seen, where = (hits, "counted") if hits is not None else (by_usage, "reported by the requests' own usage")
    exact = expectation.kind == "exact"
    repeated = 0.0
    sent = trace.column("prompt_tokens")
    if not exact and queries is not None and by_usage is not None and sent.null_count == 0 and len(trace):
        # vLLM 0.24 counts a look-up at every attempt to admit a request that waits for blocks, 0.32 only the one that
        # admits it (`get_computed_blocks`, `record_prefix_cache_stats`). What was computed, the usage tells.
        sent_tokens = pc.sum(sent).as_py()
        repeated = max(queries - sent_tokens, 0)
        if repeated:
            seen, where = by_usage, "reported by the requests' own usage"
            queries = sent_tokens
    broken: list[str] = []
    if seen is not None:
        most, least = expectation.hit_tokens, expectation.hit_tokens if exact else expectation.at_least
        wanted = f"exactly {most:,}" if exact else f"{least:,} to {most:,}" if least else f"at most {most:,}"
        if not least <= seen <= most:
            broken.append(f"{seen:,.0f} hit tokens {where}, {wanted} expected ({expectation.why})")
    if hits is not None and by_usage is not None and not by_usage <= hits <= by_usage + repeated:
        broken.append(f"{hits:,.0f} hit tokens counted, {by_usage:,} by the requests' own usage")
    return Contract(
        expected_hit_tokens=expectation.hit_tokens,
        kind=expectation.kind,
        why=expectation.why,
        observed_hit_tokens=None if seen is None else int(seen),
        queried_tokens=None if queries is None else int(queries),
        broken=tuple(broken),
    )


def hit_measures(contract: Contract) -> dict[str, float]:
    """The hits, their rate and their share of the audit's bound, by their names in the catalog.

    What nothing tells is left out.
    """
    hits, queried, bound = contract.observed_hit_tokens, contract.queried_tokens, contract.expected_hit_tokens
    measures = {"expected_hit_tokens": float(bound)}
    if hits is not None and queried is not None:
        measures["observed_hit_tokens"] = float(hits)
        measures["cache_hit_rate"] = hits / queried if queried else 0.0
    if hits is not None and bound:
        measures["hit_share_of_bound"] = hits / bound
    return measures
