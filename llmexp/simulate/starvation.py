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
    """For each request, how many that were sent later got into the batch in an earlier step, shape (n,)."""
    sent = simulation.requests["sent_s"].to_numpy()
    admitted = simulation.requests["admitted_s"].to_numpy()
    counts = np.zeros(len(sent), np.int64)
    later: list[float] = []  # steps at which requests sent later were admitted, sorted
    order = np.argsort(sent, kind="stable")[::-1]
    start = 0
    while start < len(order):
        group = [i for i in order[start:] if sent[i] == sent[order[start]]]
        for i in group:
            counts[i] = bisect_left(later, admitted[i])
        for i in group:
            insort(later, admitted[i])
        start += len(group)
    return counts
