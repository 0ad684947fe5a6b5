"""What GPU telemetry says of a round: energy, power, use, clocks, and whether the device was held back."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from llmexp.engines.telemetry import GpuSample

# Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReasons).
POWER_CAP = 0x4  # the board keeps to its power limit: usual under full load
SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80  # hardware slowdown, software and hardware thermal slowdown, power brake


def gpu_measures(
    samples: Sequence[GpuSample], start_s: float, end_s: float, *, requests: int, output_tokens: int
) -> dict[str, float]:
    """Measures of the time from `start_s` to `end_s`, over all GPUs sampled, by their names in the catalog.

    Times are on the samples' clock. Energy is the difference of NVML's counter, linear between samples, or where
    there is none the integral of the power. What was not sampled is left out.
    """
    gpus = sorted({gpu for sample in samples if (gpu := sample["gpu"]) is not None})
    if not gpus or end_s <= start_s:
        return {}
    each = [_Series([sample for sample in samples if sample["gpu"] == gpu]) for gpu in gpus]
    measures: dict[str, float] = {}
    energies = [series.energy_j(start_s, end_s) for series in each]
    known = [energy for energy in energies if energy is not None]
    if len(known) == len(each):
        energy_j = sum(known)
        measures |= {"energy_j": energy_j, "gpu_power_w_mean": energy_j / (end_s - start_s)}
        if requests:
            measures["energy_j_per_request"] = energy_j / requests
        if output_tokens:
            measures["energy_j_per_output_token"] = energy_j / output_tokens
    for name, column in (
        ("gpu_utilization_mean", "gpu_utilization"),
        ("gpu_memory_utilization_mean", "gpu_memory_utilization"),
        ("gpu_sm_clock_mhz_mean", "gpu_sm_clock_mhz"),
    ):
        if len(values := _within(each, column, start_s, end_s)):
            measures[name] = float(values.mean())
    if len(used := _within(each, "gpu_memory_used_bytes", start_s, end_s)):
        measures["gpu_memory_used_bytes_peak"] = float(used.max())
    if len(reasons := _within(each, "gpu_throttle_reasons", start_s, end_s).astype(np.int64)):
        measures["gpu_power_capped_share"] = float(((reasons & POWER_CAP) != 0).mean())
        measures["gpu_throttled_share"] = float(((reasons & SLOWDOWN) != 0).mean())
    return measures


class _Series:
    """The samples of one GPU in the order of their times."""

    def __init__(self, samples: Sequence[GpuSample]) -> None:
        self._samples = sorted(samples, key=lambda sample: sample["monotonic_s"] or 0.0)

    def column(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and values where there are values."""
        known = [(s["monotonic_s"], s[name]) for s in self._samples if s[name] is not None]
        pairs = np.array(known, np.float64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def energy_j(self, start_s: float, end_s: float) -> float | None:
        """Energy used between two times; None where the samples do not reach that far."""
        times, counted = self.column("gpu_energy_j")
        if len(times) >= 2 and times[0] <= start_s and end_s <= times[-1]:
            before, after = np.interp([start_s, end_s], times, counted)
            return float(after - before)
        times, power = self.column("gpu_power_w")
        if len(times) < 2 or times[0] > start_s or end_s > times[-1]:
            return None
        inside = times[(times > start_s) & (times < end_s)]
        grid = np.concatenate([[start_s], inside, [end_s]])
        return float(trapezoid(np.interp(grid, times, power), grid))


def _within(each: Sequence[_Series], name: str, start_s: float, end_s: float) -> NDArray[np.float64]:
    found = []
    for series in each:
        times, values = series.column(name)
        found.append(values[(times >= start_s) & (times <= end_s)])
    return np.concatenate(found)
