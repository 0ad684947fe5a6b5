"""The golden server keeps the promises that other tests build on; the oracle is a plain HTTP client."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.golden.server import golden_server


def ask(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_completion_has_its_tokens_its_usage_and_its_times() -> None:
    with golden_server(ttft_s=0.05, itl_s=0.02, cached_tokens=2) as server:
        start = time.monotonic()
        _, answer = ask(server.url + "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3})
        events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert [c["choices"][0]["text"] for c in chunks[:-1]] == [' t"0', ' t"1', ' t"2']
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, "length"]
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        sent = server.seen[0].sent_s
        for k in range(3):
            assert sent[k] - server.seen[0].received_s >= 0.05 + k * 0.02
        assert start < server.seen[0].received_s < time.monotonic()


def test_the_other_routes() -> None:
    with golden_server(model="m") as server:
        assert ask(server.url + "/health")[0] == 200
        assert json.loads(ask(server.url + "/v1/models")[1])["data"][0]["id"] == "m"
        assert json.loads(ask(server.url + "/reset_prefix_cache", method="POST")[1]) == {"success": True}
        assert server.resets == 1
        assert ask(server.url + "/nothing")[0] == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_metrics_count_what_was_asked(path: str) -> None:
    with golden_server(cached_tokens=4, queue_s=0.4, num_gpu_blocks=77, block_size=32) as server:
        prompt = {"prompt": [5] * 10} if path == "/v1/completions" else {"messages": []}
        for _ in range(3):
            ask(server.url + path, {**prompt, "max_tokens": 1})
        metrics = {
            sample.name: sample
            for family in text_string_to_metric_families(ask(server.url + "/metrics")[1])
            for sample in family.samples
        }
    if path == "/v1/completions":
        assert metrics["vllm:prefix_cache_queries_total"].value == 30
    assert metrics["vllm:prefix_cache_hits_total"].value == 12
    assert metrics["vllm:num_requests_running"].value == 0
    assert metrics["vllm:request_queue_time_seconds_count"].value == 3
    assert metrics["vllm:request_queue_time_seconds_sum"].value == pytest.approx(1.2)
    assert metrics["vllm:cache_config_info"].labels["num_gpu_blocks"] == "77"
    assert metrics["vllm:cache_config_info"].labels["block_size"] == "32"
