"""Accuracy of multiple-choice answers, and whether two arms answer alike."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import stats

from llmexp.errors import ResultError
from llmexp.workloads.workload import Workload

LETTERS = ("A", "B", "C", "D")
ANSWERS_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("request", pa.int32()),
        ("question", pa.string()),
        ("subject", pa.string()),
        ("answer", pa.string()),  # the right letter
        ("generated", pa.string()),  # the letter generated, with or without a leading space; null: none of the four
        ("likeliest", pa.string()),  # of the four, by log probability; null: none among the alternatives
        ("answer_logprob", pa.float64()),  # of the right letter among the four; null: not among the alternatives
        ("right", pa.bool_()),  # the generated letter is the right one
    ]
)


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers and its 95% interval (Wilson, 1927)."""

    right: int
    n: int
    value: float
    low: float
    high: float


def accuracy(right: int, n: int) -> Accuracy:
    """The accuracy of `right` answers out of `n`. Raises ResultError if n is 0."""
    if n == 0:
        raise ResultError("no answers to score")
    interval = stats.binomtest(right, n).proportion_ci(method="wilson")
    return Accuracy(right, n, right / n, float(interval.low), float(interval.high))


def score(workload: Workload, trace: pa.Table) -> pa.Table:
    """Each request's answer by round and request, `ANSWERS_SCHEMA`.

    The workload has the columns question, subject and answer; the trace may hold several rounds of it.
    A request that failed has no generated letter and counts as wrong, like any other text than a letter.
    """
    columns = {name: workload.columns[name] for name in ("question", "subject", "answer")}
    rows = []
    for row in trace.select(["round", "request", "text", "logprobs"]).to_pylist():
        facts = {name: str(values[row["request"]]) for name, values in columns.items()}
        logprobs = letter_logprobs(row["logprobs"])
        generated = letter(row["text"])
        rows.append(
            {
                "round": row["round"],
                "request": row["request"],
                **facts,
                "generated": generated,
                "likeliest": max(logprobs, key=lambda each: logprobs[each]) if logprobs else None,
                "answer_logprob": logprobs.get(facts["answer"]),
                "right": generated == facts["answer"],
            }
        )
    return pa.Table.from_pylist(rows, ANSWERS_SCHEMA).sort_by([("round", "ascending"), ("request", "ascending")])


def is_scored(workload: Workload) -> bool:
    """Whether a workload's requests have right answers."""
    return "answer" in workload.columns


def one_round(answers: pa.Table, index: int) -> pa.Table:
    """The answers of one round: questions repeat from round to round, so more rounds are not more answers."""
    return answers.filter(pc.equal(answers["round"], index))


def accuracy_measures(answers: pa.Table) -> dict[str, float]:
    """The accuracies of one round with their intervals, by their names in `llmexp.measure.catalog`."""
    if not len(answers):
        return {}
    found = {"accuracy": _generated(answers), "accuracy_of_likeliest_letter": _likeliest(answers)}
    measures: dict[str, float] = {}
    for name, each in found.items():
        measures |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
    return measures


def changed_answers(answers: pa.Table) -> int:
    """Questions whose generated letter is not the same in every round. Greedy decoding should leave none."""
    letters = pc.fill_null(answers["generated"], "")
    table = pa.table({"question": answers["question"], "letter": letters})
    distinct = table.group_by("question").aggregate([("letter", "count_distinct")])
    return int(pc.sum(pc.greater(distinct["letter_count_distinct"], 1)).as_py() or 0)


def letter(text: str | None) -> str | None:
    """The letter that a generated token is, with or without a leading space."""
    bare = (text or "").removeprefix(" ")
    return bare if bare in LETTERS else None


def letter_logprobs(alternatives: str | None) -> dict[str, float]:
    """Log probability of each letter given that one of the four comes, from JSON of {token: log probability}.

    A letter's two spellings, with and without a leading space, add up. Letters beyond the alternatives that
    the engine reports are left out: their share is taken as nothing.
    """
    found: dict[str, list[float]] = {}
    for token, logprob in (json.loads(alternatives) if alternatives else {}).items():
        if each := letter(token):
            found.setdefault(each, []).append(logprob)
    if not found:
        return {}
    sums = {each: float(np.logaddexp.reduce(logprobs)) for each, logprobs in found.items()}
    total = float(np.logaddexp.reduce(list(sums.values())))
    return {each: logprob - total for each, logprob in sums.items()}


def by_subject(answers: pa.Table) -> dict[str, Accuracy]:
    """Accuracy of each subject."""
    frame = answers.select(["subject", "right"]).to_pandas()
    return {
        str(subject): accuracy(int(right.sum()), len(right)) for subject, right in frame.groupby("subject")["right"]
    }


def summary(answers: pa.Table) -> dict[str, Any]:
    """Accuracy by generated letter and by likeliest letter, in all and by subject, as plain values."""
    return {
        "accuracy": vars(_generated(answers)),
        "accuracy_of_likeliest_letter": vars(_likeliest(answers)),
        "no_letter": answers["generated"].null_count,
        "by_subject": {subject: vars(each) for subject, each in by_subject(answers).items()},
    }


def _generated(answers: pa.Table) -> Accuracy:
    return accuracy(int(pc.sum(answers["right"]).as_py() or 0), len(answers))


def _likeliest(answers: pa.Table) -> Accuracy:
    right = pc.equal(answers["likeliest"], answers["answer"])  # null where no letter is among the alternatives
    return accuracy(int(pc.sum(right).as_py() or 0), len(answers))


@dataclass(frozen=True)
class Agreement:
    """Two arms question by question.

    `same` counts equal generated letters, right or wrong. `p_value` is McNemar's exact test (McNemar, 1947) of
    equal accuracy: given the questions that exactly one arm gets right, each arm is as likely to be that one.
    """

    n: int
    same: int
    both_right: int
    only_first_right: int
    only_second_right: int
    both_wrong: int
    p_value: float
    differing: tuple[str, ...]  # questions whose generated letters differ

    @property
    def share(self) -> float:
        """Share of questions with the same generated letter."""
        return self.same / self.n


def agreement(first: pa.Table, second: pa.Table) -> Agreement:
    """Compares two arms' answers to the same questions, one round of each.

    Raises ResultError if the questions are not the same or come more than once.
    """
    a, b = (_by_question(answers) for answers in (first, second))
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())
        raise ResultError(f"the arms answered different questions; {len(odd)} are in one only, such as {odd[0]}")
    right = np.array([(a[question]["right"], b[question]["right"]) for question in a], bool)
    differing = tuple(question for question in a if a[question]["generated"] != b[question]["generated"])
    only_first, only_second = _only(right, 0), _only(right, 1)
    odd_ones = only_first + only_second
    return Agreement(
        n=len(a),
        same=len(a) - len(differing),
        both_right=int(right.all(axis=1).sum()),
        only_first_right=only_first,
        only_second_right=only_second,
        both_wrong=int((~right).all(axis=1).sum()),
        p_value=float(stats.binomtest(only_first, odd_ones).pvalue) if odd_ones else 1.0,
        differing=differing,
    )


def _only(right: NDArray[np.bool_], arm: int) -> int:
    return int((right[:, arm] & ~right[:, 1 - arm]).sum())


def _by_question(answers: pa.Table) -> dict[str, Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = answers.to_pylist()
    if not rows:
        raise ResultError("no answers to compare")
    found = {str(row["question"]): row for row in rows}
    if len(found) != len(rows):
        raise ResultError(f"{len(rows)} answers to {len(found)} questions; compare one round with one round")
    return found
