"""The audit for people: a table, a JSON file and a plot."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from llmexp.errors import ConfigError
from llmexp.workloads.audit import Audit, audit_of, distances_of, pressure, reuse_by_position
from llmexp.workloads.blocks import blocks_of
from llmexp.workloads.workload import Workload

JSON, PLOT = "workload_audit.json", "workload_audit.png"
WIDTH = 100
STEPS = 6
STYLES = ("-", "--", ":", "-.")


def report(
    workload: Workload,
    block_sizes: Sequence[int],
    capacities: Sequence[int],
    folder: Path,
    concurrency: int = 16,
    kv_bytes_per_token: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prints the audit of a workload, and writes it to `folder` as JSON and PNG; returns what the JSON holds.

    `capacities` are KV cache sizes in tokens; without any, powers of 2 from what holds the longest request to what
    holds the whole workload. `concurrency` is the number of requests in flight that the pressure is reckoned for.
    `kv_bytes_per_token` says what they are in bytes. Raises ConfigError for a capacity below one block.
    """
    accounts: list[Audit] = []
    distances: list[NDArray[np.int64]] = []
    for size in block_sizes:
        blocks = blocks_of(workload, size)
        accounts.append(audit_of(workload, blocks))
        distances.append(distances_of(blocks))
    capacities = capacities or _capacities(workload, accounts)
    if min(capacities) < max(block_sizes):
        raise ConfigError(f"a KV capacity of {min(capacities)} tokens is below one block of {max(block_sizes)}")
    caches = [
        {
            "block_size": account.block_size,
            "capacity_tokens": capacity,
            "capacity_bytes": kv_bytes_per_token and capacity * kv_bytes_per_token,
            "lru_hit_rate": _lru_hit_rate(account, distance, capacity),
            "pressure": asdict(pressure(workload, account.block_size, capacity // account.block_size, concurrency)),
        }
        for capacity in capacities
        for account, distance in zip(accounts, distances, strict=True)
    ]
    content = {
        "name": workload.name,
        "sha256": workload.sha256,
        "recipe": dict(workload.recipe),
        "audits": [account.to_json() for account in accounts],
        "caches": caches,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(content, indent=2))
    _plot(workload, accounts, distances, capacities).savefig(folder / PLOT, dpi=150)
    console = console or Console(width=WIDTH)
    console.print(_account_table(workload, accounts))
    console.print(_cache_table(caches, concurrency))
    console.print(f"Written: {folder / JSON}, {folder / PLOT}", highlight=False, soft_wrap=True)
    return content


def _capacities(workload: Workload, accounts: Sequence[Audit]) -> list[int]:
    """At most `STEPS` powers of 2, from what holds the longest request to what holds the whole workload."""
    longest = int((workload.prompt_tokens.astype(np.int64) + workload.output_tokens).max())
    all_of_it = max(account.blocks_to_hold * account.block_size for account in accounts)
    block = max(account.block_size for account in accounts)
    first, last = (math.ceil(math.log2(tokens)) for tokens in (max(longest, block), max(longest, block, all_of_it)))
    stride = max(math.ceil((last - first) / (STEPS - 1)), 1)
    return [2**exponent for exponent in range(last, first - 1, -stride)][::-1]


def _lru_hit_rate(account: Audit, distances: NDArray[np.int64], capacity_tokens: int) -> float:
    hits = int((distances < capacity_tokens // account.block_size).sum())
    return hits * account.block_size / account.prompt_tokens


def _account_table(workload: Workload, accounts: Sequence[Audit]) -> Table:
    first = accounts[0]
    table = Table(title=f"{workload.name} {workload.sha256[:12]}: {first.requests:,} requests", title_justify="left")
    table.add_column("")
    for account in accounts:
        table.add_column(f"blocks of {account.block_size}", justify="right")

    def spread(name: str) -> str:
        counts = getattr(first, name)
        return f"{counts.min:,} / {counts.p50:,.0f} / {counts.p95:,.0f} / {counts.max:,}"

    same: Mapping[str, str] = {
        "prompt tokens": f"{first.prompt_tokens:,}",
        "prompt min / p50 / p95 / max": spread("prompt_lengths"),
        "output tokens": f"{first.output_tokens:,}",
        "output min / p50 / p95 / max": spread("output_lengths"),
        "exact duplicates": f"{first.exact_duplicates:,}",
    }
    for label, value in same.items():
        table.add_row(label, value, *[""] * (len(accounts) - 1))
    table.add_section()
    each: Mapping[str, Callable[[Audit], str]] = {
        "full blocks": lambda account: f"{account.blocks:,}",
        "distinct": lambda account: f"{account.distinct_blocks:,}",
        "shared": lambda account: f"{account.shared_blocks:,}",
        "reusable prompt tokens": lambda account: f"{account.reusable_tokens:,}",
        "of which generated": lambda account: f"{account.reusable_generated_tokens:,}",
        "ideal hit rate, by token": lambda account: f"{account.ideal_hit_rate:.4f}",
        "ideal hit rate, by block": lambda account: f"{account.ideal_block_hit_rate:.4f}",
        "the same in any order": lambda account: "yes" if account.order_independent else "no",
        "blocks to hold everything": lambda account: f"{account.blocks_to_hold:,}",
    }
    for label, show in each.items():
        table.add_row(label, *[show(account) for account in accounts])
    return table


def _cache_table(caches: Sequence[Mapping[str, Any]], concurrency: int) -> Table:
    table = Table(title=f"KV caches, {concurrency} requests in flight", title_justify="left")
    known = caches[0]["capacity_bytes"] is not None
    for heading in ("tokens", *(["GiB"] if known else []), "blocks of", "LRU hit rate", "mean demand", "peak demand"):
        table.add_column(heading, justify="right")
    for cache in caches:
        asked = cache["pressure"]
        table.add_row(
            f"{cache['capacity_tokens']:,}",
            *([f"{cache['capacity_bytes'] / 2**30:,.3g}"] if known else []),
            str(cache["block_size"]),
            f"{cache['lru_hit_rate']:.4f}",
            f"{asked['mean_share']:.0%}",
            f"{asked['peak_share']:.0%}",
        )
    table.caption = "demand: blocks of requests in flight, nothing shared, over the capacity"
    table.caption_justify = "left"
    return table


def _plot(
    workload: Workload,
    accounts: Sequence[Audit],
    distances: Sequence[NDArray[np.int64]],
    capacities: Sequence[int],
) -> Figure:
    first = accounts[0]
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_position, by_capacity = figure.subplots(1, 2)
    for account, distance, style in zip(accounts, distances, cycle(STYLES)):
        line = {"label": f"blocks of {account.block_size}", "linestyle": style, "where": "post"}
        positions = np.arange(account.prompt_lengths.max // account.block_size + 1) * account.block_size
        share = reuse_by_position(workload, account)
        by_position.step(positions, [*share, share[-1] if len(share) else 0.0], **line)
        by_capacity.step(*_hit_rates(account, distance), **line)
    by_position.set(
        title="Reuse by position",
        xlabel="position in the prompt (tokens)",
        ylabel="can be hits, of the prompts that reach it",
        ylim=(-0.02, 1.02),
    )
    by_capacity.set(
        title="Reuse distance: hit rate of an LRU cache",
        xlabel="KV capacity (tokens; K: 1,024, M: 1,024²)",
        ylabel="hit tokens / prompt tokens",
        ylim=(-0.02, 1.02),
    )
    by_capacity.set_xscale("log", base=2)
    by_capacity.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    by_capacity.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _in_binary(tokens)))
    by_capacity.xaxis.set_minor_locator(NullLocator())
    for capacity in capacities:
        label = "capacities in the table" if capacity == capacities[0] else None
        by_capacity.axvline(capacity, color="0.7", linewidth=0.8, zorder=0, label=label)
    by_capacity.set_xlim(left=first.prompt_lengths.max)  # a smaller cache cannot take every prompt
    for axes in (by_position, by_capacity):
        axes.legend(edgecolor="none")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{workload.name}: {len(workload):,} requests", fontsize="medium")
    return figure


def _in_binary(tokens: float) -> str:
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens / size:g}{letter}"
    return f"{tokens:g}"


def _hit_rates(account: Audit, distances: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Capacities in tokens at which the hit rate changes, and the hit rate from each on.

    A block of distance d is a hit once the cache holds d + 1 blocks.
    """
    needed, counts = np.unique(distances + 1, return_counts=True)
    capacities = np.array([1, *needed, account.blocks_to_hold]) * account.block_size
    return capacities, np.cumsum([0, *counts, 0]) * account.block_size / account.prompt_tokens
