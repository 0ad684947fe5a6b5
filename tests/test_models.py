"""Models are found, made once, and read without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmexp import models
from llmexp.compose import compose
from llmexp.engines import vllm
from llmexp.errors import ConfigError
from llmexp.models import locate


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llmexp" / "models"


def test_tiny_random_is_made_once_and_read(cache: Path) -> None:
    config = compose(["model=tiny_random", "gpu=cpu"]).model
    model = locate(config)
    assert model.path.parent == cache
    assert (model.vocab_size, model.max_model_len) == (2048, 2048)
    assert model.special_token_ids == {0, 1, 2}
    assert model.tokenizer().decode([5, 6]) == "w2w3"
    made = (model.path / "config.json").stat().st_mtime_ns
    assert locate(config) == model
    assert (model.path / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == [], "a partial folder was left"


def test_many_processes_make_a_model_once(cache: Path) -> None:
    script = (
        "from llmexp.compose import compose; from llmexp.models import locate\n"
        "print(locate(compose(['model=tiny_random', 'gpu=cpu']).model).path)"
    )
    crowd = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate()[0].strip() for process in crowd}
    assert [process.returncode for process in crowd] == [0] * 4
    assert len(paths) == 1
    assert json.loads((Path(paths.pop()) / "config.json").read_text())["vocab_size"] == 2048


def test_a_failed_making_leaves_nothing_and_can_be_repeated(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        models._made_once("thing", fail)
    assert [path.name for path in cache.iterdir()] == ["thing.lock"]
    assert models._made_once("thing", lambda folder: (folder / "whole").touch()).joinpath("whole").exists()


def write_model(folder: Path, **facts: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64, **facts}))
    return folder


def test_a_folder_by_path_and_all_kinds_of_special_tokens(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", eos_token_id=[7, 9], bos_token_id=None, pad_token_id=7)
    tokens = [{"id": 42, "special": True, "content": "<|x|>"}, {"id": 43, "special": False, "content": "y"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    model = locate(compose([f"model.path={folder}", "model.max_model_len=64", "gpu=cpu"]).model)
    assert model.special_token_ids == {7, 9, 42}
    assert model.path == folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a model's"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
        ('{"max_position_embeddings": 64}', "vocab_size"),
        ('{"vocab_size": 0}', "vocab_size: got 0; accepted is an integer from 1"),
        ('{"vocab_size": true}', "vocab_size: .*integer"),
        ('{"vocab_size": 99999999999}', "vocab_size: got 99999999999; accepted is an integer from 1 to"),
        (
            '{"vocab_size": 9, "max_position_embeddings": "64"}',
            "max_position_embeddings: got '64'; accepted is an integer",
        ),
        ('{"vocab_size": 9, "eos_token_id": {"a": 1}}', "eos_token_id"),
        ('{"vocab_size": 9, "bos_token_id": [1, "x"]}', "bos_token_id"),
    ],
)
def test_a_broken_config_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        locate(compose([f"model.path={tmp_path}", "model.max_model_len=null", "gpu=cpu"]).model)


def test_a_hub_model_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    script = (
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "from llmexp.compose import compose; from llmexp.models import locate\n"
        "locate(compose(['model=qwen2_5_7b', 'gpu=cpu']).model)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ConfigError: model=qwen2_5_7b: Qwen/Qwen2.5-7B-Instruct could not be had" in done.stderr
    assert "set model.path" in done.stderr


@pytest.mark.parametrize("content", ["", "[]", '{"added_tokens": 5}', '{"added_tokens": [{"special": true}]}'])
def test_a_broken_tokenizer_file_is_named(content: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        locate(compose([f"model.path={folder}", "model.max_model_len=null", "gpu=cpu"]).model)


def test_a_model_whose_config_has_code_is_read_without_running_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", auto_map={"AutoConfig": "evil.Config"}, model_type="evil")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = compose([f"model.path={folder}", "model.max_model_len=null", "gpu=cpu"])
    model = locate(config.model)
    assert "--trust-remote-code" not in vllm.arguments(config, model)
    assert not (tmp_path / "ran").exists()
    trusted = compose([f"model.path={folder}", "model.max_model_len=null", "gpu=cpu", "model.trust_remote_code=true"])
    assert "--trust-remote-code" in vllm.arguments(trusted, model)


def test_a_models_name_leads_nowhere(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_packaged_gguf", lambda package: Path("/weights.gguf"))
    monkeypatch.setattr(models, "_dequantise", lambda gguf, folder: write_model(folder))
    config = compose(["model=smollm2_135m", "gpu=cpu", "model.name=../../../out", "model.max_model_len=null"]).model
    assert locate(config).path.parent == cache
