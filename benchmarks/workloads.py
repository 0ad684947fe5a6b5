"""Time and memory to build, audit and hash large workloads; each case in a process of its own.

    python benchmarks/workloads.py
    python benchmarks/workloads.py --mooncake conversation_trace.jsonl --mmlu FOLDER --model MODEL_FOLDER

Goals on two cores: 100,000 synthetic requests of 4,000 tokens in 60 s; Mooncake's conversation trace (12,031
requests, 145 million tokens) in 60 s and 2 GiB; all 14,042 MMLU prompts in 30 s.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmexp.models import Model
from llmexp.schema.workloads import Mmlu, Mooncake, UniquePrefix
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build

GIB = 2**30
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measure(config: Any, model: Model, block_size: int) -> dict[str, Any]:
    """Seconds to build, audit and hash one workload, and the process's peak memory in bytes."""
    marks = [time.perf_counter()]
    workload = build(config, model)
    marks.append(time.perf_counter())
    account = audit(workload, block_size)
    marks.append(time.perf_counter())
    digest = workload.sha256
    marks.append(time.perf_counter())
    return {
        "requests": len(workload),
        "prompt_tokens": account.prompt_tokens,
        "ideal_hit_rate": account.ideal_hit_rate,
        "ideal_block_hit_rate": account.ideal_block_hit_rate,
        "build_s": marks[1] - marks[0],
        "audit_s": marks[2] - marks[1],
        "hash_s": marks[3] - marks[2],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT,
        "sha256": digest,
    }


def main() -> None:
    options = _options()
    made = Model("made", Path("/nowhere"), 49152, frozenset(range(17)), 2**18, {})
    cases: list[tuple[str, Any, Model, int]] = [
        ("synthetic", UniquePrefix(num_requests=100_000, prefix_tokens=3900, suffix_tokens=100), made, 16)
    ]
    if options.mooncake:
        cases += [("mooncake", Mooncake(path=options.mooncake), made, size) for size in (512, 16)]
    if options.mmlu:
        facts = json.loads((Path(options.model) / "config.json").read_text())
        model = Model("model", Path(options.model), facts["vocab_size"], frozenset(), 2**18, facts)
        cases.append(("mmlu", Mmlu(path=options.mmlu, num_questions=None), model, 16))
    table = Table(title="Workloads: build, audit, hash", title_justify="left")
    for heading in ("case", "block", "requests", "tokens", "hit rate", "build", "audit", "hash", "peak"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for name, config, model, size in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(measure, (config, model, size))
        table.add_row(
            name,
            str(size),
            f"{result['requests']:,}",
            f"{result['prompt_tokens']:,}",
            f"{result['ideal_hit_rate']:.4f}",
            *(f"{result[each]:.1f} s" for each in ("build_s", "audit_s", "hash_s")),
            f"{result['peak_bytes'] / GIB:.2f} GiB",
        )
    Console(width=100).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mooncake", metavar="FILE", help="conversation_trace.jsonl")
    parser.add_argument("--mmlu", metavar="FOLDER", help="MMLU's CSV files")
    parser.add_argument("--model", metavar="FOLDER", help="a model folder with tokenizer.json, for MMLU")
    options = parser.parse_args()
    if options.mmlu and not options.model:
        parser.error("--mmlu needs --model")
    return options


if __name__ == "__main__":
    main()
