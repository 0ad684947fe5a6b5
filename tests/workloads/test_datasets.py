import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmexp.errors import LlmexpError
from llmexp.models import Model
from llmexp.schema.workloads import Alpaca, ShareGpt
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from tests.workloads.conftest import make_model

Write = Callable[[str, str], Path]
LENGTHS = "prompt,output,other_prompt,other_output\n" + "".join(f"{10 + i},{20 + i},{50 + i},9\n" for i in range(40))


def pairs(config: ShareGpt | Alpaca, model: Model) -> list[tuple[int, int]]:
    workload = build(config, model)
    return list(zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True))


def test_lengths_of_a_csv(write: Write) -> None:
    path = str(write("l.csv", LENGTHS))
    drawn = pairs(ShareGpt(path=path, num_requests=None), make_model())
    assert sorted(drawn) == [(10 + i, 20 + i) for i in range(40)] != drawn
    sample = pairs(ShareGpt(path=path, num_requests=5, seed=1), make_model())
    assert len(set(sample)) == 5 and set(sample) < set(drawn)
    named = Alpaca(path=path, num_requests=5, prompt_column="other_prompt", output_column="other_output")
    other = pairs(named, make_model())
    assert {output for _, output in other} == {9}
    assert audit(build(ShareGpt(path=path, num_requests=40), make_model()), 1).reusable_tokens == 0


def test_limits_leave_rows_out(write: Write) -> None:
    path = str(write("l.csv", LENGTHS))
    config = ShareGpt(path=path, num_requests=None, min_tokens=12, max_prompt_tokens=30, max_total_tokens=60)
    assert sorted(pairs(config, make_model())) == [(10 + i, 20 + i) for i in range(2, 16)]
    with pytest.raises(LlmexpError, match="num_requests=20, but 14 rows are within min_tokens=12"):
        build(config.model_copy(update={"num_requests": 20}), make_model())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,output\n5,-1\n", "l.csv:2: output: .*got '-1'"),
        ("prompt,output\n5,6\n5,6,7\n", "l.csv:3: the row has another number of fields"),
        ("prompt,output\n5,many\n", "l.csv:2: output: .*got 'many'"),
        ("prompt\n5\n", "l.csv:1: 1 columns; 2 are needed"),
    ],
)
def test_broken_csv(write: Write, text: str, message: str) -> None:
    with pytest.raises(LlmexpError, match=message):
        build(ShareGpt(path=str(write("l.csv", text))), make_model())


def test_texts_need_the_json(write: Write) -> None:
    with pytest.raises(LlmexpError, match=r"workload\.content=text needs the original"):
        build(ShareGpt(path=str(write("l.csv", LENGTHS)), content="text"), make_model())


def sharegpt_entry(human: str, gpt: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": human}, {"from": "gpt", "value": gpt}]}


def test_sharegpt_texts(text_model: Model, write: Write) -> None:
    opens_wrong = {"conversations": [{"from": "gpt", "value": "hello, hello"}]}
    content = [
        sharegpt_entry("what is it?", "a thing"),
        opens_wrong,
        sharegpt_entry("second question", "answer"),
    ]
    path = str(write("s.json", json.dumps(content)))
    workload = build(ShareGpt(path=path, content="text", num_requests=None), text_model)
    tokenizer = text_model.tokenizer()
    texts = {tokenizer.decode(prompt.tolist()) for prompt in workload.prompts()}
    assert texts == {"what is it?", "second question"}
    assert sorted(workload.output_tokens.tolist()) == [6, 7]
    random = build(ShareGpt(path=path, num_requests=None), text_model)
    assert random.prompt_tokens.tolist() == workload.prompt_tokens.tolist()
    assert random.sha256 != workload.sha256


def test_alpaca_texts(text_model: Model, write: Write) -> None:
    content = [
        {"instruction": "Add.", "input": "1 and 2", "output": "three"},
        {"instruction": "Sing.", "input": "", "output": "la la"},
    ]
    path = str(write("a.json", json.dumps(content)))
    workload = build(Alpaca(path=path, content="text", num_requests=None), text_model)
    tokenizer = text_model.tokenizer()
    add, sing = sorted(tokenizer.decode(prompt.tolist()) for prompt in workload.prompts())
    assert add.endswith("### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:")
    assert sing.endswith("### Instruction:\nSing.\n\n### Response:")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "s.json: not JSON"),
        ("{}", "s.json: a list of objects is expected; got dict"),
        ('[{"conversation": []}]', "s.json: entry 0: expected conversations of from and value"),
        ('[{"conversations": [{"value": "a"}]}]', "s.json: entry 0: expected conversations"),
    ],
)
def test_broken_json(text_model: Model, write: Write, content: str, message: str) -> None:
    with pytest.raises(LlmexpError, match=message):
        build(ShareGpt(path=str(write("s.json", content))), text_model)


def test_texts_without_a_tokenizer(write: Write) -> None:
    with pytest.raises(LlmexpError, match=r"no tokenizer\.json"):
        build(ShareGpt(path=str(write("s.json", json.dumps([sharegpt_entry("a", "b")])))), make_model())
