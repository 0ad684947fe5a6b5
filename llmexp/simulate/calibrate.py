"""A linear step cost fitted to measured steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from llmexp.simulate.cost import StepCost, Work
from llmexp.simulate.errors import CalibrationError
from llmexp.simulate.requests import Floats

TERMS = Work._fields


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

    Non-negative least squares of the *relative* errors (Lawson and Hanson 1974, ``scipy.optimize.nnls``): a
    short decode step counts as much as a long prefill. Raises ``CalibrationError`` unless there are more steps
    than terms and the steps tell the terms apart.
    """
    unknown = set(terms) - set(TERMS)
    if unknown:
        raise CalibrationError(f"terms {sorted(unknown)} are none of {', '.join(TERMS)}")
    rows = np.asarray(work, np.float64).reshape(-1, len(TERMS))
    seconds = np.asarray(measured_s, np.float64)
    if rows.shape[0] != seconds.size:
        raise CalibrationError(f"{rows.shape[0]} steps have {seconds.size} measured times")
    if rows.shape[0] <= len(terms):
        raise CalibrationError(f"{rows.shape[0]} steps cannot fit {len(terms)} terms: more steps are needed")
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise CalibrationError("measured times must be positive and finite")
    columns = [TERMS.index(term) for term in terms]
    scaled = rows[:, columns] / seconds[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    scale[scale == 0] = 1.0
    rank = np.linalg.matrix_rank(scaled / scale)
    if rank < len(terms):
        raise CalibrationError(
            f"the steps tell only {rank} of {len(terms)} terms apart ({', '.join(terms)}): "
            f"measure other mixes of prefill, decode and context, or fit fewer terms"
        )
    solution, _ = nnls(scaled / scale, np.ones(seconds.size))
    coefficients = np.zeros(len(TERMS))
    coefficients[columns] = solution / scale
    return Calibration(
        cost=StepCost(fixed=Work(*coefficients.tolist())),
        residuals_s=seconds - rows @ coefficients,
        measured_s=seconds,
    )
