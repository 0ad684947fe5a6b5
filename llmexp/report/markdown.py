"""The report of a study in Markdown, fit for a pull request."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmexp.analyze.answers import PairAnswers
from llmexp.analyze.claims import Answer
from llmexp.analyze.compare import Comparison, Effect
from llmexp.analyze.intervals import MIN_TRIALS
from llmexp.analyze.pairs import cell_label
from llmexp.analyze.power import POWER
from llmexp.analyze.requests import RequestEffect
from llmexp.analyze.study import Study
from llmexp.measure.accuracy import accuracy
from llmexp.measure.catalog import MEASURES
from llmexp.report.blocks import by_cell, folded, section, table
from llmexp.report.evidence import device_section, engine_section, weaknesses
from llmexp.report.run_table import model_and_device
from llmexp.report.search import search_section
from llmexp.report.sentences import claim_text, http_costs, sentence
from llmexp.report.table import (
    HEADLINES,
    LATENCY_NAMES,
    amount,
    caption,
    interval,
    legend,
    number,
    over,
    ratio,
    simulated,
    to_markdown,
)
from llmexp.report.tensor_parallel import tensor_parallel_section
from llmexp.secrets import redacted
from llmexp.words import count

_MOST_NAMES = 100  # of questions; all of them stand in report.json


def markdown(
    study: Study,
    comparison: Comparison,
    answers: Sequence[Answer],
    requests: Sequence[RequestEffect],
    questions: Sequence[PairAnswers],
    figures: Sequence[tuple[str, str, str]],
) -> str:
    """The whole report. `figures` holds title, caption and path relative to the report of each."""
    parts = [
        *_head(study, comparison),
        *_claims(answers, comparison),
        *section("Cells", [to_markdown(comparison), caption(comparison)]),
        *tensor_parallel_section(study, comparison),
        *(search_section(study, comparison) or engine_section(study, comparison)),
        *device_section(study, comparison),
        *section("Figures", [f"![{title}]({path})\n\n*{text}*" for title, text, path in figures]),
        *_sensitivity(comparison),
        *_requests(requests, comparison),
        *_questions(questions, comparison),
        *_every_measure(comparison),
        *_runs(study, comparison),
        *section("Method", _method(comparison)),
        *section("Conditions", _conditions(study, comparison)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def brief(study: Study, comparison: Comparison) -> str:
    """The findings and the table of cells, for a page of few words such as a run's in MLflow."""
    _, *findings = _head(study, comparison)
    return "\n\n".join(part for part in (*findings, to_markdown(comparison), caption(comparison)) if part)


def _head(study: Study, comparison: Comparison) -> Iterator[str]:
    about = f": {comparison.factor}, against {comparison.baseline}" if comparison.factor else ""
    yield f"# {simulated(comparison)}{comparison.study}{about}"
    if "simulated" in comparison.kinds:
        what = "; ".join(dict.fromkeys(model_and_device(run) for run in study.runs if run.simulated))
        yield f"**These numbers come from a model of an engine ({what}), not from a measurement.**"
    yield legend(comparison)
    if study.search:
        yield f"**Found: {study.search.found}.**"
    if not comparison.factor:
        yield "Nothing is compared: the study has a single arm. What it measured is below."
    else:
        findings = (
            sentence(comparison, pairing, measure)
            for pairing in comparison.pairings
            for measure in (HEADLINES if len(comparison.pairings) == 1 else list(HEADLINES)[:1])
        )
        yield "\n".join(f"- {text}" for text in [*findings, *http_costs(comparison)])
    yield "\n".join(f"- {text}" for text in weaknesses(study, comparison))


def _claims(answers: Sequence[Answer], comparison: Comparison) -> Iterator[str]:
    if not answers:
        return
    lines = [
        (
            claim_text(answer.claim),
            f"**{answer.outcome}**",
            answer.reason,
            _evidence(answer.evidence, comparison),
            number(answer.q, 2),
        )
        for answer in answers
    ]
    tested = sum(answer.q is not None for answer in answers)
    note = (
        f"Evidence: effect, {comparison.confidence:.0%} interval and trials in each cell that the claim covers. "
        f"Outcomes hold at a false discovery rate of {1 - comparison.confidence:.0%} over "
        f"{count(tested, 'claim')} tested."
    )
    yield from section("Claims", [table(("claim", "answer", "why", "evidence", "q"), lines), note])


def _evidence(rows: Sequence[Effect], comparison: Comparison) -> str:
    return "; ".join(
        f"{row.arm}, {comparison.label(row.cell)}: {amount(row.estimate, row)} ({interval(row)}, n={row.trials})"
        for row in rows
    )


def _sensitivity(comparison: Comparison) -> Iterator[str]:
    """What the study could have seen: the noise between launches, and the effects and trials that follow."""
    replicated = [row for row in comparison.rows if row.detectable is not None and not row.simulated]
    rows = [row for row in replicated if row.measure in HEADLINES]
    if not rows:
        return
    lines = [
        (
            comparison.label(row.cell),
            row.arm,
            HEADLINES[row.measure],
            f"{ratio(1 / row.noise_floor)} to {ratio(row.noise_floor)}" if row.noise_floor else "-",
            ratio(row.detectable),
            str(row.trials_for_margin or "over 1000"),
        )
        for row in rows
    ]
    header = (
        "cell",
        "arm",
        "measure",
        "noise floor",
        "detectable",
        f"trials for {comparison.margin:.0%}",
    )
    note = (
        "Noise floor: ratio of two launches of the baseline that chance alone keeps to in "
        f"{comparison.confidence:.0%} of cases, an upper bound where trials differ in workload. Detectable: smallest "
        f"true ratio that this many trials find with {POWER:.0%} power, by the variance observed. Last: trials that a "
        f"true change of {comparison.margin:.0%} needs for the same."
    )
    yield from section("What this study can see", [table(*by_cell(header, lines)), note])


def _requests(effects: Sequence[RequestEffect], comparison: Comparison) -> Iterator[str]:
    if not effects:
        return
    lines = [
        (
            comparison.label(one.cell),
            one.arm,
            LATENCY_NAMES[one.measure],
            one.statistic,
            f"{ratio(one.estimate)} ({ratio(one.low)} to {ratio(one.high)})",
            f"{one.faster:.0%}",
            str(one.requests),
        )
        for one in effects
    ]
    note = (
        "The same request in both arms (paired: geometric mean of the ratios), and percentiles of both latency "
        f"distributions. {comparison.confidence:.0%} intervals by circular block bootstrap over requests: they say how "
        "much the requests sent decide, not what another launch would bring, and no verdict rests on them."
    )
    header = ("cell", "arm", "latency", "statistic", f"ratio to {comparison.baseline}", "faster", "requests")
    yield from section("Single requests", [table(*by_cell(header, lines)), note])


def _questions(pairs: Sequence[PairAnswers], comparison: Comparison) -> Iterator[str]:
    """Whether the arms answer alike, and which questions they answer differently."""
    if not pairs:
        return
    lines = []
    for pair in pairs:
        both = pair.agreement
        lines.append(
            (
                comparison.label(pair.cell),
                pair.arm,
                str(pair.trial),
                f"{both.same} of {both.n}",
                _accuracy(both.both_right + both.only_first_right, both.n),
                _accuracy(both.both_right + both.only_second_right, both.n),
                str(both.only_first_right),
                str(both.only_second_right),
                number(both.p_value, 2),
            )
        )
    base = comparison.baseline
    header = (
        *("cell", "arm", "trial", "same letter", f"accuracy of {base}", "accuracy of the arm"),
        *(f"only {base} right", "only the arm right", "McNemar's p"),
    )
    note = (
        "One round of each run, question by question; accuracies with Wilson's 95% interval. McNemar's exact "
        "test asks whether the questions that only one of the two gets right fall to either equally often; it is made "
        "for each pair by itself, not adjusted over pairs, and no verdict rests on it."
    )
    yield from section("Answers", [table(*by_cell(header, lines)), note, *_differing(pairs, comparison)])


def _accuracy(right: int, n: int) -> str:
    found = accuracy(right, n)
    return f"{number(found.value)} ({number(found.low)} to {number(found.high)})"


def _differing(pairs: Sequence[PairAnswers], comparison: Comparison) -> Iterator[str]:
    for pair in pairs:
        names = pair.agreement.differing
        if names:
            rest = f", and {len(names) - _MOST_NAMES} more in report.json" if len(names) > _MOST_NAMES else ""
            where = f"{pair.arm}, {comparison.label(pair.cell)}, trial {pair.trial}"
            title = f"{where}: {count(len(names), 'question')} answered differently"
            listed = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
            yield folded(title, f"{listed}{rest}")


def _every_measure(comparison: Comparison) -> Iterator[str]:
    if not comparison.rows:
        return
    yield "## Every measure"
    for pairing in comparison.pairings:
        rows = [row for row in comparison.rows if (row.cell, row.arm) == (pairing.cell, pairing.arm)]
        lines = [
            (
                f"{row.measure}{f' ({MEASURES[row.measure].unit})' if _unit(row.measure) else ''}",
                number(row.baseline_mean),
                number(row.treatment_mean),
                f"{amount(row.estimate, row)}{'' if row.scale == 'ratio' else ' diff.'}",
                interval(row),
                _bootstrap(row),
                f"{row.trials}/{row.planned_trials}",
                _q(row, row.q),
                _q(row, row.q_equivalent),
                row.verdict or "no direction",
            )
            for row in rows
        ]
        header = (
            "measure",
            f"{comparison.baseline}",
            pairing.arm,
            "effect",
            f"{comparison.confidence:.0%} interval{over(comparison)}",
            "bootstrap",
            "pairs",
            "q",
            "q equivalent",
            "verdict",
        )
        title = f"{comparison.factor}={pairing.arm}, {comparison.label(pairing.cell)}"
        yield folded(title, table(header, lines))


def _runs(study: Study, comparison: Comparison) -> Iterator[str]:
    planned = len(study.record.runs)
    short = [one for one in comparison.excluded if one.kind == "refused"]
    left_out = [one for one in comparison.excluded if one.kind != "refused"]
    used = planned - len(comparison.excluded)
    counted = [
        f"{planned} planned, {used} used",
        *([f"{len(short)} found too little memory to start"] if short else []),
    ]
    parts = [f"{', '.join(counted)}, {len(left_out)} left out of every comparison."]
    if left_out:
        lines = [(one.run, one.kind, "; ".join(one.reasons)) for one in left_out]
        parts.append(table(("run", "is", "because"), lines))
    if short:
        parts.append("What memory there was for the KV cache of those that did not start:")
        parts.append(table(("run", "found"), [(one.run, "; ".join(one.reasons)) for one in short]))
    refused = [
        (comparison.label(pairing.cell), pairing.arm, reason)
        for pairing in comparison.pairings
        for reason in pairing.refused
        if pairing.shortage is None
    ]
    if refused:
        parts.append("Pairs that could not be formed:")
        parts.append(table(("cell", "arm", "because"), refused))
    yield from section("Runs", parts)


def _method(comparison: Comparison) -> list[str]:
    if not comparison.factor:
        return ["Levels are means over the valid rounds of a run, then over trials."]
    sure, rate = f"{comparison.confidence:.0%}", f"{1 - comparison.confidence:.0%}"
    tested = f"{count(comparison.tested, 'comparison')} {'was' if comparison.tested == 1 else 'were'} tested together"
    simulation = (
        "A simulation is determined by its config and by what is sent: trials differ in the workload's seed alone. An "
        "effect that is the same in all of them is called deterministic, without interval or test, since repeating it "
        "shows nothing; other intervals are over workloads. What the launch of a real engine adds, none of them knows."
    )
    return [
        *([simulation] if "simulated" in comparison.kinds else []),
        "A pair is two valid runs of the same cell and trial that sent the same requests. Its effect is the log ratio "
        "of the arms' means over valid rounds, or their difference for measures that may be 0. The estimate is the "
        f"mean over trials; the interval is Student's t at {sure} over trials, from {MIN_TRIALS} trials on. The "
        "bootstrap of trials, then rounds, stands beside it; with few trials it is too narrow, and decides nothing.",
        f"{tested}: every measure with a better direction, in every cell and arm with {MIN_TRIALS} pairs or more. "
        f"Verdicts hold the false discovery rate at {rate} (Benjamini-Hochberg), among differences and among "
        f"equivalences (two one-sided tests within {comparison.margin:.0%}; for a difference, of the baseline's mean, "
        "and at least of one unit). An effect within the margin is equivalent even if it is not 0. A count that is "
        "the same in every trial is exact and needs no test. Intervals are not adjusted for the number of comparisons, "
        "so one may exclude 1 beside the verdict `inconclusive`.",
    ]


def _conditions(study: Study, comparison: Comparison) -> list[str]:
    parts = []
    if study.record.overrides:
        command = shlex.join(["python", "-m", "llmexp", "-m", *study.record.overrides])
        parts.append(f"Run again:\n\n```bash\n{command}\n```")
    folder = study.folder.relative_to(Path.cwd()) if study.folder.is_relative_to(Path.cwd()) else study.folder
    origin = [redacted(part) for part in study.origin] or [str(folder)]
    other = ["--compare", str(comparison.factor)] if comparison.factor != study.record.compare else []
    parts.append(f"This report again:\n\n```bash\n{shlex.join(['llmexp', 'report', *origin, *other])}\n```")
    found: dict[str, dict[str, None]] = {}
    for run in study.runs:
        for key, value in _flat({"environment": run.environment, "engine": run.engine}):
            found.setdefault(key, {})[value] = None
    lines = [(key, _values(list(values))) for key, values in found.items()]
    if lines:
        parts.append(folded("Hardware and software", table(("what", "value"), lines)))
    hashes = dict.fromkeys((f"{cell_label(run.cell)}, trial {run.trial}", run.workload_sha256) for run in study.runs)
    parts.append(folded("Workloads", table(("cell and trial", "SHA-256 of the requests sent"), list(hashes))))
    return parts


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves with their dotted keys, but for the two names on top."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _flat(value, "" if name in ("environment", "engine") else name)
        elif value not in (None, "", [], ()):
            yield name, value if isinstance(value, str) else json.dumps(value)


def _values(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    shown = ", ".join(values[:3]) + (", …" if len(values) > 3 else "")
    return f"{shown} (differs between runs)"


def _bootstrap(row: Effect) -> str:
    if row.bootstrap_low is None:
        return "-"
    return f"{amount(row.bootstrap_low, row)} to {amount(row.bootstrap_high, row)}"


def _q(row: Effect, value: float | None) -> str:
    return "-" if value is None else number(value, 2) if row.varies else "exact"


def _unit(measure: str) -> str:
    return MEASURES[measure].unit if measure in MEASURES else ""
