"""One workload under several engines: what differs, as a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pyarrow as pa

from llmexp.simulate.cost import StepCost
from llmexp.simulate.requests import Request, Requests
from llmexp.simulate.settings import Policy, Settings
from llmexp.simulate.simulation import Simulation, simulate
from llmexp.simulate.starvation import overtaken, waits_s

Variants = Mapping[str, Settings]


def compare(
    requests: Requests | Sequence[Request],
    variants: Variants,
    cost: StepCost,
    *,
    max_concurrency: int | None = None,
) -> pa.Table:
    """Simulate every variant; one row each, with the columns of ``summary``."""
    rows = [
        {"variant": name, **summary(simulate(requests, settings, cost, max_concurrency=max_concurrency))}
        for name, settings in variants.items()
    ]
    return pa.Table.from_pylist(rows)


def summary(simulation: Simulation) -> dict[str, float]:
    """Rates per simulated second, latencies from sending in seconds, and how unevenly requests waited."""
    steps, requests = simulation.steps.to_pandas(), simulation.requests.to_pandas()
    duration_s = float(requests["finished_s"].max())
    ttft_s = requests["first_token_s"] - requests["sent_s"]
    e2e_s = requests["finished_s"] - requests["sent_s"]
    queries = steps["queries"].sum()
    return {
        "hit_rate": float(steps["hits"].sum() / queries) if queries else 0.0,
        "request_throughput": len(requests) / duration_s,
        "output_token_throughput": float(requests["output_tokens"].sum()) / duration_s,
        "ttft_s_mean": float(ttft_s.mean()),
        "ttft_s_p95": float(ttft_s.quantile(0.95)),
        "e2e_s_mean": float(e2e_s.mean()),
        "e2e_s_p95": float(e2e_s.quantile(0.95)),
        "wait_s_max": float(waits_s(simulation).max()),
        "overtaken_max": int(overtaken(simulation).max()),
        "running_mean": float(np.average(steps["running"], weights=steps["duration_s"])),
        "preemptions": int(steps["preempted"].sum()),
    }


def reuse_bound(requests: Requests) -> float:
    """The most that prompts can hit of each other, as a rate: every distinct full block computed once, in the
    best order and with memory for all.

    A prompt's last token is no hit, so a prompt of whole blocks always computes its last block.
    """
    occurrences: Counter[int] = Counter()
    hittable: Counter[int] = Counter()
    for i, num_tokens in enumerate(requests.prompt_tokens.tolist()):
        chain = requests.chain(i)
        occurrences.update(chain[: num_tokens // requests.block_size])
        hittable.update(chain[: (num_tokens - 1) // requests.block_size])
    hits = sum(min(count, occurrences[chain_id] - 1) for chain_id, count in hittable.items())
    return hits * requests.block_size / int(requests.prompt_tokens.sum())


def block_sizes(base: Settings, sizes: Sequence[int] = (1, 8, 16, 32, 64, 128, 256)) -> Variants:
    """The same memory in blocks of other sizes; for request objects, which can be cut anew."""
    tokens = (base.num_gpu_blocks - 1) * base.block_size
    return {f"block_size={size}": replace(base, block_size=size, num_gpu_blocks=tokens // size + 1) for size in sizes}


def radix_vs_blocks(base: Settings, num_gpu_blocks: Sequence[int]) -> Variants:
    """vLLM's blocks and SGLang's tree, with whole and trimmed leaves, in several memories."""
    return {
        f"{cache} {blocks}": replace(base, prefix_cache=cache, num_gpu_blocks=blocks)
        for blocks in num_gpu_blocks
        for cache in ("blocks", "radix", "radix_trimmed")
    }


def scheduling_order(base: Settings) -> Variants:
    """Orders of the queue that heed shared prefixes, beside that of arrival."""
    return {name: replace(base, policy=name) for name in ("fcfs", "longest_prefix", "depth_first")}


def scheduler_policies(base: Settings) -> Variants:
    return {name: replace(base, policy=name) for name in get_args(Policy)}


def static_vs_continuous(base: Settings) -> Variants:
    """A batch at a time; iteration-level batching with whole prefills (Yu et al. 2022, Orca); and with chunks
    (Agrawal et al. 2024, Sarathi-Serve), vLLM's default."""
    return {
        "static": replace(base, batching="static", enable_chunked_prefill=False),
        "continuous": replace(base, enable_chunked_prefill=False),
        "continuous, chunked": replace(base, enable_chunked_prefill=True),
    }


def chunked_prefill(base: Settings, budgets: Sequence[int] = (512, 1024, 2048, 4096, 8192)) -> Variants:
    """Token budgets of a step: small ones let decodes go on beside prefills, large ones finish prefills sooner."""
    return {f"max_num_batched_tokens={n}": replace(base, max_num_batched_tokens=n) for n in budgets}
