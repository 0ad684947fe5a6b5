import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmexp.errors import LlmexpError
from llmexp.models import Model
from llmexp.schema.workloads import Custom, SharedPrefix
from llmexp.workloads.build import build
from llmexp.workloads.store import save
from tests.workloads.conftest import make_model

Write = Callable[[str, str], Path]
ARRIVAL = '{"token_ids": [5], "arrival_s": 2}\n'


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_text_ids_and_chat(text_model: Model, write: Write) -> None:
    path = write(
        "w.jsonl",
        lines(
            {"prompt": "ab"},
            {"token_ids": [5, 6], "output_tokens": 3},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
    )
    workload = build(Custom(path=str(path), output_tokens=9), text_model)
    tokenizer = text_model.tokenizer()
    texts = [tokenizer.decode(prompt.tolist(), skip_special_tokens=False) for prompt in workload.prompts()]
    assert (texts[0], texts[2]) == ("<s>ab", "<user>hi<assistant>")
    assert workload.prompt_at(1).tolist() == [5, 6]
    assert workload.output_tokens.tolist() == [9, 3, 9]
    assert workload.arrivals_s is None


def test_texts_are_kept_where_all_are_texts(text_model: Model, write: Write) -> None:
    path = write("w.jsonl", lines({"prompt": "ab"}, {"prompt": "c"}))
    assert build(Custom(path=str(path)), text_model).columns["prompt_text"].tolist() == ["ab", "c"]


def test_messages_are_kept_where_all_are_messages(text_model: Model, write: Write) -> None:
    messages = [{"role": "user", "content": "ab"}]
    path = write("w.jsonl", lines({"messages": messages}, {"messages": messages}))
    kept = build(Custom(path=str(path)), text_model).columns["messages"]
    assert [json.loads(each) for each in kept] == [messages] * 2


def test_sending_columns_and_arrivals(write: Write) -> None:
    path = write(
        "w.jsonl",
        lines(
            {"token_ids": [5], "arrival_s": 0.5, "priority": 2},
            {"token_ids": [6], "arrival_s": 0.5, "conversation": 4},
        ),
    )
    workload = build(Custom(path=str(path)), make_model())
    assert workload.arrivals_s is not None
    assert workload.arrivals_s.tolist() == [0.5, 0.5]
    assert {name: values.tolist() for name, values in workload.columns.items()} == {
        "priority": [2, 0],
        "conversation": [-1, 4],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"token_ids": [5]}\nnot json\n', r"w.jsonl:2: not JSON .* got 'not json'"),
        ('{"token_ids": [5], "output_tokens": -3}\n', r"w.jsonl:1: output_tokens: got -3; accepted is an integer"),
        ('\n{"token_ids": [-5]}\n', r"w.jsonl:2: token_ids\[0\]: got -5"),
        ('{"output_tokens": 3}\n', "jsonl:1: .*exactly one of prompt, token_ids and messages"),
        ('{"prompt": "a", "token_ids": [5]}\n', "w.jsonl:1: .*exactly one of"),
        ('{"token_ids": [5], "arival_s": 1}\n', "w.jsonl:1: arival_s"),
        (ARRIVAL + '{"token_ids": [5], "arrival_s": 1}\n', "w.jsonl:2: arrival_s 1 goes back; 2 came"),
        (ARRIVAL + '{"token_ids": [5]}\n', "w.jsonl:2: arrival_s on some lines only"),
        ('{"token_ids": [1000]}\n', "token id 1000; made has ids below 1000"),
        ("", "no requests"),
    ],
)  # fmt: skip
def test_wrong_lines_are_told_with_their_place(write: Write, text: str, message: str) -> None:
    with pytest.raises(LlmexpError, match=message):
        build(Custom(path=str(write("w.jsonl", text))), make_model())


def test_no_file_and_no_tokenizer(write: Write) -> None:
    with pytest.raises(LlmexpError, match="no file '/no/such'"):
        build(Custom(path="/no/such"), make_model())
    path = write("w.jsonl", lines({"prompt": "text"}))
    with pytest.raises(LlmexpError, match=r"no tokenizer\.json"):
        build(Custom(path=str(path)), make_model())


def test_a_saved_workload_replays(tmp_path: Path) -> None:
    original = build(SharedPrefix(num_requests=30), make_model())
    save(original, tmp_path / "w.parquet")
    replay = build(Custom(path=str(tmp_path / "w.parquet")), make_model())
    assert replay.sha256 == original.sha256
    assert replay.recipe["saved_recipe"] == original.recipe
    assert len(build(Custom(path=str(tmp_path / "w.parquet"), limit=7), make_model())) == 7
    with pytest.raises(LlmexpError, match="request 0 has token id"):
        build(Custom(path=str(tmp_path / "w.parquet")), make_model(vocab_size=500))


def test_shuffled(tmp_path: Path) -> None:
    original = build(SharedPrefix(num_requests=30), make_model())
    save(original, tmp_path / "w.parquet")
    shuffled = build(Custom(path=str(tmp_path / "w.parquet"), order="shuffled", seed=1), make_model())
    key = [prompt.tobytes() for prompt in original.prompts()]
    order = [key.index(prompt.tobytes()) for prompt in shuffled.prompts()]
    assert sorted(order) == list(range(30)) != order
    assert np.array_equal(shuffled.columns["prefix"], original.columns["prefix"][order])


def test_arrivals_cannot_be_shuffled(write: Write) -> None:
    path = write("w.jsonl", lines({"token_ids": [5], "arrival_s": 0}))
    with pytest.raises(LlmexpError, match=r"workload\.order=shuffled"):
        build(Custom(path=str(path), order="shuffled"), make_model())


def test_template_refusal_is_an_error(text_model: Model, write: Write) -> None:
    template = "{{ raise_exception('no ' + messages[0].role) }}"
    (text_model.path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    path = write("w.jsonl", lines({"messages": [{"role": "system", "content": "x"}]}))
    with pytest.raises(LlmexpError, match="refuses the messages: no system"):
        build(Custom(path=str(path)), text_model)
