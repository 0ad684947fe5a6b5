"""A simulation in a row of numbers, and the most that its prompts could have reused."""

from collections import Counter

import numpy as np

from llmexp.simulate.requests import Floats, Requests
from llmexp.simulate.simulation import Simulation
from llmexp.simulate.starvation import overtaken, waits_s


def summary(simulation: Simulation) -> dict[str, float]:
    """Rates per simulated second, latencies from sending in seconds, and how unevenly requests waited."""
    steps, requests = simulation.steps.to_pandas(), simulation.requests.to_pandas()
    duration_s = float(requests["finished_s"].max())
    ttft_s = requests["first_token_s"] - requests["sent_s"]
    e2e_s = requests["finished_s"] - requests["sent_s"]
    wait_s = waits_s(simulation)
    queries = steps["queries"].sum()
    return {
        "hit_rate": float(steps["hits"].sum() / queries) if queries else 0.0,
        "request_throughput": len(requests) / duration_s,
        "output_token_throughput": float(requests["output_tokens"].sum()) / duration_s,
        "ttft_s_mean": float(ttft_s.mean()),
        "ttft_s_p50": float(ttft_s.median()),
        "ttft_s_p95": float(ttft_s.quantile(0.95)),
        "e2e_s_mean": float(e2e_s.mean()),
        "e2e_s_p95": float(e2e_s.quantile(0.95)),
        "wait_s_mean": float(wait_s.mean()),
        "wait_s_p95": float(np.quantile(wait_s, 0.95)),
        "wait_s_max": float(wait_s.max()),
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


def inter_token_s(simulation: Simulation) -> Floats:
    """The gaps between consecutive tokens of each request, all together."""
    offsets, times = simulation.token_times_s()
    gaps = np.diff(times)
    within = np.ones(len(gaps), bool)
    within[offsets[1:-1] - 1] = False
    chosen: Floats = gaps[within]
    return chosen
