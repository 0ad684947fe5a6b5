"""`llmexp audit`: what prefix caching can do for a workload, without an engine."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmexp import models
from llmexp.arguments import Arguments
from llmexp.compose import compose
from llmexp.errors import ConfigError
from llmexp.measure.limits import kv_bytes_per_token
from llmexp.schema.load import ClosedLoop
from llmexp.workloads.audit_report import JSON, PLOT, report
from llmexp.workloads.build import build


def audit(arguments: Sequence[str]) -> None:
    """Builds the workload that a run with these overrides would send, and prints its audit.

    Raises ConfigError or WorkloadError.
    """
    options, overrides = _parser().with_overrides(arguments)
    config = compose(overrides)
    model = models.locate(config.model)
    workload = build(config.workload, model)
    concurrency = config.load.concurrency if isinstance(config.load, ClosedLoop) else config.max_num_seqs
    block_sizes = options.block_sizes or [config.kv.block_size or 16]
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: got {options.out!r}, which is no folder to write to ({error.strerror})") from None
    report(workload, block_sizes, options.capacities, out, concurrency, kv_bytes_per_token(config, model.config))


def _parser() -> Arguments:
    parser = Arguments(
        prog="llmexp audit",
        usage="llmexp audit [--block-sizes N …] [--capacities TOKENS …] [--out FOLDER] KEY=VALUE …",
        description="What prefix caching can do for the workload of a run with these overrides: a table, "
        f"{JSON} and {PLOT}. Nothing is sent.",
    )
    for option, meaning in (
        ("--block-sizes", "KV block sizes in tokens (default: kv.block_size)"),
        ("--capacities", "KV cache sizes in tokens (default: powers of 2, up to what holds the whole workload)"),
    ):
        parser.add_argument(option, type=_size, nargs="+", metavar="N", default=[], help=meaning)
    parser.add_argument("--out", metavar="FOLDER", default=".", help="where the files go (default: here)")
    return parser


def _size(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:20]) < 2**40:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}; accepted is a number of tokens, from 1 to {2**40}")
    return int(text)
