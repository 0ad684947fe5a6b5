"""What the size of a KV block costs and gains, with the same memory."""

import numpy as np
import pandas as pd

from llmexp.progress import each
from llmexp.schema.simulation import BlockSize
from llmexp.simulate.requests import Requests
from llmexp.simulate.simulation import Simulation, simulate
from llmexp.simulate.studies.drawing import curves, labelled, line, logarithmic, panels, short, tried
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.summary import reuse_bound, summary


def block_size(setting: Setting, study: BlockSize) -> Findings:
    """Serves the workload with every block size in every memory."""
    cost = setting.cost()
    rows = []
    for size in each("Simulating block sizes", study.block_sizes):
        requests = setting.requests(size)
        for capacity in study.capacity_tokens:
            engine = setting.engine(block_size=size, capacity_tokens=capacity)
            found = simulate(requests, engine, cost, max_concurrency=setting.max_concurrency)
            numbers = summary(found)
            rows.append(
                {
                    "capacity_tokens": capacity,
                    "block_size": size,
                    "hit_rate": numbers["hit_rate"],
                    "bound": reuse_bound(requests),
                    "empty_share": empty_share(found),
                    "hashed_blocks_per_request": hashed_blocks(requests) / len(requests),
                    "request_throughput": numbers["request_throughput"],
                    "preemptions": numbers["preemptions"],
                }
            )
    frame = pd.DataFrame(rows).sort_values(["capacity_tokens", "block_size"], kind="stable", ignore_index=True)
    figure, (hits, empty, hashed) = panels(3, height=3.9, width=12)
    for place, (name, some) in enumerate(curves(frame, "capacity_tokens")):
        label = f"{short(float(name))} tokens"
        line(hits, place + 1, some["block_size"], some["hit_rate"], label)
        line(empty, place + 1, some["block_size"], 100 * some["empty_share"], label)
    first = frame[frame["capacity_tokens"] == frame["capacity_tokens"].iloc[0]]
    line(hits, 0, first["block_size"], first["bound"], "bound")
    line(hashed, 0, first["block_size"], first["hashed_blocks_per_request"], "")
    for panel in (hits, empty, hashed):
        tried(panel, study.block_sizes)
    x = "block size (tokens)"
    labelled(hits, "Reuse", x, "hit rate (share of prompt tokens)")
    labelled(empty, "Internal waste", x, "empty places in blocks in use (%)")
    labelled(hashed, "Work of hashing", x, "full blocks per request")
    hits.set_ylim(0, 1)
    hits.legend(fontsize=9, loc="center")
    empty.set_ylim(bottom=0)
    empty.legend(fontsize=9)
    logarithmic(hashed, "y")
    return Findings(
        title="Block size: reuse, waste and blocks to hash",
        setting=f"{setting.described()}; {setting.engine_described()}",
        tables=(
            Numbers(
                "block_sizes",
                "The same memory in blocks of other sizes",
                frame,
                {
                    "capacity_tokens": "KV tokens",
                    "block_size": "block size",
                    "hit_rate": "hit rate",
                    "bound": "bound",
                    "empty_share": "empty",
                    "hashed_blocks_per_request": "blocks/request",
                    "request_throughput": "req/s",
                },
            ),
        ),
        figure=figure,
        caption=(
            "Hit rate: share of queried prompt tokens served from the cache; bound: every distinct block computed "
            "once. Empty: places without a token in the blocks of running requests, over all steps."
        ),
        headline=headline(frame, "hit_rate", "capacity_tokens", "block_size"),
    )


def empty_share(simulation: Simulation) -> float:
    """Of the places in the blocks in use, summed over steps, the share that holds no token.

    A scheduled sequence leaves only the end of its last block empty.
    """
    settings, spans = simulation.settings, simulation.spans
    count = spans["steps"].to_numpy()
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    tokens = spans["tokens"].to_numpy()
    held = np.repeat(spans["context"].to_numpy() + tokens, count) + nth * np.repeat(tokens, count)
    used = settings.num_gpu_blocks - 1 - simulation.steps["free_blocks"].to_numpy()
    return float((-held % settings.block_size).sum() / (used.sum() * settings.block_size))


def hashed_blocks(requests: Requests) -> int:
    """Full blocks that an engine hashes: of every prompt, and of what it generates."""
    return int(requests.num_blocks.sum())
