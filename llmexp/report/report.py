"""The report of a study on disk: Markdown, CSV, JSON and figures."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from llmexp.analyze.answers import pair_answers
from llmexp.analyze.claims import answer_claims, check_claims
from llmexp.analyze.compare import Comparison
from llmexp.analyze.requests import request_effects
from llmexp.analyze.study import Study
from llmexp.report.markdown import markdown
from llmexp.results import FIGURES, RunResult, sha256_of

_JSON = "report.json"


@dataclass(frozen=True)
class ReportFiles:
    """What `write_report` wrote. Figures come as PNG and SVG each."""

    folder: Path
    markdown: Path
    effects: Path
    runs: Path
    json: Path
    figures: tuple[Path, ...]


def write_report(study: Study, folder: str | Path, comparison: Comparison | None = None) -> ReportFiles:
    """Writes report.md, report.json, effects.csv, runs.csv and figures/ into `folder`.

    `comparison` is the study's own, or that of another swept key. Figures of an earlier report there that this one does
    not have are removed, unless somebody has changed them; whatever else the folder holds stays.

    Raises ConfigError if a claim names a measure, key or value that does not exist.
    """
    from matplotlib import rc_context

    from llmexp.report.plots import plots

    folder = Path(folder)
    earlier = _drawn_before(folder / _JSON)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    check_claims(study.record.claims, study.swept)
    comparison = comparison or study.compare()
    own = comparison if comparison.factor == study.record.compare else study.compare()
    answers = answer_claims(own, study.record.claims)
    requests = request_effects(comparison.pairings, confidence=comparison.confidence)
    questions = pair_answers(comparison.pairings)
    shown, figures = [], []
    for plot in plots(study, comparison):
        for kind in ("png", "svg"):
            figures.append(folder / FIGURES / f"{plot.name}.{kind}")
            with rc_context({"svg.hashsalt": plot.name}):
                plot.figure.savefig(figures[-1], dpi=120, metadata={"Date": None} if kind == "svg" else None)
        shown.append((plot.title, plot.caption, f"{FIGURES}/{plot.name}.png"))
    for name in earlier.keys() - {path.name for path in figures}:
        if sha256_of(folder / FIGURES / name) == earlier[name]:
            (folder / FIGURES / name).unlink(missing_ok=True)
    files = ReportFiles(
        folder=folder,
        markdown=folder / "report.md",
        effects=folder / "effects.csv",
        runs=folder / "runs.csv",
        json=folder / _JSON,
        figures=tuple(figures),
    )
    comparison.to_pandas().to_csv(files.effects, index=False)
    study.to_pandas().to_csv(files.runs, index=False)
    content = {
        "study": study.record,
        "comparison": comparison,
        "claims": answers,
        "requests": requests,
        "questions": questions,
        "figures": {path.name: sha256_of(path) for path in figures},
    }
    files.json.write_text(json.dumps(_plain(content), indent=2) + "\n")
    files.markdown.write_text(markdown(study, comparison, answers, requests, questions, shown))
    return files


def _drawn_before(report: Path) -> dict[str, str]:
    """The figures beside a report that is there already, by name with the SHA-256 of what it wrote."""
    try:
        figures = json.loads(report.read_bytes())["figures"]
        return {name: sha256 for name, sha256 in figures.items() if re.fullmatch(r"\w+\.(png|svg)", name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _plain(value: Any) -> Any:
    """JSON's own types; runs by their names, since their summaries stand in their folders."""
    if isinstance(value, RunResult):
        return value.name
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
