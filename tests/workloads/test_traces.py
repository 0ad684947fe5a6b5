import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.errors import WorkloadError
from llmexp.models import Model
from llmexp.schema.workloads import Azure, Mooncake
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from tests.workloads.conftest import make_model

Write = Callable[[str, str], Path]


def request(timestamp: float, length: int, ids: list[int], output: int = 10) -> str:
    value = {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}
    return json.dumps(value) + "\n"


TRACE = request(0, 1100, [0, 1, 2]) + request(1500, 1500, [0, 1, 3]) + request(4000, 512, [0]) + request(4000, 9, [7])


def test_equal_ids_are_equal_tokens(write: Write) -> None:
    workload = build(Mooncake(path=str(write("t.jsonl", TRACE))), make_model())
    first, second, third, _ = workload.prompts()
    assert workload.prompt_tokens.tolist() == [len(prompt) for prompt in workload.prompts()] == [1100, 1500, 512, 9]
    assert np.array_equal(first[:1024], second[:1024])
    assert first[1024] != second[1024]
    assert np.array_equal(first[:512], third)
    assert workload.arrivals_s is not None
    assert workload.arrivals_s.tolist() == [0, 1.5, 4, 4]


def test_a_trace_that_is_too_long_is_told_what_fits(write: Write) -> None:
    """What is suggested works: a longer context where the model has one, shorter requests, or another model."""
    path = str(write("t.jsonl", TRACE))
    short = make_model(max_model_len=512)

    def advice(model: Model, **knobs: float) -> str:
        with pytest.raises(WorkloadError) as error:
            build(Mooncake(path=path, **knobs), model)  # type: ignore[arg-type]
        return str(error.value).partition("output tokens; ")[2]

    with_room = replace(short, config={"max_position_embeddings": 2048})
    said = "set model.max_model_len=1510 or more, of which the model takes 2048, or ask for shorter ones"
    assert advice(with_room) == f"{said}, as with workload.scale_lengths=0.33"
    build(Mooncake(path=path), replace(short, max_model_len=1510))
    build(Mooncake(path=path, scale_lengths=0.33), short)
    assert advice(short, scale_lengths=0.5).startswith("ask for shorter ones, as with workload.scale_lengths=0.33")
    assert "model=random_8b takes 131072, for audits and engine=simulator" in advice(short)
    assert "random_8b" not in advice(short, scale_lengths=1000.0)


@pytest.mark.parametrize(("block_size", "reusable"), [(512, 1024 + 0), (16, 1024 + 496), (500, 1000 + 500)])
def test_reuse_by_hand(write: Write, block_size: int, reusable: int) -> None:
    """The second request shares 1,024 tokens, the third its 512 less the last token."""
    account = audit(build(Mooncake(path=str(write("t.jsonl", TRACE))), make_model()), block_size)
    assert account.reusable_tokens == reusable


def test_speed_and_limit(write: Write) -> None:
    path = str(write("t.jsonl", TRACE))
    workload = build(Mooncake(path=path, speed=2, limit=3), make_model())
    assert workload.arrivals_s is not None
    assert workload.arrivals_s.tolist() == [0, 0.75, 2]
    assert np.array_equal(workload.prompt_at(1), build(Mooncake(path=path), make_model()).prompt_at(1))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 511)), min_size=1, max_size=12),
    st.sampled_from([1 / 64, 0.1, 0.25, 1.0]),
)
@settings(max_examples=30, deadline=None)
def test_scaling_keeps_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], scale: float
) -> None:
    """Conversations that share `common` blocks and go on alone; the block hit rate must not move."""
    text, fresh = "", 1000
    for own, common, rest in drawn:
        ids = [*range(common), *range(fresh, fresh + own)]
        fresh += own
        text += request(0, len(ids) * 512 - rest, ids)
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_text(text)
    block = round(512 * scale)
    workload = build(Mooncake(path=str(path), scale_lengths=scale), make_model(max_model_len=8192))
    full = build(Mooncake(path=str(path)), make_model(max_model_len=8192))
    scaled_account, account = audit(workload, block), audit(full, 512)
    assert scaled_account.reusable_tokens / block == account.reusable_tokens / 512
    assert scaled_account.ideal_block_hit_rate == account.ideal_block_hit_rate
    assert (-(-workload.prompt_tokens // block)).tolist() == (-(-full.prompt_tokens // 512)).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (request(5, 9, [1]) + request(4, 9, [1]), "t.jsonl:2: timestamp 4 goes back; 5 came before"),
        (request(5, -9, [1]), "t.jsonl:1: input_length"),
        (request(5, 9, [1], output=-1), "t.jsonl:1: output_length"),
        (request(5, 513, [1]), "t.jsonl:1: 1 hash_ids for input_length=513; blocks of 512 tokens make 2"),
        (request(5, 9, [1]) + "{broken\n", "t.jsonl:2: not JSON"),
        ('{"timestamp": 1}\n', "t.jsonl:1: input_length: it needs to be set"),
        ("[1, 2]\n", "t.jsonl:1: "),
    ],
)
def test_broken_mooncake(write: Write, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        build(Mooncake(path=str(write("t.jsonl", text))), make_model())


def test_scale_too_small(write: Write) -> None:
    with pytest.raises(WorkloadError, match=r"scale_lengths=0\.001 makes blocks of 1 tokens"):
        build(Mooncake(path=str(write("t.jsonl", TRACE)), scale_lengths=0.001), make_model())


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_azure(write: Write) -> None:
    rows = "2023-11-16 18:17:03.9799600,48,10\r\n2023-11-16 18:17:05.4799600,31,1\r\n"
    path = str(write("a.csv", HEADER + rows))
    workload = build(Azure(path=path, speed=0.5), make_model())
    assert workload.arrivals_s == pytest.approx(np.array([0, 3.0]))
    assert (workload.prompt_tokens.tolist(), workload.output_tokens.tolist()) == ([48, 31], [10, 1])
    assert audit(workload, 1).reusable_tokens == 0
    scaled = build(Azure(path=path, scale_lengths=0.1), make_model())
    assert (scaled.prompt_tokens.tolist(), scaled.output_tokens.tolist()) == ([5, 3], [1, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEADER + "2023-11-16 18:17:03,4,1\n2023-11-16 18:17:02,4,1\n",
            "a.csv:3: TIMESTAMP .*18:17:02.* goes back",
        ),
        (HEADER + "2023-11-16 18:17:03,-4,1\n", "a.csv:2: prompt_tokens: .*got '-4'"),
        (HEADER + "2023-11-16 18:17:03,4\n", "a.csv:2: the row has another number of fields"),
        (HEADER + "yesterday,4,1\n", "a.csv:2: arrival"),
        (
            "TIME,ContextTokens,GeneratedTokens\n",
            "a.csv:1: no column 'TIMESTAMP'; the file has TIME, Context",
        ),
        (HEADER, "no requests"),
    ],
)
def test_broken_azure(write: Write, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        build(Azure(path=str(write("a.csv", text))), make_model())
