"""GPU telemetry by NVML from a process of its own: `python telemetry.py INTERVAL_S UUID…`, a JSON line a sample.

It samples until its standard input closes, and then once more.
"""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

GpuSample = dict[str, float | None]


@contextmanager
def gpu_sampled(uuids: Sequence[str], interval_s: float | None) -> Iterator[list[GpuSample]]:
    """Collects a sample of each GPU every `interval_s`, from before the block to after it; they are in the list
    once the block has ended. Without GPUs, an interval or NVML the list stays empty.

    A sample has `monotonic_s`, `gpu` (its place in `uuids`), `gpu_power_w`, `gpu_energy_j` (a counter),
    `gpu_utilization` and `gpu_memory_utilization` (0 to 1), `gpu_memory_used_bytes`, `gpu_sm_clock_mhz`,
    `gpu_memory_clock_mhz`, `gpu_temperature_c` and `gpu_throttle_reasons` (NVML's bit mask). What a device does
    not tell is None.
    """
    samples: list[GpuSample] = []
    if not uuids or interval_s is None:
        yield samples
        return
    process = subprocess.Popen(
        [sys.executable, __file__, str(interval_s), *uuids],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for its owner
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in uuids]  # the first sample of each is there
        reader = Thread(target=lines.extend, args=[process.stdout], daemon=True)  # a full pipe would stop the sampling
        reader.start()
        yield samples
        process.stdin.close()
        reader.join(timeout=10)
        samples += [json.loads(line) for line in lines if line.endswith("\n")]
    finally:
        process.kill()
        process.wait()


def main(interval_s: float, uuids: list[str]) -> None:
    import pynvml

    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    due = time.monotonic()
    over = False
    while True:
        for place, device in enumerate(devices):
            print(json.dumps({"monotonic_s": time.monotonic(), "gpu": place, **_sample(pynvml, device)}))
        sys.stdout.flush()
        if over:
            return
        due = max(due + interval_s, time.monotonic())
        over = bool(select.select([sys.stdin], [], [], max(due - time.monotonic(), 0))[0])


def _sample(nvml: Any, device: Any) -> GpuSample:
    # Names of NVML's API reference (docs.nvidia.com/deploy/nvml-api); mW, mJ and percent become W, J and shares.
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # its name since driver 535
    reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    reads: dict[str, Callable[[], float]] = {
        "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
        "gpu_energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3,
        "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
        "gpu_memory_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(device).memory / 100,
        "gpu_memory_used_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2).used),
        "gpu_sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
        "gpu_memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)),
        "gpu_temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
        "gpu_throttle_reasons": lambda: float(reasons(device)),
    }
    sample: GpuSample = dict.fromkeys(reads)
    for name, read in reads.items():
        with contextlib.suppress(nvml.NVMLError):
            sample[name] = read()
    return sample


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
