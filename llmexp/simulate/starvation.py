"""Who had to wait, and who was let past."""

from bisect import bisect_left, insort

import numpy as np

from llmexp.simulate.requests import Floats, Ints
from llmexp.simulate.simulation import Simulation


def waits_s(simulation: Simulation) -> Floats:
    """Seconds from sending to the first step of each request, shape (n,)."""
    waits: Floats = simulation.requests["admitted_s"].to_numpy() - simulation.requests["sent_s"].to_numpy()
    return waits


def overtaken(simulation: Simulation) -> Ints:
    """For each request, how many of those sent after it (at the same time: later in the workload) got into the
    batch in an earlier step, shape (n,)."""
    admitted = simulation.requests["admitted_s"].to_numpy()
    counts = np.zeros(len(admitted), np.int64)
    later: list[float] = []  # sorted
    for i in np.argsort(simulation.requests["sent_s"].to_numpy(), kind="stable")[::-1]:
        counts[i] = bisect_left(later, admitted[i])
        insort(later, admitted[i])
    return counts
