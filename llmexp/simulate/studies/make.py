"""Makes a study of the simulator: simulates, and leaves tables, figure and MLflow run."""

import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from llmexp import tracking
from llmexp.errors import ConfigError
from llmexp.prepare import require_writable, timestamp
from llmexp.report.table import WIDTH, number
from llmexp.schema.config import Config
from llmexp.simulate.errors import RequestNeverFitsError, TokenBudgetTooSmallError
from llmexp.simulate.studies.block_size import block_size
from llmexp.simulate.studies.chunked_prefill import chunked_prefill
from llmexp.simulate.studies.findings import Findings, Numbers
from llmexp.simulate.studies.paged_memory import paged_memory
from llmexp.simulate.studies.radix_vs_blocks import radix_vs_blocks
from llmexp.simulate.studies.scheduler_policies import scheduler_policies
from llmexp.simulate.studies.scheduling_order import scheduling_order
from llmexp.simulate.studies.setting import Setting
from llmexp.simulate.studies.static_vs_continuous import static_vs_continuous

STUDIES: Mapping[str, Callable[[Setting, Any], Findings]] = {
    "paged_memory": paged_memory,
    "block_size": block_size,
    "radix_vs_blocks": radix_vs_blocks,
    "scheduling_order": scheduling_order,
    "static_vs_continuous": static_vs_continuous,
    "scheduler_policies": scheduler_policies,
    "chunked_prefill": chunked_prefill,
}
CONFIG, REPORT, SUMMARY, FIGURE = "config.yaml", "report.md", "simulation.json", "figure"


def make(setting: Setting) -> Path:
    """Makes the study that `simulation` asks for, shows its tables and returns its folder.

    Raises ConfigError or WorkloadError.
    """
    config = setting.config
    assert config.simulation is not None
    kind = config.simulation.kind
    require_writable(Path(config.runs_dir))
    tracking.require_ready(config.tracking)
    name = config.study.name or timestamp()
    folder = Path(config.runs_dir).absolute() / name
    if folder.exists() and not (folder / SUMMARY).exists():
        raise ConfigError(f"study.name: got {name}, whose folder holds something else; give another name")
    try:
        found = STUDIES[kind](setting, config.simulation)
    except (RequestNeverFitsError, TokenBudgetTooSmallError) as error:
        raise ConfigError(
            f"experiment: the workload does not fit the simulated engine ({error}); ask for shorter requests, or raise "
            "what is too small of the memories and budgets in simulation, kv.num_blocks and "
            "scheduler.max_num_batched_tokens"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    write(found, config, folder)
    console = Console(width=None if Console().is_terminal else WIDTH)
    for numbers in found.tables:
        console.print(table(numbers))
    console.print(f"SIMULATED: {found.setting}", highlight=False)
    console.print(f"Folder: {folder}", highlight=False, soft_wrap=True)
    if config.tracking.enabled:
        tracking.log_simulation(config, name, found.title, found.headline, folder)
        console.print(f"MLflow: {tracking.ui_command(config.tracking)}", highlight=False, soft_wrap=True)
    return folder


def write(found: Findings, config: Config, folder: Path) -> None:
    """Writes config.yaml, simulation.json, report.md, each table as CSV and Parquet, and the figure as PNG and SVG."""
    from matplotlib import rc_context

    (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))
    for numbers in found.tables:
        numbers.frame.to_csv(folder / f"{numbers.name}.csv", index=False)
        numbers.frame.to_parquet(folder / f"{numbers.name}.parquet", index=False)
    width = found.figure.get_size_inches()[0]
    found.figure.suptitle(f"SIMULATED: {found.title}", fontsize=12, x=0.01, ha="left")
    caption = "\n".join(textwrap.wrap(f"{found.setting}. {found.caption}", int(width * 14)))
    found.figure.supxlabel(caption, fontsize=8, x=0.01, ha="left")
    for suffix in ("png", "svg"):
        with rc_context({"svg.hashsalt": found.title}):
            clock = {"Date": None} if suffix == "svg" else None
            found.figure.savefig(folder / f"{FIGURE}.{suffix}", dpi=100, metadata=clock)
    (folder / REPORT).write_text(markdown(found))
    summary = {
        "title": found.title,
        "simulated": True,
        "setting": found.setting,
        "headline": dict(found.headline),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def table(numbers: Numbers) -> Table:
    """The table for a terminal."""
    drawn = Table(title=f"SIMULATED: {numbers.title}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, heading in numbers.shown.items():
        words = pd.api.types.is_string_dtype(numbers.frame[column])
        drawn.add_column(heading, justify="left" if words else "right")
    for row in _cells(numbers):
        drawn.add_row(*row)
    return drawn


def markdown(found: Findings) -> str:
    """The report: setting, tables, figure."""
    parts = [f"# SIMULATED: {found.title}", f"{found.setting}.", f"![{found.title}]({FIGURE}.png)", found.caption]
    for numbers in found.tables:
        words = [pd.api.types.is_string_dtype(numbers.frame[column]) for column in numbers.shown]
        lines = [
            f"**{numbers.title}**\n",
            "| " + " | ".join(numbers.shown.values()) + " |",
            "| " + " | ".join("---" if word else "---:" for word in words) + " |",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in _cells(numbers)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cells(numbers: Numbers) -> list[list[str]]:
    rows = numbers.frame[list(numbers.shown)].itertuples(index=False)
    return [[_cell(value) for value in row] for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) else number(float(value))
