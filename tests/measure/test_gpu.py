"""Energy, power and throttling from GPU samples whose truth is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.engines.telemetry import GpuSample
from llmexp.measure.gpu import POWER_CAP, SLOWDOWN, gpu_measures

NAMES = (
    "gpu_power_w",
    "gpu_energy_j",
    "gpu_utilization",
    "gpu_memory_utilization",
    "gpu_memory_used_bytes",
    "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz",
    "gpu_temperature_c",
    "gpu_throttle_reasons",
)


def sample(time_s: float, gpu: int = 0, **values: float) -> GpuSample:
    return {"monotonic_s": time_s, "gpu": gpu, **dict.fromkeys(NAMES), **values}


@given(
    watts=st.floats(50, 700),
    start=st.floats(0.0, 4.0),
    length=st.floats(0.1, 5.0),
    counter=st.booleans(),
)
def test_a_constant_power_uses_power_times_time(watts: float, start: float, length: float, counter: bool) -> None:
    samples = [
        sample(t / 10, gpu_power_w=watts, **({"gpu_energy_j": 7.0 + watts * t / 10} if counter else {}))
        for t in range(101)
    ]
    found = gpu_measures(samples, start, start + length, requests=4, output_tokens=32)
    assert found["energy_j"] == pytest.approx(watts * length)
    assert found["gpu_power_w_mean"] == pytest.approx(watts)
    assert found["energy_j_per_request"] == pytest.approx(watts * length / 4)
    assert found["energy_j_per_output_token"] == pytest.approx(watts * length / 32)


def test_gpus_add_up_in_energy_and_average_in_use() -> None:
    samples = [
        sample(t, gpu, gpu_energy_j=100.0 * (gpu + 1) * t, gpu_utilization=0.5 + 0.5 * gpu)
        for t in (0.0, 1.0, 2.0)
        for gpu in (0, 1)
    ]
    found = gpu_measures(samples, 0.5, 1.5, requests=1, output_tokens=1)
    assert found["energy_j"] == pytest.approx(300.0)
    assert found["gpu_utilization_mean"] == pytest.approx(0.75)


def test_samples_that_do_not_reach_over_the_round_give_no_energy() -> None:
    samples = [sample(t, gpu_energy_j=t, gpu_power_w=1.0, gpu_utilization=1.0) for t in (1.0, 2.0)]
    found = gpu_measures(samples, 0.5, 1.5, requests=1, output_tokens=1)
    assert "energy_j" not in found
    assert found["gpu_utilization_mean"] == 1.0


def test_the_power_limit_is_told_from_a_slowdown() -> None:
    reasons = [0, POWER_CAP, POWER_CAP | 0x40, 0x20, 0x1]  # idle is neither
    samples = [sample(float(t), gpu_throttle_reasons=float(reason)) for t, reason in enumerate(reasons)]
    found = gpu_measures(samples, 0.0, 4.0, requests=1, output_tokens=1)
    assert found["gpu_power_capped_share"] == pytest.approx(2 / 5)
    assert found["gpu_throttled_share"] == pytest.approx(2 / 5)
    assert not SLOWDOWN & POWER_CAP


def test_nothing_sampled_is_nothing_measured() -> None:
    assert gpu_measures([], 0.0, 1.0, requests=1, output_tokens=1) == {}
