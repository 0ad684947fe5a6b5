"""A step's token budget, with chunked prefill and without: who waits, the new requests or the running ones?"""

import numpy as np
import pandas as pd

from llmexp.progress import each
from llmexp.schema.load import Constant, Gamma, Poisson
from llmexp.schema.simulation import ChunkedPrefill
from llmexp.simulate.requests import Requests
from llmexp.simulate.simulation import simulate
from llmexp.simulate.studies.drawing import curves, labelled, line, logarithmic, panels, tried
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.summary import inter_token_s, summary


def chunked_prefill(setting: Setting, study: ChunkedPrefill) -> Findings:
    """Serves the workload with every budget, with chunks, and without where the longest prompt fits one step."""
    cost, requests = setting.cost(), setting.requests()
    at_once = setting.requests(due_s=np.zeros(len(requests)))
    cases = [
        (chunked, budget)
        for chunked in (True, False)
        for budget in study.token_budgets
        if chunked or budget >= longest(requests)
    ]
    rows = []
    for chunked, budget in each("Simulating token budgets", cases):
        engine = setting.engine(max_num_batched_tokens=budget, enable_chunked_prefill=chunked)
        found = simulate(requests, engine, cost, max_concurrency=setting.max_concurrency)
        numbers, gaps_ms = summary(found), 1000 * inter_token_s(found)
        rows.append(
            {
                "chunked_prefill": "on" if chunked else "off",
                "max_num_batched_tokens": budget,
                "ttft_s_p50": numbers["ttft_s_p50"],
                "ttft_s_p95": numbers["ttft_s_p95"],
                "itl_ms_p50": float(np.quantile(gaps_ms, 0.5)),
                "itl_ms_p99": float(np.quantile(gaps_ms, 0.99)),
                "itl_ms_max": float(gaps_ms.max()),
                "request_throughput": numbers["request_throughput"],
                "preemptions": numbers["preemptions"],
                "at_once_request_throughput": summary(simulate(at_once, engine, cost))["request_throughput"],
            }
        )
    frame = pd.DataFrame(rows)
    figure, (first, between, rate) = panels(3, height=3.9, width=12.5)
    for place, (switch, some) in enumerate(curves(frame, "chunked_prefill")):
        x = some["max_num_batched_tokens"]
        label = "chunked prefill" if switch == "on" else "whole prefills"
        line(first, place, x, some["ttft_s_p50"], f"{label}, p50")
        line(first, place + 2, x, some["ttft_s_p95"], f"{label}, p95")
        line(between, place, x, some["itl_ms_p50"], f"{label}, p50")
        line(between, place + 2, x, some["itl_ms_p99"], f"{label}, p99")
        line(rate, place, x, some["at_once_request_throughput"], label)
    x_label = "max_num_batched_tokens"
    labelled(first, "Time to first token", x_label, "seconds")
    labelled(between, "Inter-token latency", x_label, "milliseconds")
    labelled(rate, "Throughput, all requests at once", x_label, "requests per second")
    for panel in (first, between, rate):
        tried(panel, study.token_budgets)
        panel.legend(fontsize=8)
    logarithmic(first, "y")
    logarithmic(between, "y")
    rate.set_ylim(bottom=0)
    return Findings(
        title="Token budget of a step, with chunked prefill and without",
        setting=(
            f"{setting.described()}, {_arriving(setting)}; max_num_seqs={setting.config.max_num_seqs}; "
            f"{setting.engine_described()}"
        ),
        tables=(
            Numbers(
                "budgets",
                f"The longest request has {longest(requests):,} tokens, which one step must hold without chunks",
                frame,
                {
                    "chunked_prefill": "chunks",
                    "max_num_batched_tokens": "budget",
                    "ttft_s_p50": "TTFT p50 (s)",
                    "ttft_s_p95": "TTFT p95 (s)",
                    "itl_ms_p50": "ITL p50 (ms)",
                    "itl_ms_p99": "ITL p99 (ms)",
                    "at_once_request_throughput": "req/s at once",
                },
            ),
        ),
        figure=figure,
        caption=(
            "Inter-token latency: every gap between two tokens of a request, all requests together. Right: the same "
            "requests without arrivals, so that the engine is never idle."
        ),
        headline={
            **headline(frame, "ttft_s_p95", "chunked_prefill", "max_num_batched_tokens"),
            **headline(frame, "itl_ms_p99", "chunked_prefill", "max_num_batched_tokens"),
            **headline(frame, "at_once_request_throughput", "chunked_prefill", "max_num_batched_tokens"),
        },
    )


def longest(requests: Requests) -> int:
    """Tokens that a step must hold without chunks: a preempted request computes its answer again too."""
    return int((requests.prompt_tokens + requests.output_tokens - 1).max())


def _arriving(setting: Setting) -> str:
    load = setting.config.load
    return f"{load.rate:g} a second" if isinstance(load, Constant | Poisson | Gamma) else f"load={load.kind}"
