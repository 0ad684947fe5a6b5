"""Whether arms answer alike: question by question, where the workload has right answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from llmexp.analyze.pairs import Cell, Pairing
from llmexp.errors import ResultError
from llmexp.measure.accuracy import ANSWERS_SCHEMA, Agreement, agreement, one_round
from llmexp.results import ANSWERS, RunResult


@dataclass(frozen=True)
class PairAnswers:
    """One pair of runs: an arm (second) beside the baseline (first), in the first valid round of each.

    McNemar's test takes questions for independent draws; it is made per pair and not adjusted over pairs.
    """

    cell: Cell
    arm: str
    trial: int
    agreement: Agreement


def pair_answers(pairings: Sequence[Pairing]) -> tuple[PairAnswers, ...]:
    """Agreement of every pair of runs that kept answers."""
    return tuple(
        PairAnswers(pairing.cell, pairing.arm, pair.trial, agreement(_first(pair.baseline), _first(pair.treatment)))
        for pairing in pairings
        for pair in pairing.pairs
        if all((run.folder / ANSWERS).exists() for run in (pair.baseline, pair.treatment))
    )


def _first(run: RunResult) -> pa.Table:
    valid = next(one.index for one in run.rounds if one.valid)
    path = run.folder / ANSWERS
    try:
        return one_round(pq.read_table(path).cast(ANSWERS_SCHEMA), valid)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ResultError(f"{path}: not the answers of a run ({str(error).partition(chr(10))[0]})") from None
