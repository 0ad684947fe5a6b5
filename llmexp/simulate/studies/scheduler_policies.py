"""Who leaves the queue first: deadlines met, latencies by class of traffic, and who starves."""

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from llmexp.errors import ConfigError
from llmexp.progress import each
from llmexp.schema.simulation import SchedulerPolicies
from llmexp.simulate.requests import Floats
from llmexp.simulate.settings import Policy
from llmexp.simulate.simulation import Simulation, simulate
from llmexp.simulate.starvation import overtaken, waits_s
from llmexp.simulate.studies.drawing import HATCHES, labelled, panels
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.summary import summary

POLICIES: dict[Policy, str] = {
    "fcfs": "first come",
    "shortest_prefill": "shortest prefill",
    "shortest_cache": "shortest cache",
    "shortest_service": "shortest service",
    "deadline": "deadline",
    "memory_aware_deadline": "deadline, memory-aware",
    "longest_prefix": "longest cached prefix",
    "depth_first": "depth first",
}
FILLS = ("black", "#0072B2", "#D55E00", "white", "#009E73", "0.7")


def scheduler_policies(setting: Setting, study: SchedulerPolicies) -> Findings:
    """Serves the workload, whose requests have classes and deadlines, under every policy."""
    if "class" not in setting.workload.columns:
        raise ConfigError(
            f"workload: got {setting.workload.name}, whose requests have no classes and deadlines; "
            "accepted is a mix, such as workload=mixed_bursty"
        )
    cost, requests = setting.cost(), setting.requests()
    classes = setting.workload.columns["class"].astype(str)
    overall, by_class = [], []
    for policy, name in each("Simulating policies", list(POLICIES.items())):
        found = simulate(requests, setting.engine(policy=policy), cost, max_concurrency=setting.max_concurrency)
        rows = _latencies(found, requests.deadline_s, classes)
        numbers = summary(found)
        timed = rows[np.isfinite(rows["deadline_s"])]
        overall.append(
            {
                "policy": name,
                "deadlines_met": float(timed["met"].mean()),
                **{key: numbers[key] for key in ("ttft_s_mean", "ttft_s_p95", "e2e_s_p95", "wait_s_max")},
                "overtaken_max": int(overtaken(found).max()),
                **{key: numbers[key] for key in ("hit_rate", "preemptions", "request_throughput")},
            }
        )
        for kind, some in rows.groupby("class"):
            by_class.append(
                {
                    "policy": name,
                    "class": kind,
                    "requests": len(some),
                    "deadlines_met": float(some["met"].mean()) if np.isfinite(some["deadline_s"]).all() else np.nan,
                    "ttft_s_p50": float(some["ttft_s"].median()),
                    "ttft_s_p95": float(some["ttft_s"].quantile(0.95)),
                    "e2e_s_p95": float(some["e2e_s"].quantile(0.95)),
                    "wait_s_max": float(some["wait_s"].max()),
                }
            )
    totals, parts = pd.DataFrame(overall), pd.DataFrame(by_class)
    figure, (met, first, wait) = panels(3, height=4.6, width=13)
    names = list(POLICIES.values())
    labels = sorted(set(classes))
    _bars(met, 100 * parts.pivot(index="policy", columns="class", values="deadlines_met").loc[names, labels])
    _bars(first, parts.pivot(index="policy", columns="class", values="ttft_s_p95").loc[names, labels])
    _bars(wait, parts.pivot(index="policy", columns="class", values="wait_s_max").loc[names, labels])
    labelled(met, "Deadlines met", "requests of the class (%)", "")
    labelled(first, "Time to first token, p95", "seconds", "")
    labelled(wait, "Longest wait in the queue", "seconds", "")
    for panel in (first, wait):
        panel.set_yticklabels([])
    met.set_xlim(0, 100)
    figure.legend(*first.get_legend_handles_labels(), loc="outside upper right", ncols=len(labels), fontsize=9)
    return Findings(
        title="Scheduling policies: deadlines, latency and starvation",
        setting=f"{setting.described()}; {setting.engine_described()}, {setting.capacity_tokens:,} tokens of KV cache",
        tables=(
            Numbers(
                "policies",
                "All requests; deadlines met by those that have one",
                totals,
                {
                    "policy": "policy",
                    "deadlines_met": "met",
                    "ttft_s_mean": "TTFT mean (s)",
                    "ttft_s_p95": "TTFT p95 (s)",
                    "wait_s_max": "wait max (s)",
                    "overtaken_max": "overtaken",
                    "hit_rate": "hit rate",
                },
            ),
            Numbers(
                "classes",
                "By class",
                parts,
                {
                    "policy": "policy",
                    "class": "class",
                    "deadlines_met": "met",
                    "ttft_s_p50": "TTFT p50 (s)",
                    "ttft_s_p95": "TTFT p95 (s)",
                    "wait_s_max": "wait max (s)",
                },
            ),
        ),
        figure=figure,
        caption=(
            "A deadline counts from when the request is due to its last token; batch has none. Shortest service knows "
            "the answer's length, as no real engine does. Wait: from sending to the first step."
        ),
        headline=headline(totals, "deadlines_met", "policy"),
    )


def _latencies(found: Simulation, deadline_s: Floats, classes: npt.NDArray[np.str_]) -> pd.DataFrame:
    times = found.requests.select(["sent_s", "first_token_s", "finished_s"]).to_pandas()
    e2e_s = times["finished_s"] - times["sent_s"]
    return pd.DataFrame(
        {
            "class": classes,
            "deadline_s": deadline_s,
            "met": e2e_s <= deadline_s,
            "ttft_s": times["first_token_s"] - times["sent_s"],
            "e2e_s": e2e_s,
            "wait_s": waits_s(found),
        }
    )


def _bars(panel: Axes, values: pd.DataFrame) -> None:
    """Groups of bars, a group per policy and a bar per class."""
    count = len(values.columns)
    y = np.arange(len(values))
    for i, name in enumerate(values.columns):
        panel.barh(
            y + (i - (count - 1) / 2) * 0.8 / count,
            values[name],
            height=0.8 / count,
            color=FILLS[i % len(FILLS)],
            edgecolor="black",
            hatch=HATCHES[i % len(HATCHES)] if i > 2 else "",
            linewidth=0.4,
            label=str(name),
        )
    panel.set_yticks(y, values.index, fontsize=9)
    panel.invert_yaxis()
