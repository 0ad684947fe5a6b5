"""What a user may write of a study: each finding in a sentence with its evidence."""

from collections.abc import Iterator
from typing import Any

from llmexp.analyze.compare import Comparison, Effect, scale_of
from llmexp.analyze.pairs import Pairing, cell_label
from llmexp.report.table import HEADLINES, amount, interval, number, over, ratio, replication
from llmexp.results import RunResult
from llmexp.schema.study import Claim
from llmexp.words import count


def sentence(comparison: Comparison, pairing: Pairing, measure: str) -> str:
    """What a user may write about one measure of one arm in one cell: the finding, or that there is none."""
    return f"{_where(comparison, pairing)}{_finding(comparison, pairing, measure)}"


def _where(comparison: Comparison, pairing: Pairing) -> str:
    """The cell, where there is more than one."""
    label = comparison.label(pairing.cell)
    return "" if label == cell_label({}) else f"{label}: "


def _finding(comparison: Comparison, pairing: Pairing, measure: str) -> str:
    row = comparison.row(measure, pairing.cell, pairing.arm)
    subject, name, base = f"{comparison.factor}={pairing.arm}", HEADLINES.get(measure, measure), comparison.baseline
    if row is None and pairing.shortage:
        return f"{pairing.shortage}."
    if row is None:
        return f"nothing can be said of {name} under {subject}: {_no_row(pairing)}."
    of_base = f"{ratio(row.estimate)} times that of {base}"
    if row.scale == "difference":
        of_base = f"{amount(row.estimate, row)} from that of {base}"
    rises = row.estimate > (1 if row.scale == "ratio" else 0)
    verb = "raised" if rises else "lowered"
    by_how_much = f"{'' if rises else 'to '}{ratio(row.estimate)} times"
    if row.scale == "difference":
        by_how_much = f"by {number(abs(row.estimate))}"
    if row.deterministic:
        changed = f"{verb} {name} {by_how_much}" if _changes(row) else f"left {name} as it was"
        evidence = f"{count(row.trials, 'trial')} alike{_left_out(row)}{_contract(pairing)}"
        return f"in the simulation {subject} {changed} (deterministic: {evidence})."
    if not row.replicated:
        doubt = "others may differ" if row.simulated else "it may be noise"
        single = f" ({' and '.join(amount(value, row) for value in row.per_trial)})" if row.trials > 1 else ""
        return f"{name} under {subject} was {of_base}{single}: {replication(row.trials, row.simulated)}, so {doubt}."
    evidence = (
        f"{comparison.confidence:.0%} interval{over(comparison)} {interval(row)}, {count(row.trials, 'trial')}"
        f"{_left_out(row)}{_contract(pairing)}{_throttled(pairing)}"
    )
    if row.verdict == "equivalent":
        return f"{subject} left {name} within {comparison.margin:.0%} of {base} ({of_base}, {evidence})."
    if row.verdict not in ("improves", "regresses"):
        return f"we cannot tell whether {subject} changes {name} ({of_base}, {evidence})."
    return f"{subject} {verb} {name} {by_how_much} ({evidence})."


def _changes(row: Effect) -> bool:
    return abs(row.estimate - (1 if row.scale == "ratio" else 0)) > 1e-9


def http_costs(comparison: Comparison) -> Iterator[str]:
    """What HTTP costs, a sentence a cell, where vLLM's server and AsyncLLM are compared."""
    for pairing in comparison.pairings:
        arms = (comparison.baseline, pairing.arm)
        row = comparison.row("throughput_req_per_s", pairing.cell, pairing.arm)
        if comparison.factor != "engine" or {*arms} != {"vllm_server", "vllm_async"} or row is None:
            continue
        # Served throughput over AsyncLLM's, with the ends of its interval.
        turned = arms[0] == "vllm_server"
        low, high = (row.high, row.low) if turned else (row.low, row.high)
        kept, low, high = (1 / value if turned and value else value for value in (row.estimate, low, high))
        cost = _percent(1 - (kept or 1))
        if low is None or high is None:
            found = f"HTTP costs {cost} of the throughput ({replication(row.trials)})"
        else:
            ends = f"{_percent(1 - high)} to {_percent(1 - low)}"
            evidence = f"{comparison.confidence:.0%} interval {ends}, {count(row.trials, 'trial')}"
            found = f"HTTP costs {cost} of the throughput ({evidence})"
            if row.verdict == "equivalent":
                found = f"HTTP costs no throughput beyond the margin of {comparison.margin:.0%} ({cost}, {evidence})"
            elif row.verdict == "inconclusive":
                found = f"whether HTTP costs throughput cannot be told ({cost}, {evidence})"
        waits = [
            f"{served - direct:+.1f} ms of {name} ({number(served)} served, {number(direct)} by AsyncLLM)"
            for name, measure in (("TTFT", "ttft_ms_p50"), ("e2e latency", "e2e_ms_p50"))
            if (latency := comparison.row(measure, pairing.cell, pairing.arm)) is not None
            for served, direct in [_served_and_direct(latency, turned)]
        ]
        yield f"{_where(comparison, pairing)}{found}" + (
            f", and at the median {' and '.join(waits)}." if waits else "."
        )


def _percent(share: float) -> str:
    return f"{round(100 * share)}%"


def _served_and_direct(row: Effect, turned: bool) -> tuple[float, float]:
    means = (row.baseline_mean, row.treatment_mean)
    return means if turned else (means[1], means[0])


def claim_text(claim: Claim) -> str:
    """`throughput_req_per_s higher than 1.5 times the baseline, where max_num_seqs=128`."""
    where = f", where {cell_label(claim.cell)}" if claim.cell else ""
    if claim.direction == "equivalent":
        return f"{claim.measure} equivalent to the baseline{where}"
    if claim.threshold is None:
        return f"{claim.measure} {claim.direction} than the baseline{where}"
    if scale_of(claim.measure) == "ratio":
        return f"{claim.measure} {claim.direction} than {claim.threshold:g} times the baseline{where}"
    return f"{claim.measure}, less the baseline's, {claim.direction} than {claim.threshold:g}{where}"


def _left_out(row: Effect) -> str:
    missing = row.planned_trials - row.trials
    return f", {missing} of {row.planned_trials} left out" if missing else ""


def _contract(pairing: Pairing) -> str:
    """`, contract held in all` if the engine counted its hits in every round used and they were as they
    must be."""
    rounds = [one for pair in pairing.pairs for run in (pair.baseline, pair.treatment) for one in _valid_rounds(run)]
    checked = [one for one in rounds if one.contract.get("observed_hit_tokens") is not None]
    if checked and len(checked) == len(rounds) and all(one.contract.get("held") for one in checked):
        return ", contract held in all"
    return ", contract not checked" if not checked else ""


def _throttled(pairing: Pairing) -> str:
    """`, 2 runs throttled` where heat or a fault slowed a GPU."""
    runs = [run for pair in pairing.pairs for run in (pair.baseline, pair.treatment)]
    throttled = sum(bool(run.engine.get("throttled")) for run in runs)
    return f", {count(throttled, 'run')} throttled" if throttled else ""


def _valid_rounds(run: RunResult) -> Iterator[Any]:
    return (one for one in run.rounds if one.valid)


def _no_row(pairing: Pairing) -> str:
    return pairing.refused[0] if pairing.refused else "no valid pair has it"
