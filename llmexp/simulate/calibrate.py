"""Step costs and a front end's delays, fitted to measured ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from llmexp.simulate.cost import StepCost, Work
from llmexp.simulate.errors import CalibrationError
from llmexp.simulate.requests import Floats, Ints

TERMS = Work._fields
_FIXED, _COMPUTE, _MEMORY = (
    ("steps", "sampled"),
    ("prefill_tokens", "decode_tokens", "attended_pairs"),
    ("steps", "context_tokens"),
)
_ROUNDS = 30
_HUBER_SCALES = 3.0  # residuals beyond so many standard deviations count less


@dataclass(frozen=True)
class Calibration:
    """The fitted cost, and what it misses: measured minus predicted seconds of each step, shape (n,)."""

    cost: StepCost
    residuals_s: Floats
    measured_s: Floats

    @property
    def relative_error(self) -> float:
        """Mean of abs(residual) / measured."""
        return float(np.mean(np.abs(self.residuals_s) / self.measured_s))


def fit(
    work: Sequence[Work] | npt.NDArray[np.int64], measured_s: npt.ArrayLike, terms: Sequence[str] = TERMS
) -> Calibration:
    """Fit seconds per unit of each of ``terms`` (others cost nothing) to n steps: ``work`` (n, 6), columns as in
    ``Work``, and ``measured_s`` (n,).

    Non-negative least squares (Lawson and Hanson 1974, ``scipy.optimize.nnls``) of the *relative* errors, so that a
    short decode step counts as much as a long prefill; errors beyond three standard deviations count less (Huber
    1964), because an engine has hiccups and a machine other work. What those take is missing from the fit. Raises
    ``CalibrationError`` unless there are more steps than terms and the steps tell the terms apart.
    """
    unknown = set(terms) - set(TERMS)
    if unknown:
        raise CalibrationError(f"terms {sorted(unknown)} are none of {', '.join(TERMS)}")
    rows, seconds = _checked(work, measured_s, len(terms))
    columns = [TERMS.index(term) for term in terms]
    _require_apart(rows[:, columns] / seconds[:, None], terms)
    coefficients = np.zeros(len(TERMS))
    coefficients[columns] = _robust(rows[:, columns], seconds)
    return _calibration(StepCost(fixed=Work(*coefficients.tolist())), rows, seconds)


def fit_roofline(work: Sequence[Work] | npt.NDArray[np.int64], measured_s: npt.ArrayLike) -> Calibration | None:
    """Like ``fit``, but a step takes its arithmetic or its memory traffic, whichever is longer, on top of what is
    fixed: per step and sampled token; per token and attended pair; per step (weights) and context token (KV).

    Steps are divided between the two sides in turns with the fit. None where one side stays empty or does not
    determine its coefficients.
    """
    rows, seconds = _checked(work, measured_s, len(_FIXED + _COMPUTE + _MEMORY))
    fixed, compute, memory = (rows[:, [TERMS.index(term) for term in side]] for side in (_FIXED, _COMPUTE, _MEMORY))
    bound = rows[:, TERMS.index("prefill_tokens")] > np.median(rows[:, TERMS.index("prefill_tokens")])
    best: tuple[float, StepCost] | None = None
    for _ in range(_ROUNDS):
        design = np.hstack([fixed, compute * bound[:, None], memory * ~bound[:, None]])
        if np.linalg.matrix_rank(_unit(design / seconds[:, None])) < design.shape[1]:
            break
        found = _robust(design, seconds)
        parts = np.split(found, [len(_FIXED), len(_FIXED) + len(_COMPUTE)])
        cost = StepCost(_work(_FIXED, parts[0]), _work(_COMPUTE, parts[1]), _work(_MEMORY, parts[2]))
        error = _score(_calibration(cost, rows, seconds))
        if best is None or error < best[0]:
            best = error, cost
        again = compute @ parts[1] > memory @ parts[2]
        if (again == bound).all():
            break
        bound = again
    return None if best is None else _calibration(best[1], rows, seconds)


def fit_best(
    work: Sequence[Work] | npt.NDArray[np.int64], measured_s: npt.ArrayLike, terms: Sequence[str] = TERMS
) -> Calibration:
    """The linear cost in ``terms``, or of all terms the roofline where that leaves clearly less of the steps
    unexplained (2%)."""
    linear = fit(work, measured_s, terms)
    roofline = fit_roofline(work, measured_s) if set(terms) == set(TERMS) else None
    return roofline if roofline is not None and _score(roofline) < 0.98 * _score(linear) else linear


def fit_requests(rounds: Sequence[tuple[Floats, Floats, Floats, Ints]]) -> tuple[float, float]:
    """``request_s`` and ``prompt_token_s`` of a ``FrontEnd``.

    Each round has when requests were sent (n,), ascending, and their prompts' tokens (n,); when steps were scheduled
    (m,), and how many requests had come through by then (m,). The delays that err least in these counts are taken.
    """
    grid = [(a, b) for a in _candidates(1e-5, 1e-2) for b in _candidates(1e-8, 1e-5)]
    errors = np.zeros(len(grid))
    for sent_s, prompt_tokens, scheduled_s, through in rounds:
        for k, (request_s, prompt_token_s) in enumerate(grid):
            spent_s = np.cumsum(request_s + prompt_token_s * prompt_tokens)
            through_s = np.maximum.accumulate(sent_s - np.concatenate([[0.0], spent_s[:-1]])) + spent_s
            errors[k] += np.abs(np.searchsorted(through_s, scheduled_s, side="right") - through).sum()
    request_s, prompt_token_s = np.median(np.array(grid)[errors == errors.min()], axis=0).tolist()
    return request_s, prompt_token_s


def fit_outputs(sampled: npt.ArrayLike, echoed: npt.ArrayLike, lags_s: npt.ArrayLike) -> tuple[float, float, float]:
    """``output_s``, ``token_s`` and ``echo_s`` of a ``FrontEnd`` from how long after each step its tokens reached the
    clients: its tokens, those of the prompts that got their first answer, and seconds, shape (n,) each."""
    seconds = np.maximum(np.asarray(lags_s, np.float64), 1e-6)
    design = np.column_stack([np.ones(seconds.size), np.asarray(sampled), np.asarray(echoed)]).astype(np.float64)
    output_s, token_s, echo_s = _robust(design, seconds).tolist()
    return output_s, token_s, echo_s


def _candidates(least: float, most: float) -> list[float]:
    return [0.0, *np.geomspace(least, most, 31).tolist()]


def _checked(
    work: Sequence[Work] | npt.NDArray[np.int64], measured_s: npt.ArrayLike, num_terms: int
) -> tuple[Floats, Floats]:
    rows = np.asarray(work, np.float64).reshape(-1, len(TERMS))
    seconds = np.asarray(measured_s, np.float64)
    if rows.shape[0] != seconds.size:
        raise CalibrationError(f"{rows.shape[0]} steps have {seconds.size} measured times")
    if rows.shape[0] <= num_terms:
        raise CalibrationError(f"{rows.shape[0]} steps cannot fit {num_terms} terms: more steps are needed")
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise CalibrationError("measured times must be positive and finite")
    return rows, seconds


def _require_apart(design: Floats, terms: Sequence[str]) -> None:
    unit = _unit(design)
    rank = np.linalg.matrix_rank(unit)
    if rank < len(terms):
        unseen = np.abs(np.linalg.svd(unit, full_matrices=False)[2][-1])
        together = [term for term, share in zip(terms, unseen, strict=True) if share > 0.01]
        raise CalibrationError(
            f"the steps tell only {rank} of {len(terms)} terms apart; {', '.join(together)} go together: "
            f"measure other mixes of prefill, decode and context, or fit fewer terms"
        )


def _robust(design: Floats, seconds: Floats) -> Floats:
    """Non-negative coefficients (k,) of ``design`` (n, k), by weighted least squares in turns with its weights."""
    weights = 1.0 / seconds
    found = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        scaled = design * weights[:, None]
        scale = np.linalg.norm(scaled, axis=0)
        scale[scale == 0] = 1.0
        solution, _ = nnls(scaled / scale, seconds * weights)
        before, found = found, solution / scale
        errors = np.abs(design @ found / seconds - 1.0)
        limit = max(_HUBER_SCALES * 1.4826 * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12))) / seconds
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
    return found


def _unit(design: Floats) -> Floats:
    scale = np.linalg.norm(design, axis=0)
    unit: Floats = design / np.where(scale == 0, 1.0, scale)
    return unit


def _work(terms: Sequence[str], values: Floats) -> Work:
    return Work(**dict(zip(terms, values.tolist(), strict=True)))


def durations_s(cost: StepCost, rows: npt.ArrayLike) -> Floats:
    """What ``StepCost.duration_s`` gives for each of n steps, rows as in ``Work``, shape (n, 6)."""
    matrix = np.asarray(rows, np.float64)
    seconds: Floats = matrix @ np.array(cost.fixed) + np.maximum(
        matrix @ np.array(cost.compute), matrix @ np.array(cost.memory)
    )
    return seconds


def _calibration(cost: StepCost, rows: Floats, seconds: Floats) -> Calibration:
    return Calibration(cost=cost, residuals_s=seconds - durations_s(cost, rows), measured_s=seconds)


def _score(calibration: Calibration) -> float:
    """Root mean square of relative errors, those of hiccups cut off."""
    errors = np.abs(calibration.residuals_s) / calibration.measured_s
    return float(np.sqrt(np.mean(np.minimum(errors, np.quantile(errors, 0.99)) ** 2)))
