"""Every reader of what others wrote, as a function of bytes that may raise nothing but our own named errors.

Each target has seeds: inputs that are as they should be, for a fuzzer to change.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from yaml import YAMLError

from llmexp import models, results
from llmexp.analyze.requests import latencies
from llmexp.analyze.study import load_study
from llmexp.client.call import Call
from llmexp.client.ledger import Ledger
from llmexp.client.reading import Reading
from llmexp.client.sse import EventStream, MalformedEventError
from llmexp.compose import compose
from llmexp.engines import counters, endpoint, log, vllm
from llmexp.errors import LlmexpError
from llmexp.models import Model
from llmexp.report.run_table import run_table, verdict
from llmexp.schema.config import validate
from llmexp.schema.engine import ModelConfig
from llmexp.schema.workloads import Alpaca, Azure, Custom, Mmlu, Mooncake, SharedPrefix, ShareGpt
from llmexp.simulate import calibration
from llmexp.simulate.cost import Work
from llmexp.workloads.build import build
from llmexp.workloads.store import save
from llmexp.workloads.text import ChatTemplate, load_tokenizer
from tests.analyze.synthetic import make_study
from tests.workloads.conftest import make_model, make_text_model

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """`read` raises one of `accepted` or nothing."""

    read: Read
    seeds: tuple[bytes, ...]
    accepted: tuple[type[Exception], ...] = (LlmexpError,)

    def __call__(self, content: bytes) -> None:
        try:
            self.read(content)
        except self.accepted as error:
            assert len(str(error)) < 20_000


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="llmexp-fuzz-"))


@cache
def _text_model() -> Model:
    (_folder() / "model").mkdir()
    return make_text_model(_folder() / "model")


def _file(name: str, content: bytes) -> str:
    path = _folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return str(path)


def _workload(name: str, config: Callable[[str], Any], text: bool = False) -> Read:
    return lambda content: build(config(_file(name, content)), _text_model() if text else make_model())


def _mmlu(content: bytes) -> None:
    for split in ("dev", "test"):
        _file(f"{split}/s_{split}.csv", content)
    build(Mmlu(path=str(_folder()), num_questions=1), _text_model())


def _stream(api: Literal["completions", "chat"]) -> Read:
    def read(content: bytes) -> None:
        call = Call(0, 0.0, 0.0)
        stream, reading, ledger = EventStream(), Reading(call, api, keep_text=True), Ledger()
        try:
            for i in range(0, len(content), 97):
                for payload in stream.feed(content[i : i + 97]):
                    reading.event(payload, float(i))
            for payload in stream.end():
                reading.event(payload, 1e9)
            reading.end()
        finally:
            ledger.add(call)  # whatever came of it, the trace takes it
            ledger.drain()

    return read


@cache
def _study() -> Path:
    make_study(_folder() / "study", trials=1, rounds=1)
    return _folder() / "study"


def _run_folder() -> Path:
    return next(path.parent for path in sorted(_study().glob(f"*/{results.SUMMARY}")))


def _run(content: bytes) -> None:
    _file("run/summary.json", content)
    run = results.load_run(_folder() / "run")
    run_table(run)
    verdict(run)
    results.is_intact(run)


def _record(content: bytes) -> None:
    if not (_folder() / "record").exists():
        shutil.copytree(_study(), _folder() / "record")
    _file("record/study.json", content)
    load_study(_folder() / "record")


def _search(content: bytes) -> None:
    _file("search/search.json", content)
    results.load_search(_folder() / "search")


def _trace(content: bytes) -> None:
    run = results.load_run(_run_folder())
    _file(f"traced/{results.TRACE}", content)
    latencies(run.model_copy(update={"folder": _folder() / "traced"}), "ttft_ms")


def _calibration(content: bytes) -> None:
    found = calibration.load(_file("calibration.json", content))
    found.step_cost.duration_s(Work(steps=1))
    assert found.delays is not None


def _model(content: bytes) -> None:
    _file("weights/config.json", content)
    models.locate(ModelConfig(name="m", path=str(_folder() / "weights")))


def _tokenizer(content: bytes) -> None:
    _file("words/config.json", b'{"vocab_size": 9}')
    _file("words/tokenizer.json", content)
    model = models.locate(ModelConfig(name="m", path=str(_folder() / "words")))
    load_tokenizer(model)


def _template(content: bytes) -> None:
    _file("chat/tokenizer_config.json", content)
    template = ChatTemplate(Model("m", _folder() / "chat", 9, frozenset(), 9, {}))
    template.render([{"role": "user", "content": "x"}])


def _log(content: bytes) -> None:
    path = Path(_file("engine.log", content))
    log.root_cause(path)
    log.memory_shortage(path)
    for fact in (log.attention_backend, log.kv_capacity_tokens, log.max_num_batched_tokens, log.model_memory_bytes):
        fact(path)
    log.all_reduce(path)
    log.nccl_version(path)


def _metrics(content: bytes) -> None:
    page = content.decode(errors="replace")
    first = counters.parse(page)[0]
    first.since(first)
    vllm.facts_of_page(page)


def _config(content: bytes) -> None:
    try:
        made = OmegaConf.create(content.decode(errors="replace"))
    except (YAMLError, ValueError, AssertionError, OverflowError, AttributeError, TypeError, RecursionError):
        return  # Hydra's and OmegaConf's own part
    except Exception as error:
        if type(error).__module__.startswith("omegaconf"):
            return
        raise
    if OmegaConf.is_dict(made):
        validate(made)


def _json_lines(*values: Mapping[str, Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _sse(*chunks: object) -> bytes:
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def _bytes_of(write: Callable[[Path], object]) -> bytes:
    path = _folder() / "seed"
    write(path)
    return path.read_bytes()


_USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
_METRICS = b"""# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 16.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="99",enable_prefix_caching="True"} 1.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="0.3"} 2.0
vllm:request_queue_time_seconds_bucket{le="+Inf"} 2.0
vllm:request_queue_time_seconds_sum 0.1
"""
_LOG = b"""(EngineCore pid=7) ERROR 11-29 17:03:40 [core.py:1] ValueError: No available memory for the cache blocks.
INFO 11-29 17:03:40 [x.py:1] Using FLASH_ATTN attention backend
KV cache size: 12,345 tokens, max_num_batched_tokens=2048, Model loading took 1.5 GiB, Available KV cache memory: 2 GiB
0.44 GiB KV cache is needed, larger than the available KV cache memory (0.25 GiB)
"""


_SEARCH = b'{"kind": "floor", "key": "kv.num_blocks", "found": "12 is the smallest", "smallest": 12}'
_CALIBRATION = json.dumps(
    {
        "model": "m",
        "gpu": "cpu",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "engine": "vllm_server",
        "engine_version": "0.32.0",
        "async_scheduling": True,
        "block_size": 32,
        "num_gpu_blocks": 99,
        "max_num_batched_tokens": 2048,
        "cost": {"fixed": {"steps": 0.001, "prefill_tokens": 0.0001}},
        "prefill_launch_s": 0.02,
        "front_end": {},
        "steps": 100,
        "runs": ["r"],
        "residuals": {"all": {"steps": 9, "time_share": 1, "bias": 0, "error_p50": 0.1, "error_p95": 0.2}},
    }
).encode()


@cache
def targets() -> dict[str, Target]:
    """Every target by its name."""
    question = b'"What, exactly?",a,b,c,d,A\nWhich?,1,2,3,4,B\n'
    lengths = b"prompt,output\n" + b"9,9\n" * 300
    saved = build(SharedPrefix(num_requests=3, prefix_tokens=32), make_model())
    run = _run_folder()
    return {
        "custom": Target(
            _workload("w.jsonl", lambda path: Custom(path=path), text=True),
            (
                _json_lines({"prompt": "ab"}, {"token_ids": [5, 6], "output_tokens": 3, "priority": 1}),
                _json_lines({"messages": [{"role": "user", "content": "hi"}]}),
                _json_lines({"token_ids": [5], "arrival_s": 0.5, "conversation": 1, "think_s": 1, "deadline_s": 2}),
            ),
        ),
        "mooncake": Target(
            _workload("m.jsonl", lambda path: Mooncake(path=path, scale_lengths=0.1)),
            (_json_lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}),),
        ),
        "azure": Target(
            _workload("a.csv", lambda path: Azure(path=path)),
            (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",),
        ),
        "lengths": Target(_workload("l.csv", lambda path: ShareGpt(path=path)), (lengths,)),
        "sharegpt": Target(
            _workload("s.json", lambda path: ShareGpt(path=path, num_requests=1, min_tokens=1), text=True),
            (b'[{"conversations": [{"from": "human", "value": "abcd"}, {"from": "gpt", "value": "efgh"}]}]',),
        ),
        "alpaca": Target(
            _workload("p.json", lambda path: Alpaca(path=path, num_requests=1, min_tokens=1), text=True),
            (b'[{"instruction": "Say", "input": "", "output": "said"}]',),
        ),
        "mmlu": Target(_mmlu, (question,)),
        "saved_workload": Target(
            _workload("w.parquet", lambda path: Custom(path=path)), (_bytes_of(lambda path: save(saved, path)),)
        ),
        "model": Target(_model, (b'{"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": [1, 2]}',)),
        "tokenizer": Target(_tokenizer, ((_text_model().path / "tokenizer.json").read_bytes(),)),
        "chat_template": Target(_template, ((_text_model().path / "tokenizer_config.json").read_bytes(),)),
        "metrics": Target(_metrics, (_METRICS,)),
        "completions": Target(
            _stream("completions"),
            (
                _sse(
                    {"choices": [{"index": 0, "text": "a", "logprobs": {"top_logprobs": [{"a": -1}]}}]},
                    {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": _USAGE},
                ),
            ),
            (MalformedEventError,),
        ),
        "chat": Target(
            _stream("chat"),
            (
                _sse(
                    {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
                    {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}], "usage": _USAGE},
                ),
                _sse({"error": {"message": "no"}}),
            ),
            (MalformedEventError,),
        ),
        "reset": Target(endpoint.reset_answer, (b'{"success": true}',)),
        "log": Target(_log, (_LOG,)),
        "run": Target(_run, ((run / results.SUMMARY).read_bytes(),)),
        "study": Target(_record, ((_study() / results.STUDY).read_bytes(),)),
        "search": Target(_search, (_SEARCH,)),
        "trace": Target(_trace, ((run / results.TRACE).read_bytes(),)),
        "calibration": Target(_calibration, (_CALIBRATION,)),
        "config": Target(_config, (OmegaConf.to_yaml(compose(["gpu=cpu"]).model_dump(mode="json")).encode(),)),
    }
