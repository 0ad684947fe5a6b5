"""SGLang's radix tree (Zheng et al. 2024) against vLLM's hashed blocks, from little memory to enough."""

from typing import get_args

import numpy as np
import pandas as pd

from llmexp.progress import each
from llmexp.schema.simulation import RadixVsBlocks
from llmexp.simulate.requests import Requests
from llmexp.simulate.settings import PrefixCache
from llmexp.simulate.simulation import simulate
from llmexp.simulate.studies.drawing import labelled, line, logarithmic, panels
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.summary import summary

NAMES = {"blocks": "hashed blocks", "radix": "radix, whole leaves", "radix_trimmed": "radix, trimmed leaves"}


def radix_vs_blocks(setting: Setting, study: RadixVsBlocks) -> Findings:
    """Serves the workload from every cache in every memory."""
    cost, requests = setting.cost(), setting.requests()
    whole, longest = distinct_blocks(requests), longest_request(requests)
    sizes = sorted({max(round(share * whole), longest) for share in study.capacity_shares})
    cases = [(blocks, cache) for blocks in sizes for cache in get_args(PrefixCache)]
    rows = []
    for blocks, cache in each("Simulating prefix caches", cases):
        engine = setting.engine(num_gpu_blocks=blocks + 1, prefix_cache=cache)
        numbers = summary(simulate(requests, engine, cost, max_concurrency=setting.max_concurrency))
        rows.append(
            {
                "capacity_share": blocks / whole,
                "capacity_tokens": blocks * engine.block_size,
                "cache": NAMES[cache],
                **{name: numbers[name] for name in ("hit_rate", "ttft_s_mean", "request_throughput", "preemptions")},
            }
        )
    frame = pd.DataFrame(rows)
    by_cache = frame.pivot(index="capacity_share", columns="cache", values="hit_rate")[list(NAMES.values())]
    figure, (hits, gap) = panels(2, height=3.9, width=11)
    for place, name in enumerate(by_cache):
        line(hits, place, 100 * by_cache.index, by_cache[name], str(name))
        if place:
            line(gap, place, 100 * by_cache.index, 100 * (by_cache[name] - by_cache[NAMES["blocks"]]), str(name))
    x = f"KV memory (% of the {whole * setting.block_size:,} tokens\nthat hold the whole workload)"
    labelled(hits, "Reuse", x, "hit rate (share of prompt tokens)")
    labelled(gap, "Difference from hashed blocks", x, "hit rate (percentage points)")
    for panel in (hits, gap):
        logarithmic(panel, "x")
        panel.legend(fontsize=9)
    hits.set_ylim(bottom=0)
    gap.axhline(0, color="black", linewidth=0.8)
    widest = max(1.0, float((by_cache.sub(by_cache[NAMES["blocks"]], axis=0)).abs().to_numpy().max()) * 110)
    gap.set_ylim(-widest, widest)
    return Findings(
        title="Prefix cache: radix tree against hashed blocks",
        setting=(
            f"{setting.described()}; blocks of {setting.block_size}, "
            f"max_num_seqs={setting.config.max_num_seqs}; {setting.engine_described()}"
        ),
        tables=(
            Numbers(
                "caches",
                "The same requests in the same memory",
                frame,
                {
                    "capacity_share": "KV memory",
                    "capacity_tokens": "KV tokens",
                    "cache": "cache",
                    "hit_rate": "hit rate",
                    "ttft_s_mean": "TTFT mean (s)",
                    "preemptions": "preempted",
                },
            ),
        ),
        figure=figure,
        caption=(
            "Both keep what was used last. The tree evicts whole leaves (SGLang) or trims them; hashed blocks go one "
            "by one, a request's tail first. Right: above 0 the tree reuses more."
        ),
        headline=headline(frame, "hit_rate", "cache", "capacity_tokens"),
    )


def distinct_blocks(requests: Requests) -> int:
    """Blocks that hold the KV of all requests at once, each equal one once, partial ones included."""
    held = -(-(requests.prompt_tokens + requests.output_tokens - 1) // requests.block_size)
    own = held - requests.num_chained
    return int(np.unique(requests.chain_ids).size + own.sum())


def longest_request(requests: Requests) -> int:
    """Blocks without which the longest request cannot be served."""
    return int(-(-(requests.prompt_tokens + requests.output_tokens - 1).max() // requests.block_size))
