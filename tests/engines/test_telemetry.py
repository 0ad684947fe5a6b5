"""The telemetry process, with a stand-in for NVML whose device is known."""

from pathlib import Path

import pytest

from llmexp.engines.telemetry import gpu_sampled
from tests.waiting import until

NVML = """
import time
from pathlib import Path
asked = Path(__file__).with_name("asked").open("ab", buffering=0)
class NVMLError(Exception): pass
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
class Used: used = 5 << 30
class Rates: gpu, memory = 80, 40
def nvmlInit(): pass
def nvmlDeviceGetHandleByUUID(uuid): return {"GPU-a": 1, "GPU-b": 2}[uuid]
def nvmlDeviceGetPowerUsage(device):
    asked.write(b".")
    return 100_000 * device
def nvmlDeviceGetTotalEnergyConsumption(device):
    if device == 2: raise NVMLError("not supported")
    return int(time.monotonic() * 1e5)
def nvmlDeviceGetUtilizationRates(device): return Rates
nvmlMemory_v2 = 2
def nvmlDeviceGetMemoryInfo(device, version): return Used
def nvmlDeviceGetClockInfo(device, kind): return 1000 * kind
def nvmlDeviceGetTemperature(device, kind): return 50
def nvmlDeviceGetCurrentClocksThrottleReasons(device): return 4
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("nvml")
def test_each_gpu_is_sampled_before_and_after_in_plain_units() -> None:
    with gpu_sampled(["GPU-a", "GPU-b"], 60.0) as samples:
        assert samples == []  # they come when it is over
    assert [sample["gpu"] for sample in samples] == [0, 1, 0, 1]
    first, second = samples[:2]
    assert (first["gpu_power_w"], second["gpu_power_w"]) == (100.0, 200.0)
    assert first["gpu_utilization"] == 0.8 and first["gpu_memory_utilization"] == 0.4
    assert first["gpu_memory_used_bytes"] == 5 * 2**30
    assert (first["gpu_sm_clock_mhz"], first["gpu_memory_clock_mhz"]) == (1000.0, 2000.0)
    assert first["gpu_throttle_reasons"] == 4.0
    assert second["gpu_energy_j"] is None  # what a device does not tell
    energy, time_s = (samples[2][name] for name in ("gpu_energy_j", "monotonic_s"))
    assert energy is not None and time_s is not None
    assert energy == pytest.approx(time_s * 100, rel=0.01)  # mJ to J, of a device that uses 100 W


@pytest.mark.usefixtures("nvml")
def test_a_long_round_is_sampled_to_its_end(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with gpu_sampled(["GPU-a", "GPU-b"], 0.0005) as samples:
        until(lambda: asked.stat().st_size > 1000, "the thousandth sample")  # 300 KiB, where a pipe holds 64
    assert len(samples) == asked.stat().st_size


@pytest.mark.parametrize(("uuids", "interval_s"), [([], 0.1), (["GPU-a"], None), (["GPU-unknown"], 0.1)])
def test_without_a_gpu_an_interval_or_nvml_there_is_nothing(uuids: list[str], interval_s: float | None) -> None:
    with gpu_sampled(uuids, interval_s) as samples:
        pass
    assert samples == []


@pytest.mark.usefixtures("nvml")
def test_an_error_in_the_round_goes_through() -> None:
    with pytest.raises(RuntimeError, match="round"), gpu_sampled(["GPU-a"], 0.1):
        raise RuntimeError("the round failed")
