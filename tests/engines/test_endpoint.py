"""Somebody else's server: what it tells is used, what it does not tell stays unknown, and its key stays secret."""

import json
from pathlib import Path

import pytest
import yaml

from llmexp import results
from llmexp.compose import compose
from llmexp.engines import endpoint
from llmexp.errors import ConfigError, EngineError, LlmexpError
from llmexp.execute import run
from llmexp.models import locate
from llmexp.results import RunResult
from llmexp.schema.config import Config
from tests.golden.server import golden_server

KEY = "sk-not-to-be-seen-anywhere"
SMALL = [
    "workload.num_requests=4",
    "workload.prefix_tokens=64",
    "workload.suffix_tokens=16",
    "workload.output_tokens=3",
]


def config(folder: Path, *overrides: str) -> Config:
    places = [f"runs_dir={folder}", "study.name=s", "run.name=r", "tracking=off"]
    fixed = ["engine=endpoint", "model=tiny_random", "gpu=cpu", "rounds=2", "max_num_seqs=2", "kv.block_size=16"]
    return compose([*fixed, *SMALL, *places, "client.lag_limit_ms=10000", *overrides])


def start(folder: Path, *overrides: str) -> endpoint.Endpoint:
    asked = config(folder, *overrides)
    endpoint.check(asked)
    return endpoint.start(asked, locate(asked.model), folder, lambda: None)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://u:p@host", ""])
def test_what_is_no_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url"):
        endpoint.check(config(tmp_path, f"engine.url='{url}'"))


def test_a_key_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMEXP_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="LLMEXP_TEST_KEY"):
        endpoint.check(config(tmp_path, "engine.url=http://127.0.0.1:1", "engine.api_key_env=LLMEXP_TEST_KEY"))


def test_where_nothing_answers_the_message_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nothing answers at http://127\.0\.0\.1:1"):
        start(tmp_path, "engine.url=http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("html", "does not stream; it answers with HTML"), ("json", "does not stream; it answers with JSON"),
     ("429", "answered 429"), ("500", "answered 500"), ("no_http", r"gives no answer \(.*BadStatusLine"),
     ("close", r"gives no answer \(.*IncompleteRead")],
)  # fmt: skip
def test_a_server_that_does_not_stream_is_refused(fault: str, message: str, tmp_path: Path) -> None:
    with golden_server(fault=fault) as server, pytest.raises(EngineError, match=message):
        start(tmp_path, f"engine.url={server.url}")


def test_a_model_that_it_does_not_serve_is_refused_with_those_that_it_does(tmp_path: Path) -> None:
    with golden_server(model="real") as server, pytest.raises(ConfigError, match="serves real"):
        start(tmp_path, f"engine.url={server.url}", "engine.model=other")


def made(tmp_path: Path, *overrides: str) -> RunResult:
    return run(config(tmp_path, *overrides))


def test_a_vllm_with_metrics_has_the_whole_contract(tmp_path: Path) -> None:
    with golden_server(cached_tokens=0, ttft_s=0.05, itl_s=0.01) as server:
        result = made(tmp_path, f"engine.url={server.url}/v1", "workload=unique_prefix")
    assert result.valid, result.invalid_reasons
    assert result.engine["kv_capacity_tokens"] == 16000
    assert result.engine["unknown"] == []
    assert result.rounds[0].contract["observed_hit_tokens"] == 0
    assert result.rounds[0].contract["reset_confirmed"] is True


def test_hits_that_the_workload_cannot_have_break_the_contract_there_too(tmp_path: Path) -> None:
    with golden_server(cached_tokens=16, ttft_s=0.05, itl_s=0.01) as server:
        result = made(tmp_path, f"engine.url={server.url}", "workload=unique_prefix")
    assert not result.valid
    assert "contract_broken" in result.invalid_reasons[0]


def test_what_a_foreign_server_does_not_tell_is_marked_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with golden_server(ttft_s=0.05, itl_s=0.01) as server:
        monkeypatch.setattr(type(server), "_plain", _only_models)
        result = made(tmp_path, f"engine.url={server.url}", "workload=unique_prefix")
    assert result.valid, result.invalid_reasons
    assert result.engine["kv_capacity_tokens"] is None and result.engine["version"] is None
    assert [text.partition(":")[0] for text in result.engine["unknown"]] == ["cache hits", "KV capacity", "cache state"]
    assert result.rounds[0].contract["reset_confirmed"] is None
    assert "cache_hit_rate" not in result.measures


def test_without_counters_a_warm_cache_shows_in_the_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with golden_server(cached_tokens=16, ttft_s=0.05, itl_s=0.01) as server:
        monkeypatch.setattr(type(server), "_plain", _only_models)
        result = made(tmp_path, f"engine.url={server.url}", "workload=unique_prefix")
    assert not result.valid
    assert "64 hit tokens reported by the requests' own usage, at most 0 expected" in result.invalid_reasons[0]


def _only_models(server: object, method: str, path: str) -> tuple[str, str, str]:
    if path == "/v1/models":
        return "200 OK", "application/json", json.dumps({"data": [{"id": "golden"}]})
    return "404 Not Found", "text/html", "<html>not here</html>"


def test_the_key_is_sent_and_left_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMEXP_TEST_KEY", KEY)
    keyed = "engine.api_key_env=LLMEXP_TEST_KEY"
    with golden_server(ttft_s=0.05, itl_s=0.01) as server:
        result = made(tmp_path, f"engine.url={server.url}", keyed, "workload=unique_prefix")
        assert all(seen.headers["authorization"] == f"Bearer {KEY}" for seen in server.seen)
        assert KEY not in repr(start(tmp_path, f"engine.url={server.url}", keyed))
    with pytest.raises(LlmexpError) as failure:
        made(tmp_path / "b", "engine.url=http://127.0.0.1:1", keyed)
    assert KEY not in str(failure.value)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(KEY.encode() in content for content in written)
    dumped = yaml.safe_load((result.folder / results.CONFIG).read_text())
    assert dumped["engine"]["api_key_env"] == "LLMEXP_TEST_KEY"
    assert KEY not in "".join(capfd.readouterr())


def test_a_server_that_echoes_the_key_does_not_bring_it_into_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MYLLM", KEY)  # no name by which it could be known
    with golden_server(ttft_s=0.05, itl_s=0.01) as server:
        monkeypatch.setattr(type(server), "_plain", _echo_the_key)
        with pytest.raises(EngineError, match="<secret>") as failure:
            made(tmp_path, f"engine.url={server.url}", "engine.api_key_env=MYLLM", "workload=unique_prefix")
    assert KEY not in str(failure.value)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(KEY.encode() in content for content in written)
    assert KEY not in "".join(capfd.readouterr())


def _echo_the_key(server: object, method: str, path: str) -> tuple[str, str, str]:
    return "200 OK", "application/json", json.dumps({"error": f"wrong key: Bearer {KEY}"})


@pytest.mark.parametrize(
    "url", ["http://a b:1", "http://host:1\t", " http://host:1", "http://@host:1", "http://host:x"]
)
def test_what_cannot_be_an_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.url"):
        endpoint.check(compose(["model=tiny_random", "gpu=cpu", "engine=endpoint", f"engine.url='{url}'"]))
