"""Why a round must not be believed."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmexp.client.check import ClientCheck
from llmexp.measure.contract import Contract
from llmexp.schema.config import Config
from llmexp.workloads.workload import Workload


def invalid_reasons(
    config: Config,
    workload: Workload,
    trace: pa.Table,
    check: ClientCheck | None,
    contract: Contract,
    reset_confirmed: bool | None,
    overlap_blocks: int,
) -> Iterator[str]:
    """Every rule of a valid measurement that a round broke, as `code: what was seen`; none for a valid round.

    `reset_confirmed` is the engine's answer to the reset, None where it gave none; then the contract decides.
    `overlap_blocks` counts the KV blocks that the warm-up shares with the workload. `check` is None where there was
    no client: in a simulation.
    """
    if overlap_blocks:
        yield f"warm_up_overlaps: the warm-up shares {overlap_blocks} KV blocks with the workload"
    if not config.reset_cache:
        yield "cache_not_reset: reset_cache=false, so the round began with what was cached before"
    elif reset_confirmed is False:
        yield "cache_not_reset: the engine refused to reset its prefix cache"
    errors = trace.column("error").drop_null()
    if len(errors) or len(trace) < len(workload):
        missing = len(workload) - len(trace)
        first = f"; the first: {errors[0].as_py()}" if len(errors) else ""
        yield f"requests_failed: {len(errors) + missing} of {len(workload)} did not complete{first}"
    done = trace.filter(pc.is_null(trace.column("error")))
    index = done.column("request").to_numpy()
    yield from _differ("prompt_tokens", done, workload.prompt_tokens[index])
    if config.client.ignore_eos:
        yield from _differ("output_tokens", done, workload.output_tokens[index])
    for broken in contract.broken:
        yield f"contract_broken: {broken}"
    if check is not None and check.saturated:
        yield f"client_saturated: {check.advice}"


def _differ(column: str, trace: pa.Table, asked: np.ndarray) -> Iterator[str]:
    seen = trace.column(column)
    if seen.null_count:
        yield f"usage_missing: the server reported no {column} for {seen.null_count} of {len(trace)} requests"
        return
    wrong = np.flatnonzero(seen.to_numpy() != asked)
    if len(wrong):
        first = int(wrong[0])
        yield (
            f"{column}_differ: {len(wrong)} of {len(trace)} requests; the first, "
            f"{trace.column('request')[first].as_py()}, asked for {asked[first]}, the server counted {seen[first]}"
        )
