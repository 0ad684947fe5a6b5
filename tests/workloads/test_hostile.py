"""Whatever stands in a file: a WorkloadError with the place, or a workload; nothing else, and no hanging."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp.errors import LlmexpError, WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import (
    Alpaca,
    Azure,
    Custom,
    Mmlu,
    Mooncake,
    MultiTurn,
    SharedPrefix,
    ShareGpt,
    UniquePrefix,
)
from llmexp.workloads.build import build
from llmexp.workloads.store import save
from llmexp.workloads.text import ChatTemplate, load_tokenizer
from tests.workloads.conftest import make_model

DEEP = b"[" * 100_000
KINDS: dict[str, Callable[[str], Any]] = {
    "custom": lambda path: Custom(path=path),
    "mooncake": lambda path: Mooncake(path=path),
    "azure": lambda path: Azure(path=path),
    "sharegpt": lambda path: ShareGpt(path=path),
    "alpaca": lambda path: Alpaca(path=path, prompt_column=None),
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "caf\xe9"}\n'.encode("latin-1"), "w.jsonl:1: not UTF-8 (byte 0xe9 at 15 of the line)"),
        ('{"token_ids": [5]}\n'.encode("utf-16"), "w.jsonl:1: the file is UTF-16"),
        (b'{"token_ids": [5]}\n{"token_ids": [2147483648]}\n', "w.jsonl:2: token_ids[0]: got 2147483648"),
        (b'{"token_ids": [123456789012345678901234567890]}\n', "w.jsonl:1: token_ids[0]"),
        (b'{"token_ids": [true]}\n', "w.jsonl:1: token_ids[0]: got true; accepted is an integer"),
        (b'{"token_ids": ["5"]}\n', "w.jsonl:1: token_ids[0]: got '5'; accepted is an integer"),
        (b'{"prompt": "\\ud800"}\n', "w.jsonl:1: not JSON .*surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}\n', "w.jsonl:1: not JSON"),
        (b'{"token_ids": ' + DEEP + b"\n", "w.jsonl:1: not JSON .*depth"),
        (b'{"token_ids": [5], "priority": 99999999999}\n', "w.jsonl:1: priority"),
        (b'{"token_ids": [5], "arrival_s": NaN}\n', "w.jsonl:1: not JSON"),
        (b'{"token_ids": [5], "arrival_s": 1e999}\n', "w.jsonl:1: not JSON"),
        (b'{"token_ids": [5], "output_tokens": 9999999999}\n', "w.jsonl:1: output_tokens"),
        (b'"' + b"x" * 1_000_000, "w.jsonl:1: not JSON"),
        (b"\x00\xff\xfe", "w.jsonl:1: not UTF-8"),
    ],
)
def test_a_hostile_line_is_told_with_its_place(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_bytes(content)
    with pytest.raises(WorkloadError) as error:
        build(Custom(path=str(tmp_path / "w.jsonl")), make_model())
    plain, *rest = message.split(".*")
    assert plain in str(error.value) and all(part in str(error.value) for part in rest)
    assert len(str(error.value)) < 1000


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"token_ids": [5]}\n', encoding="utf-8-sig")
    assert len(build(Custom(path=str(tmp_path / "w.jsonl")), make_model())) == 1
    (tmp_path / "w.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,8,2\n", encoding="utf-8-sig"
    )
    assert len(build(Azure(path=str(tmp_path / "w.csv")), make_model())) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self", "a\0b", "x" * 5000, ""])
def test_a_path_that_is_no_file_is_refused(kind: str, path: str) -> None:
    with pytest.raises(LlmexpError, match="no file"):
        build(KINDS[kind](path), make_model())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"\x00", DEEP, b"a,b\n1,2,3\n", b'a,b\n"1,2\n', b"prompt,output\n9" + b"9" * 5000 + b",1\n"],
)
def test_garbage_ends_in_a_named_error(kind: str, content: bytes, tmp_path: Path) -> None:
    for name in ("w.txt", "w.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LlmexpError):
            build(KINDS[kind](str(tmp_path / name)), make_model())


def test_lengths_beyond_32_bits_are_too_long_not_negative(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(
        json.dumps({"timestamp": 0, "input_length": 512, "output_length": 2**29 - 1, "hash_ids": [1]})
    )
    with pytest.raises(WorkloadError, match="too long"):
        build(Mooncake(path=str(tmp_path / "w.jsonl"), scale_lengths=1000), make_model())


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": [[5]], "output_tokens": [1]},
        {"prompt": ["text"], "output_tokens": [1]},
        {"prompt": [[5, None]], "output_tokens": [1]},
        {"prompt": [[5]], "output_tokens": [-1]},
        {"prompt": [[2**40]], "output_tokens": [1]},
        {"prompt": [[5]], "output_tokens": ["many"]},
        {"prompt": [[5]], "output_tokens": [1], "arrival_s": [float("nan")]},
        {"prompt": [[5]], "output_tokens": [1], "column.answer_in": [7]},
        {"prompt": [[5]], "output_tokens": [1], "column.priority": ["high"]},
        {"output_tokens": [1]},
    ],
)
@pytest.mark.parametrize("facts", [b"{}", b"[]", b"\xff", None])
def test_parquet_of_another_schema_is_no_workload(columns: dict[str, Any], facts: bytes | None, tmp_path: Path) -> None:
    saved = {"name": "w", "recipe": {}, "request_fields": {}, "keep_text": False, "sha256": "0"}
    metadata = {"llmexp.workload": json.dumps(saved).encode() if facts is None else facts}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / "w.parquet")
    with pytest.raises(WorkloadError, match=r"w\.parquet"):
        build(Custom(path=str(tmp_path / "w.parquet")), make_model())


def test_a_truncated_saved_workload_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.parquet"
    save(build(SharedPrefix(), make_model()), path)
    whole = path.read_bytes()
    for kept in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(WorkloadError, match="not a Parquet file"):
            build(Custom(path=str(path)), make_model())


@pytest.mark.parametrize(
    "columns",
    [
        {"question": ["q"], "subject": ["s"], "choices": [["a"] * 4], "answer": [-1]},
        {"question": ["q"], "subject": ["s"], "choices": [["a"] * 3], "answer": [1]},
        {"question": ["q"], "subject": ["s"], "choices": ["abcd"], "answer": [1]},
        {"question": ["q"], "subject": [None], "choices": [["a"] * 4], "answer": [1]},
        {"question": ["q"], "answer": [1]},
    ],
)
def test_mmlu_as_parquet_of_another_schema(columns: dict[str, Any], text_model: Model, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for split in ("dev", "test"):
        pq.write_table(pa.table(columns), tmp_path / "all" / f"{split}-0.parquet")
    with pytest.raises(WorkloadError, match=r"dev-0\.parquet"):
        build(Mmlu(path=str(tmp_path)), text_model)


def test_mmlu_in_latin_1(text_model: Model, tmp_path: Path) -> None:
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"s_{split}.csv").write_bytes("é,a,b,c,d,A\n".encode("latin-1"))
    with pytest.raises(WorkloadError, match=r"s_dev\.csv:1: not UTF-8"):
        build(Mmlu(path=str(tmp_path)), text_model)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE", "vocab": 3}}', '{"model": null}'])
def test_a_broken_tokenizer_is_named(content: str, text_model: Model) -> None:
    (text_model.path / "tokenizer.json").write_text(content)
    with pytest.raises(WorkloadError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(text_model)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"chat_template": 5}',
        '{"chat_template": [{}]}',
        '{"chat_template": "{% for %}"}',
        '{"chat_template": "{{ 1 / 0 }}"}',
        '{"chat_template": "{{ messages[0].x.y }}"}',
        '{"chat_template": "{{ [].__class__.__base__.__subclasses__() }}"}',
        '{"chat_template": "{{ range(10**9) }}"}',
        '{"chat_template": "x", "bos_token": {"text": "<s>"}}',
    ],
)
def test_a_broken_or_hostile_chat_template_is_named(content: str, text_model: Model) -> None:
    (text_model.path / "tokenizer_config.json").write_text(content)
    with pytest.raises(WorkloadError, match="chat template"):
        ChatTemplate(text_model).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "config",
    [
        SharedPrefix(prefix_tokens=2**29 - 1, suffix_tokens=2**29 - 1, output_tokens=2**29 - 1),
        UniquePrefix(prefix_tokens=2**29 - 1),
        MultiTurn(num_conversations=1, turns=1000, user_tokens=2**29 - 1),
    ],
)
def test_lengths_that_no_model_takes_are_told_at_once(config: SharedPrefix | UniquePrefix | MultiTurn) -> None:
    with pytest.raises(WorkloadError, match="too long"):
        build(config, make_model())
