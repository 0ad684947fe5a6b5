"""Orders of the queue: what they reuse, against the most that could be reused, and the wait they cost."""

import pandas as pd

from llmexp.progress import each
from llmexp.schema.simulation import SchedulingOrder
from llmexp.simulate.settings import Policy
from llmexp.simulate.simulation import simulate
from llmexp.simulate.studies.drawing import curves, labelled, line, panels, tried
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.summary import reuse_bound, summary

ORDERS: dict[Policy, str] = {
    "fcfs": "first come, first served",
    "random": "random",
    "longest_prefix": "longest cached prefix",
    "depth_first": "depth first",
}
MEASURES = ("hit_rate", "request_throughput", "wait_s_mean", "wait_s_p95", "wait_s_max", "overtaken_max")
SHOWN = {
    "order": "order",
    "hit_rate": "hit rate",
    "request_throughput": "req/s",
    "wait_s_mean": "wait mean (s)",
    "wait_s_max": "wait max (s)",
    "overtaken_max": "overtaken",
}


def scheduling_order(setting: Setting, study: SchedulingOrder) -> Findings:
    """Serves the workload in every order: all of it at once in every memory, and in the smallest memory with
    queues of every length."""
    cost, requests = setting.cost(), setting.requests()
    bound, smallest = reuse_bound(requests), min(study.capacity_tokens)
    places = [(capacity, len(requests)) for capacity in study.capacity_tokens]
    places += [(smallest, in_flight) for in_flight in study.in_flight]
    rows = []
    for capacity, in_flight, order in each(
        "Simulating orders of the queue", [(*place, order) for place in dict.fromkeys(places) for order in ORDERS]
    ):
        engine = setting.engine(capacity_tokens=capacity, policy=order)
        numbers = summary(simulate(requests, engine, cost, max_concurrency=in_flight))
        rows.append(
            {
                "capacity_tokens": capacity,
                "in_flight": in_flight,
                "order": ORDERS[order],
                "bound": bound,
                **{name: numbers[name] for name in MEASURES},
            }
        )
    frame = pd.DataFrame(rows)
    by_memory = frame[frame["in_flight"] == len(requests)]
    by_queue = frame[frame["capacity_tokens"] == smallest].sort_values("in_flight", kind="stable")
    figure, (hits, wait, queued_hits, queued_wait) = panels(2, rows=2, height=3.4, width=11)
    for first, second, x, some in (
        (hits, wait, "capacity_tokens", by_memory),
        (queued_hits, queued_wait, "in_flight", by_queue),
    ):
        for place, (name, found) in enumerate(curves(some, "order")):
            line(first, place, found[x], found["hit_rate"], name)
            line(second, place, found[x], found["wait_s_max"], name)
        first.axhline(bound, color="black", linewidth=0.8, linestyle=":")
        first.set_ylim(0, 1)
        first.text(some[x].max(), bound + 0.02, "bound", va="bottom", ha="right", fontsize=9)
        for panel in (first, second):
            tried(panel, some[x].tolist())
        second.set_ylim(bottom=0)
    memory, queue = "KV memory (tokens)", f"requests in flight, max_num_seqs={setting.config.max_num_seqs}"
    labelled(hits, f"Reuse, all {len(requests):,} requests at once", memory, "hit rate (share of prompt tokens)")
    labelled(wait, f"Longest wait, all {len(requests):,} requests at once", memory, "seconds in the queue")
    labelled(queued_hits, f"Reuse, {smallest:,} tokens of KV memory", queue, "hit rate (share of prompt tokens)")
    labelled(queued_wait, f"Longest wait, {smallest:,} tokens of KV memory", queue, "seconds in the queue")
    wait.legend(fontsize=9, loc="lower center")
    return Findings(
        title="Order of the queue: reuse, and the wait it costs",
        setting=(
            f"{setting.described()}; max_num_seqs={setting.config.max_num_seqs}, blocks of {setting.block_size}; "
            f"{setting.engine_described()}"
        ),
        tables=(
            Numbers(
                "by_memory",
                f"All {len(requests):,} requests at once; reuse is bounded by {bound:.3f}",
                by_memory,
                {"capacity_tokens": "KV tokens", **SHOWN},
            ),
            Numbers(
                "by_queue",
                f"{smallest:,} tokens of KV memory, so many requests in flight",
                by_queue,
                {"in_flight": "in flight", **SHOWN},
            ),
        ),
        figure=figure,
        caption=(
            "Bound: every distinct block computed once. Wait: from sending to the first step. Overtaken: the most "
            "later requests that were let past one."
        ),
        headline=headline(frame, "hit_rate", "order", "capacity_tokens", "in_flight"),
    )
