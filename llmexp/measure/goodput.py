"""Goodput: the requests that met every service level objective (Zhong et al., DistServe, OSDI 2024)."""

import numpy as np
from numpy.typing import NDArray

from llmexp.measure.latencies import Latencies
from llmexp.schema.load import SloConfig


def meets_slo(latencies: Latencies, slo: SloConfig) -> NDArray[np.bool_]:
    """Which requests completed and met each objective that is set, shape `(n,)`.

    A request without a TPOT, having made one token, meets that objective; one without a first token fails
    TTFT.
    """
    met = latencies.completed.copy()
    if slo.ttft_ms is not None:
        met &= latencies.ttft_ms <= slo.ttft_ms
    if slo.tpot_ms is not None:
        met &= ~(latencies.tpot_ms > slo.tpot_ms)
    if slo.e2e_ms is not None:
        met &= latencies.e2e_ms <= slo.e2e_ms
    return met
