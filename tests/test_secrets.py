"""No config holds a secret, and no message, log or file of ours tells one."""

import sys
from pathlib import Path

import pytest

import llmexp
from llmexp import secrets
from llmexp.compose import compose
from llmexp.engines import devices
from llmexp.errors import ConfigError, EngineError
from llmexp.schema.config import keys

TINY = ["model=tiny_random", "gpu=cpu", "tracking=off"]
CANARY = "hf_CANARYcanaryCANARY0123"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hf_token",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "MLFLOW_TRACKING_PASSWORD",
        "GITHUB_PAT",
        "engine.args.api_key",
        "engine.args.api-key",
        "DB_PASSWD",
        "AZURE_STORAGE_CONNECTION_STRING",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secrets.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *["max_num_batched_tokens", "long_prefill_token_threshold", "VLLM_MAX_TOKENS", "TOKENIZERS_PARALLELISM"],
        *["PWD", "SSH_AUTH_SOCK", "MONKEY", "engine.api_key_env"],
        *keys(),
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not secrets.is_secret(name)


@pytest.mark.parametrize(
    "override",
    [
        f"engine.env.HF_TOKEN={CANARY}",
        f"engine.args.api_key={CANARY}",
        f"engine.args.hf-token={CANARY}",
        f"hydra.job.env_set.OPENAI_API_KEY={CANARY}",
        f"++extra.password={CANARY}",
        "engine.env.OTHER=${oc.env:HF_TOKEN}",
        "runs_dir=/tmp/${oc.env:HF_TOKEN}",
        f"arm={CANARY}",
        f"tracking.uri=http://somebody:{CANARY}@host",
        f"'tracking.uri=postgresql://host/db?password={CANARY}'",
    ],
)
def test_a_config_takes_no_secret(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    with pytest.raises(ConfigError) as error:
        compose([*TINY, override])
    assert "CANARY" not in str(error.value)
    assert override.strip("'+").partition("=")[0] in str(error.value)


@pytest.mark.parametrize("override", ["scheduler.max_num_batched_token", "+scheduler.max_num_batched_token"])
def test_a_mistyped_key_that_looks_like_a_secrets_is_told_without_its_value(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*TINY, f"{override}={CANARY}"])
    said = "scheduler.max_num_batched_token: no such key; did you mean scheduler.max_num_batched_tokens?"
    assert str(error.value).startswith(said) and "CANARY" not in str(error.value)


def test_messages_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    said = f"http://me:pw12@host said {CANARY}, 'Authorization': 'Bearer abcdefgh' and Bearer abcdefgh"
    assert str(EngineError(said)) == (
        "http://<secret>@host said <secret>, 'Authorization': 'Bearer <secret>' and Bearer <secret>"
    )
    assert str(EngineError("tokens per second: 5")) == "tokens per second: 5"


def test_secrets_in_a_log_are_masked_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "engine.log"
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    with log.open("ab", buffering=0) as engine:  # goes on writing
        engine.write(f"key={CANARY}\n".encode())
        secrets.mask_file(log)
        engine.write(b"the end\n")
    assert log.read_text() == f"key={'*' * len(CANARY)}\nthe end\n"
    secrets.mask_file(tmp_path / "no such file")


def test_an_engine_that_prints_its_environment_and_dies_leaves_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, CANARY + name)
    monkeypatch.setattr(devices, "_LOCKS", tmp_path)  # nothing of the device is used
    python = tmp_path / "python"
    script = [
        "#!/bin/sh",
        f'[ "$1" = -c ] && exec {sys.executable} "$@"',
        "env",
        'echo "ValueError: no such token: $HF_TOKEN"',
        "exit 1",
    ]
    python.write_text("\n".join(script))
    python.chmod(0o755)
    places = [f"runs_dir={tmp_path}/runs", f"tracking.dir={tmp_path}/mlruns", f"engine.python={python}"]
    with pytest.raises(EngineError, match="no such token: <secret>") as error:
        llmexp.run(["model=tiny_random", "gpu=cpu", "study.name=s", *places])
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"engine.log", "mlflow.db", "config.yaml", "summary.json"} <= {path.name for path in written}
    assert not [path for path in written if b"CANARY" in path.read_bytes()]
    assert "CANARY" not in str(error.value) + "".join(capfd.readouterr())
