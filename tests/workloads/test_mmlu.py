import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmexp.errors import LlmexpError
from llmexp.models import Model
from llmexp.schema.workloads import Mmlu
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from llmexp.workloads.workload import Workload
from tests.workloads.conftest import make_text_model

SUBJECTS = {"abstract_algebra": 6, "law": 9}


def question(subject: str, split: str, number: int) -> list[str]:
    text = f"{subject} {split} question {number}" + ", long" * (number % 4) + "?"
    return [text, "one", 'two, "2"', "three", "four", "ABCD"[number % 4]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        for subject, count in SUBJECTS.items():
            with (tmp_path / split / f"{subject}_{split}.csv").open("w", newline="") as handle:
                csv.writer(handle).writerows(question(subject, split, i) for i in range(5 if split == "dev" else count))
    return tmp_path


def texts(workload: Workload, model: Model) -> list[str]:
    return [model.tokenizer().decode(prompt.tolist()) for prompt in workload.prompts()]


def test_prompt_as_published(folder: Path, text_model: Model) -> None:
    config = Mmlu(path=str(folder), shots=1, num_questions=None, order="by_subject")
    workload = build(config, text_model)
    assert texts(workload, text_model)[0] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
        'abstract_algebra dev question 0?\nA. one\nB. two, "2"\nC. three\nD. four\nAnswer: A\n\n'
        'abstract_algebra test question 0?\nA. one\nB. two, "2"\nC. three\nD. four\nAnswer:'
    )
    assert workload.columns["answer"].tolist() == ["ABCD"[i % 4] for i in range(6)] + ["ABCD"[i % 4] for i in range(9)]
    assert workload.columns["question"][7] == "law/1"
    assert workload.columns["subject"].tolist() == ["abstract_algebra"] * 6 + ["law"] * 9
    assert set(workload.output_tokens.tolist()) == {1}
    assert (workload.request_fields, workload.keep_text) == ({"logprobs": 20}, True)
    assert texts(workload, text_model) == workload.columns["prompt_text"].tolist()


def test_per_subject_prefixes_are_shared_within_a_subject(folder: Path, text_model: Model) -> None:
    workload = build(Mmlu(path=str(folder), num_questions=None), text_model)
    by_subject = {subject: [] for subject in SUBJECTS}  # type: dict[str, list[str]]
    for text, subject in zip(texts(workload, text_model), workload.columns["subject"], strict=True):
        by_subject[subject].append(text.rsplit("\n\n", 1)[0])
    assert [len(set(prefixes)) for prefixes in by_subject.values()] == [1, 1]
    assert all(text.count("Answer: ") == 5 for each in by_subject.values() for text in each)
    assert audit(workload, 16).ideal_hit_rate > 0.5


def test_fixed_prefix_is_the_same_for_all(folder: Path, text_model: Model) -> None:
    workload = build(Mmlu(path=str(folder), num_questions=None, prefix="fixed", seed=3), text_model)
    prefixes = {text.rsplit("\n\n", 1)[0] for text in texts(workload, text_model)}
    assert len(prefixes) == 1
    assert prefixes.pop().startswith("The following are multiple choice questions (with answers).\n\n")
    per_subject = build(Mmlu(path=str(folder), num_questions=None), text_model)
    assert audit(workload, 16).ideal_hit_rate > audit(per_subject, 16).ideal_hit_rate


def test_orders_hold_the_same_requests(folder: Path, text_model: Model) -> None:
    def built(order: str) -> Workload:
        config = Mmlu.model_validate({"path": str(folder), "num_questions": 10, "order": order, "seed": 4})
        return build(config, text_model)

    shuffled, by_length, by_subject = built("shuffled"), built("sorted"), built("by_subject")
    assert (np.diff(by_length.prompt_tokens) >= 0).all()
    assert by_subject.columns["subject"].tolist() == sorted(by_subject.columns["subject"])
    names = [sorted(each.columns["question"]) for each in (shuffled, by_length, by_subject)]
    assert names[0] == names[1] == names[2]
    assert shuffled.columns["question"].tolist() != by_subject.columns["question"].tolist()
    for each in (shuffled, by_length):  # columns move with their prompts
        for text, name in zip(texts(each, text_model), each.columns["question"], strict=True):
            subject, number = name.split("/")
            assert question(subject, "test", int(number))[0] in text


def test_long_prompts_lose_their_last_examples(folder: Path, tmp_path: Path) -> None:
    model_folder = tmp_path / "small"
    model_folder.mkdir()
    model = make_text_model(model_folder, max_model_len=400)
    workload = build(Mmlu(path=str(folder), num_questions=None, order="by_subject"), model)
    shots = workload.columns["shots"]
    assert 0 < shots.min() <= shots.max() < 5
    assert workload.recipe["cut_short"] == 15
    assert (workload.prompt_tokens + 1 <= 400).all()
    text = texts(workload, model)[0]
    assert text.count("Answer: ") == shots[0]
    assert "dev question 0" in text
    with pytest.raises(LlmexpError, match="too long"):
        build(Mmlu(path=str(folder)).model_copy(update={"num_questions": 3}), make_text_model(model_folder, 50))


def test_chat_template(folder: Path, text_model: Model) -> None:
    workload = build(Mmlu(path=str(folder), num_questions=2, shots=0, chat_template=True), text_model)
    for text, messages in zip(texts(workload, text_model), workload.columns["messages"], strict=True):
        (message,) = json.loads(messages)
        assert message["role"] == "user"
        assert message["content"].startswith("The following") and message["content"].endswith("Answer:")
        assert text == f"<user>{message['content']}<assistant>"
    assert "prompt_text" not in workload.columns, "as text it would be templated without the server knowing"


def test_the_hubs_layout_gives_the_same_prompts(folder: Path, text_model: Model, tmp_path: Path) -> None:
    (tmp_path / "hub" / "all").mkdir(parents=True)
    for split in ("dev", "test"):
        rows = []
        for subject, count in SUBJECTS.items():
            for i in range(5 if split == "dev" else count):
                text, *choices, answer = question(subject, split, i)
                rows.append({"question": text, "subject": subject, "choices": choices, "answer": "ABCD".index(answer)})
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "all" / f"{split}-00000-of-00001.parquet")
    from_hub = build(Mmlu(path=str(tmp_path / "hub"), num_questions=9), text_model)
    assert from_hub.sha256 == build(Mmlu(path=str(folder), num_questions=9), text_model).sha256


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("q,a,b,c,D\n", r"law_test.csv:10: 5 fields"),
        ("q,a,b,c,d,E\n", r"law_test.csv:10: the answer is 'E'; A, B, C or D"),
        ("q,a,b,c,d,\n", r"law_test.csv:10: the answer is ''"),
    ],
)
def test_broken_rows(folder: Path, text_model: Model, row: str, message: str) -> None:
    with (folder / "test" / "law_test.csv").open("a") as handle:
        handle.write(row)
    with pytest.raises(LlmexpError, match=message):
        build(Mmlu(path=str(folder)), text_model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"subjects": ["abstract_algebr"]}, "no 'abstract_algebr' in .*; there is abstract_algebra"),
        ({"num_questions": 16}, "num_questions=16: there are 15"),
        ({"path": "/nowhere"}, "no folder '/nowhere'"),
    ],
)
def test_wrong_config(folder: Path, text_model: Model, config: dict[str, object], message: str) -> None:
    with pytest.raises(LlmexpError, match=message):
        build(Mmlu.model_validate({"path": str(folder), "num_questions": None, **config}), text_model)


def test_folder_without_questions(tmp_path: Path, text_model: Model) -> None:
    with pytest.raises(LlmexpError, match="neither dev/SUBJECT_dev"):
        build(Mmlu(path=str(tmp_path)), text_model)


def test_no_tokenizer(folder: Path, model: Model) -> None:
    with pytest.raises(LlmexpError, match=r"no tokenizer\.json"):
        build(Mmlu(path=str(folder), num_questions=None), model)
