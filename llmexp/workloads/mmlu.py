"""MMLU as a serving workload: few-shot prompts that share their solved examples, answered by one token.

Format of the prompts: Hendrycks et al., Measuring Massive Multitask Language Understanding, 2021, and the
evaluation script published with it.
"""

import difflib
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmexp.errors import ConfigError, WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import Mmlu
from llmexp.workloads.draws import permutation
from llmexp.workloads.files import csv_rows, shown
from llmexp.workloads.text import ChatTemplate, encode, load_tokenizer
from llmexp.workloads.workload import Tokens, Workload, packed

LETTERS = "ABCD"
HUB_ID = "cais/mmlu"
_HUB_SCHEMA = pa.schema(
    {"question": pa.string(), "subject": pa.string(), "choices": pa.list_(pa.string()), "answer": pa.int64()}
)
TOP_LOGPROBS = 20  # vLLM's default limit


@dataclass(frozen=True)
class Question:
    """One question; `name` is its subject and its place in the subject's file, counted from 0."""

    subject: str
    name: str
    text: str
    choices: tuple[str, ...]
    answer: str

    def asked(self) -> str:
        """The question as it is put, up to `Answer:`."""
        options = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=True))
        return f"{self.text}{options}\nAnswer:"

    def solved(self) -> str:
        """The question with its answer, as an example."""
        return f"{self.asked()} {self.answer}\n\n"


def mmlu(config: Mmlu, model: Model) -> Workload:
    """A seeded sample of MMLU's test questions after solved dev questions, one token each to generate.

    Prompts longer than the model allows lose their last examples; the column `shots` says how many are left.
    Raises WorkloadError with file and line for a broken file, or ConfigError for a subject that there is not.
    """
    folder = _folder(config)
    dev, test = (_read(folder, split, config.subjects) for split in ("dev", "test"))
    questions = _sample([question for each in test.values() for question in each], config)
    prompts = _Prompts(config, model, dev)
    texts, tokens, shots = prompts.of(questions)
    order = list(range(len(questions)))
    if config.order == "shuffled":
        order = permutation(len(questions), config.seed, "order").tolist()
    elif config.order == "sorted":
        order.sort(key=lambda i: len(tokens[i]))
    prompt_at, prompt_tokens = packed([tokens[i] for i in order])

    def column(values: Sequence[str | int]) -> NDArray[np.object_]:
        return np.array([values[i] for i in order], object)

    return Workload(
        name=config.kind,
        recipe={"content_sha256": _sha256(dev, test), "cut_short": sum(count < config.shots for count in shots)},
        prompt_at=prompt_at,
        prompt_tokens=prompt_tokens,
        output_tokens=np.ones(len(questions), np.int32),
        columns={
            "subject": column([question.subject for question in questions]),
            "question": column([question.name for question in questions]),
            "answer": column([question.answer for question in questions]),
            "shots": column(shots).astype(np.int32),
            "messages" if config.chat_template else "prompt_text": column(texts),
        },
        request_fields={"logprobs": TOP_LOGPROBS},
        keep_text=True,
    )


def header(subject: str | None) -> str:
    """The line that opens a prompt; without a subject for a prefix that serves all of them."""
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    return f"The following are multiple choice questions (with answers){about}.\n\n"


class _Prompts:
    """Writes and tokenises prompts, within the model's length."""

    def __init__(self, config: Mmlu, model: Model, dev: dict[str, list[Question]]) -> None:
        self._tokenizer = load_tokenizer(model)
        self._template = ChatTemplate(model) if config.chat_template else None
        self._longest = model.max_model_len - 1
        self._shots = config.shots
        self._examples = dev
        self._fixed: list[Question] | None = None
        if config.prefix == "fixed":
            every = [question for each in dev.values() for question in each]
            self._fixed = [every[i] for i in permutation(len(every), config.seed, "examples")]

    def of(self, questions: Sequence[Question]) -> tuple[list[str], list[Tokens], list[int]]:
        """Text (or chat messages as JSON), token ids and number of examples of each question's prompt."""
        shots = [min(self._shots, len(self._fixed or self._examples[each.subject])) for each in questions]
        texts = [self._text(question, count) for question, count in zip(questions, shots, strict=True)]
        tokens = self._encode(texts)
        while long := [i for i, ids in enumerate(tokens) if len(ids) > self._longest and shots[i]]:
            for i in long:
                shots[i] -= 1
                texts[i] = self._text(questions[i], shots[i])
            for i, ids in zip(long, self._encode([texts[i] for i in long]), strict=True):
                tokens[i] = ids
        return texts, tokens, shots

    def _text(self, question: Question, shots: int) -> str:
        examples = (self._fixed or self._examples[question.subject])[:shots]
        opening = header(None if self._fixed else question.subject)
        prompt = opening + "".join(example.solved() for example in examples) + question.asked()
        return json.dumps([{"role": "user", "content": prompt}]) if self._template else prompt

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._template is None:
            return encode(self._tokenizer, texts)
        rendered = [self._template.render(json.loads(messages)) for messages in texts]
        return encode(self._tokenizer, rendered, special=False)


def _sample(questions: list[Question], config: Mmlu) -> list[Question]:
    """The questions asked for, in the order of subjects and files."""
    if config.num_questions is None:
        return questions
    if config.num_questions > len(questions):
        raise ConfigError(f"workload.num_questions={config.num_questions}: there are {len(questions)}")
    return [questions[i] for i in np.sort(permutation(len(questions), config.seed, "sample")[: config.num_questions])]


def _sha256(*splits: dict[str, list[Question]]) -> str:
    return hashlib.sha256(repr(splits).encode()).hexdigest()


def _folder(config: Mmlu) -> Path:
    if config.path is not None:
        folder = Path(config.path).expanduser()
        if not folder.is_dir():
            raise WorkloadError(f"workload.path: no folder {config.path!r}")
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUB_ID, repo_type="dataset", allow_patterns=["all/dev-*", "all/test-*"]))
    except Exception as error:  # whatever stands between here and the Hub
        raise WorkloadError(
            f"{HUB_ID} could not be had from the Hugging Face Hub ({str(error).splitlines()[0]}); "
            "set workload.path to a folder with dev/SUBJECT_dev.csv and test/SUBJECT_test.csv"
        ) from None


def _read(folder: Path, split: str, subjects: Sequence[str] | None) -> dict[str, list[Question]]:
    """The questions of a split by subject, from the published CSV layout or the Hub's Parquet files."""
    parquet = sorted((folder / "all").glob(f"{split}-*.parquet"))
    files = {path.stem.removesuffix(f"_{split}"): path for path in sorted((folder / split).glob(f"*_{split}.csv"))}
    every = _read_parquet(parquet) if parquet else {}
    present = sorted(every or files)
    if not present:
        raise WorkloadError(f"{folder}: neither {split}/SUBJECT_{split}.csv nor all/{split}-*.parquet is there")
    for subject in subjects or []:
        if subject not in present:
            near = difflib.get_close_matches(subject, present) or present
            raise ConfigError(f"workload.subjects: no {subject!r} in {folder / split}; there is {', '.join(near)}")
    wanted = sorted(set(subjects)) if subjects else present
    return {subject: every[subject] if parquet else _read_csv(subject, files[subject]) for subject in wanted}


def _read_csv(subject: str, path: Path) -> list[Question]:
    questions = []
    for number, (place, row) in enumerate(csv_rows(path)):
        if len(row) != 6:
            raise WorkloadError(f"{place}: {len(row)} fields; a question, four choices and an answer make 6")
        text, *choices, answer = row
        if answer not in LETTERS or len(answer) != 1:
            raise WorkloadError(f"{place}: the answer is {shown(answer)!r}; A, B, C or D is accepted")
        questions.append(Question(subject, f"{subject}/{number}", text, tuple(choices), answer))
    return questions


def _read_parquet(paths: Sequence[Path]) -> dict[str, list[Question]]:
    by_subject: dict[str, list[Question]] = defaultdict(list)
    for path in paths:
        for number, row in enumerate(_rows(path)):
            choices = row["choices"] or []
            texts = (row["question"], row["subject"], *choices)
            if row["answer"] not in range(4) or len(choices) != 4 or None in texts:
                raise WorkloadError(
                    f"{path}: row {number}: a question, its subject, four choices and an answer from 0 to 3 are needed"
                )
            questions = by_subject[row["subject"]]
            name = f"{row['subject']}/{len(questions)}"
            answer = LETTERS[row["answer"]]
            questions.append(Question(row["subject"], name, row["question"], tuple(row["choices"]), answer))
    return by_subject


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).select(_HUB_SCHEMA.names).cast(_HUB_SCHEMA).to_pylist()
        return rows
    except (pa.ArrowException, OSError, KeyError) as error:
        raise WorkloadError(f"{path}: not the Hub's Parquet of MMLU ({shown(str(error))})") from None
