"""Which runs of a study need not be made again, and what one that was interrupted has come to."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llmexp import fingerprint, results
from llmexp.errors import ResultError
from llmexp.prepare import Preparation
from llmexp.words import count


def is_done(run: Preparation) -> bool:
    """Whether a run is complete and its files are what it wrote.

    Where a repetition would be made on this machine, its hardware and software count as well.
    Raises ResultError if the run is complete but measured something else than would be measured now.
    """
    try:
        found = results.load_run(run.folder)
    except ResultError:
        return False
    if found.status not in ("complete", "refused") or not results.is_intact(found):
        return False
    try:
        if found.fingerprint == run.fingerprint or (not run.here and found.config["run"].get("planned") == run.asked):
            return True
        changed = _changed(found, run) or ["the model's files"]
    except (KeyError, TypeError, AttributeError):
        changed = [f"its {results.SUMMARY} is of another version of llmexp"]
    raise ResultError(
        f"study {run.study}: {run.name} was measured under other conditions ({'; '.join(changed[:5])}); "
        "undo the change, or give the study another name with study.name"
    )


def _changed(found: results.RunResult, run: Preparation) -> list[str]:
    before = fingerprint.asked(found.config, run.model, found.workload_sha256)
    now = fingerprint.asked(run.config.model_dump(mode="json"), run.model, run.workload.sha256)
    if run.here:
        before |= fingerprint.conditions(found.environment)
        now |= fingerprint.conditions(run.environment)
    return fingerprint.difference(before, now)


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a run that came to its end, whatever it measured."""
    try:
        return results.load_run(folder).status == "complete"
    except ResultError:
        return False


def interrupted(folders: Sequence[Path]) -> str:
    """What the runs in these folders have come to, for whoever interrupted them."""
    recorded = sum(_recorded_requests(folder / results.TRACE) for folder in folders)
    if not recorded:
        return "interrupted before anything was measured"
    where = folders[0] if len(folders) == 1 else folders[0].parent
    return f"interrupted; what was measured is kept: {count(recorded, 'request')} in {where}"


def _recorded_requests(trace: Path) -> int:
    try:
        return int(pq.read_metadata(trace).num_rows)
    except (OSError, pa.ArrowException):
        return 0
