"""Batches that end together, batches that change with every step (Yu et al. 2022, Orca), and vLLM's, which also
splits prefills (Agrawal et al. 2024, Sarathi-Serve), as requests come faster."""

from typing import Any

import numpy as np
import pandas as pd

from llmexp.progress import each
from llmexp.schema.simulation import StaticVsContinuous
from llmexp.simulate.simulation import Simulation, simulate
from llmexp.simulate.studies.drawing import curves, labelled, line, logarithmic, panels
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting, poisson
from llmexp.simulate.summary import inter_token_s, summary


def static_vs_continuous(setting: Setting, study: StaticVsContinuous) -> Findings:
    """Serves the workload at every rate with every way of batching."""
    cost = setting.cost()
    most = int(setting.workload.prompt_tokens.max()) * setting.config.max_num_seqs  # so that a batch can be full
    batchings: dict[str, dict[str, Any]] = {
        "static": {"batching": "static", "enable_chunked_prefill": False, "max_num_batched_tokens": most},
        "continuous": {"enable_chunked_prefill": False, "max_num_batched_tokens": study.whole_batched_tokens},
        "chunked": {},
    }
    requests = {rate: setting.requests(due_s=poisson(setting, rate)) for rate in study.rates_per_s}
    rows = []
    for rate, name in each("Simulating ways of batching", [(rate, name) for rate in requests for name in batchings]):
        found = simulate(requests[rate], setting.engine(**batchings[name]), cost)
        numbers = summary(found)
        rows.append(
            {
                "rate_per_s": rate,
                "batching": name,
                "request_throughput": numbers["request_throughput"],
                "normalised_latency_ms": 1000 * normalised_latency_s(found),
                "ttft_s_p50": numbers["ttft_s_p50"],
                "ttft_s_p95": numbers["ttft_s_p95"],
                "itl_ms_p99": 1000 * float(np.quantile(inter_token_s(found), 0.99)),
                "running_mean": numbers["running_mean"],
            }
        )
    frame = pd.DataFrame(rows)
    figure, (done, latency, first, between) = panels(2, rows=2, height=3.4, width=11)
    for place, (label, some) in enumerate(curves(frame, "batching")):
        rates = some["rate_per_s"]
        line(done, place, rates, some["request_throughput"], label)
        line(latency, place, rates, some["normalised_latency_ms"], label)
        line(first, place, rates, some["ttft_s_p95"], label)
        line(between, place, rates, some["itl_ms_p99"], label)
    fastest = float(frame["request_throughput"].max())
    done.plot([0, fastest], [0, fastest], color="0.6", linewidth=0.8, linestyle=":")
    x = "arrivals (requests per second)"
    labelled(done, "Throughput", x, "requests per second")
    labelled(latency, "Latency per output token", x, "mean of e2e / output tokens (ms)")
    labelled(first, "Time to first token, p95", x, "seconds")
    labelled(between, "Inter-token latency, p99", x, "milliseconds")
    for panel in (done, latency, first, between):
        panel.set_xlim(left=0)
    done.set_ylim(bottom=0)
    for panel in (latency, first, between):
        logarithmic(panel, "y")
    done.legend(fontsize=9)
    peak = frame.loc[frame.groupby("batching", sort=False)["request_throughput"].idxmax()]
    return Findings(
        title="Static, continuous and chunked batching",
        setting=(
            f"{setting.described()}, Poisson arrivals; max_num_seqs={setting.config.max_num_seqs}, "
            f"max_num_batched_tokens={setting.engine().max_num_batched_tokens} in chunks and "
            f"{study.whole_batched_tokens} whole; {setting.engine_described()}"
        ),
        tables=(
            Numbers(
                "batchings",
                "Throughput and latency as requests come faster",
                frame,
                {
                    "rate_per_s": "arrivals/s",
                    "batching": "batching",
                    "request_throughput": "served/s",
                    "normalised_latency_ms": "e2e/token (ms)",
                    "ttft_s_p50": "TTFT p50 (s)",
                    "ttft_s_p95": "TTFT p95 (s)",
                    "itl_ms_p99": "ITL p99 (ms)",
                },
            ),
        ),
        figure=figure,
        caption=(
            "Static: a batch is prefilled in one step and ends together. Continuous: requests join at any step and are "
            "prefilled whole. Chunked: in pieces, beside decodes. Dotted: all that arrives is served at once. "
            "Throughput counts until the last completion, so that the time to drain the queue lowers it."
        ),
        headline=headline(peak, "request_throughput", "batching"),
    )


def normalised_latency_s(simulation: Simulation) -> float:
    """Mean over requests of the time from sending to the last token, per output token (Yu et al. 2022)."""
    times = {name: simulation.requests[name].to_numpy() for name in ("sent_s", "finished_s", "output_tokens")}
    return float(np.mean((times["finished_s"] - times["sent_s"]) / times["output_tokens"]))
