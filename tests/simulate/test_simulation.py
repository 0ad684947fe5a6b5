"""The library's call: what it records, and what it refuses."""

from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.errors import ConfigError, WorkloadError
from llmexp.simulate import FrontEnd, Request, Requests, Settings, StepCost, Work, simulate
from llmexp.simulate.errors import RequestNeverFitsError, TimeStandsStillError, TokenBudgetTooSmallError
from llmexp.simulate.requests import ChainIds
from llmexp.simulate.timeline import write_chrome_trace, write_parquet
from tests.simulate.cases import Case, cases, of_those_that_end

both_loops = pytest.mark.parametrize("compiled", [False, True])


def test_one_request_step_by_step() -> None:
    """40 prompt tokens in chunks of 16, 16 and 8; the third step gives the first of 4 tokens."""
    cost = StepCost(Work(steps=1.0, prefill_tokens=0.5, decode_tokens=0.25))
    settings = Settings(num_gpu_blocks=10, max_num_seqs=4, max_num_batched_tokens=16)
    result = simulate([Request(prompt_token_ids=range(40), output_tokens=4, arrival_s=2.0)], settings, cost)
    assert result.steps["prefill_tokens"].to_pylist() == [16, 16, 8, 0, 0, 0]
    assert result.steps["decode_tokens"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert result.steps["duration_s"].to_pylist() == [9.0, 9.0, 5.0, 1.25, 1.25, 1.25]
    assert result.steps["free_blocks"].to_pylist() == [8, 7, 6, 6, 6, 6]
    assert result.steps["attended_pairs"].to_pylist()[:2] == [136, 16 * 16 + 136]
    (request,) = result.requests.to_pylist()
    assert (request["sent_s"], request["admitted_s"], request["first_token_s"]) == (2.0, 2.0, 25.0)
    assert request["finished_s"] == 28.75
    offsets, times = result.token_times_s()
    assert offsets.tolist() == [0, 4]
    assert times.tolist() == [25.0, 26.25, 27.5, 28.75]


@settings(deadline=None)
@given(case=cases())
def test_records_agree_with_each_other(case: Case) -> None:
    with of_those_that_end():
        result = simulate(case.requests, case.settings, max_concurrency=case.max_concurrency, compiled=False)
    requests, steps = result.requests.to_pydict(), result.steps.to_pydict()
    offsets, times = result.token_times_s()
    for i, request in enumerate(case.requests):
        tokens = times[offsets[i] : offsets[i + 1]]
        assert len(tokens) == request.output_tokens
        assert (np.diff(tokens) > 0).all()
        assert tokens[0] == requests["first_token_s"][i] and tokens[-1] == requests["finished_s"][i]
        assert requests["sent_s"][i] <= requests["admitted_s"][i] < tokens[0]
        start = 0.0 if request.after is None else requests["finished_s"][request.after]
        assert requests["sent_s"][i] >= start + request.arrival_s
    assert sum(steps["finished"]) == len(case.requests)
    assert sum(steps["hits"]) == sum(requests["cached_tokens"])
    assert sum(steps["preempted"]) == sum(requests["preemptions"])
    if case.max_concurrency:
        assert max(steps["running"]) <= case.max_concurrency
    spans = result.spans.to_pandas()
    assert (spans["tokens"] * spans["steps"]).sum() == sum(steps["prefill_tokens"]) + sum(steps["decode_tokens"])


def test_a_closed_loop_sends_when_an_answer_comes() -> None:
    requests = [Request(prompt_token_ids=[i], output_tokens=3) for i in range(3)]
    result = simulate(requests, Settings(num_gpu_blocks=99), max_concurrency=1)
    assert result.requests["sent_s"].to_pylist() == [0.0, 3.0, 6.0]


@both_loops
def test_a_conversation_keeps_its_place_or_queues_again(compiled: bool) -> None:
    """Requests 0 and 1 are a conversation with a pause of 2 s, 2 stands alone; a request takes 1 s."""
    requests = [
        Request(prompt_token_ids=[1], output_tokens=1),
        Request(prompt_token_ids=[2], output_tokens=1, arrival_s=2.0, after=0),
        Request(prompt_token_ids=[3], output_tokens=1),
    ]
    settings = Settings(num_gpu_blocks=99)
    sent = [
        simulate(requests, settings, max_concurrency=1, keeps_place=keeps_place, compiled=compiled)
        .requests["sent_s"]
        .to_pylist()
        for keeps_place in (True, False)
    ]
    assert sent == [[0.0, 3.0, 4.0], [0.0, 3.0, 1.0]]


@both_loops
def test_what_is_sent_as_a_step_ends_comes_in_the_order_of_the_requests(compiled: bool) -> None:
    """The turn after request 0, which ends at 1, and request 2."""
    requests = [
        Request(prompt_token_ids=[1], output_tokens=1),
        Request(prompt_token_ids=[2], output_tokens=1, after=0),
        Request(prompt_token_ids=[3], output_tokens=1, arrival_s=1.0),
    ]
    result = simulate(requests, Settings(num_gpu_blocks=99, max_num_seqs=1), compiled=compiled)
    assert result.requests["sent_s"].to_pylist() == [0.0, 1.0, 1.0]
    assert result.requests["admitted_s"].to_pylist() == [0.0, 1.0, 2.0]


@both_loops
def test_the_front_end_takes_requests_in_and_hands_tokens_out_one_after_the_other(compiled: bool) -> None:
    requests = [Request(prompt_token_ids=[i], output_tokens=2) for i in range(2)]
    front_end = FrontEnd(request_s=0.25, output_s=0.5, token_s=1.0)
    result = simulate(requests, Settings(num_gpu_blocks=99), front_end=front_end, compiled=compiled)
    assert result.requests["sent_s"].to_pylist() == [0.0, 0.0]
    # The first is computed from 0.25 to 1.25; the second came at 0.5 and waits for that step's end.
    assert result.requests["admitted_s"].to_pylist() == [0.25, 1.25]
    assert result.steps["start_s"].to_pylist() == [0.25, 1.25, 2.25]
    assert result.steps["sampled"].to_pylist() == [1, 2, 1]
    # 1.25 + 1.5; the next step's two tokens come after them: 2.75 + 2.5, and one more: 5.25 + 1.5.
    assert result.steps["delivered_s"].to_pylist() == [2.75, 5.25, 6.75]


@both_loops
def test_long_prompts_take_the_front_end_longer_both_ways(compiled: bool) -> None:
    requests = [Request(prompt_token_ids=range(n), output_tokens=2) for n in (4, 8)]
    front_end = FrontEnd(prompt_token_s=0.25, echo_s=0.5)
    result = simulate(requests, Settings(num_gpu_blocks=99), front_end=front_end, compiled=compiled)
    # Through at 1 and at 3; the front end is busy with the second until 3, then answers the first.
    assert result.steps["start_s"].to_pylist() == [1.0, 2.0, 3.0, 4.0]
    assert result.steps["delivered_s"].to_pylist() == [3.0 + 4 * 0.5, 5.0, 5.0 + 8 * 0.5, 9.0]


@both_loops
def test_the_engine_launches_a_prefill_before_it_takes_the_tokens_of_the_step_before(compiled: bool) -> None:
    """The device takes 1 s for any step, the launch of a step with prefill tokens 4 s of the engine core.

    Step 0 (request 0's prompt): decided at 0, launched until 4. Request 1 comes meanwhile and is in step 1, launched
    until 8; only then the first token is taken. Step 2 decodes both; the device computes it until 9.
    """
    requests = [Request(prompt_token_ids=[i], output_tokens=2, arrival_s=float(i)) for i in range(2)]
    cost = StepCost(Work(steps=1.0), prefill_launch_s=4.0)
    settings = Settings(num_gpu_blocks=99, async_scheduling=True)
    result = simulate(requests, settings, cost, compiled=compiled)
    assert result.steps["scheduled"].to_pylist() == [1, 2, 1]
    assert result.steps["scheduled_s"].to_pylist() == [0.0, 4.0, 8.0]
    assert result.steps["start_s"].to_pylist() == [0.0, 8.0, 8.0]
    assert result.requests["first_token_s"].to_pylist() == [8.0, 8.0]
    assert result.requests["finished_s"].to_pylist() == [8.0, 9.0]
    in_turn = simulate(requests, Settings(num_gpu_blocks=99), cost, compiled=compiled)
    assert in_turn.requests["first_token_s"].to_pylist() == [4.0, 8.0]
    assert in_turn.requests["finished_s"].to_pylist() == [8.0, 9.0]


def test_the_next_turn_hits_what_the_last_one_computed_and_generated() -> None:
    first, answer = list(range(30)), list(range(100, 120))
    turns = [
        Request(prompt_token_ids=first, output_tokens=20, output_token_ids=answer),
        Request(prompt_token_ids=[*first, *answer, 7], output_tokens=1, arrival_s=5.0, after=0),
    ]
    result = simulate(turns, Settings(num_gpu_blocks=99))
    assert result.requests["sent_s"].to_pylist() == [0.0, 25.0]
    assert result.requests["cached_tokens"].to_pylist() == [0, 48]  # of 49 cached: whole blocks


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"lora_name": "b"}])
def test_salt_and_lora_keep_prefixes_apart(other: dict[str, str]) -> None:
    own = Request(prompt_token_ids=range(40), output_tokens=1)
    foreign = Request(prompt_token_ids=range(40), output_tokens=1, **other)
    result = simulate([own, foreign, own], Settings(num_gpu_blocks=99))
    assert result.requests["cached_tokens"].to_pylist() == [0, 0, 32]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_chain_ids_are_equal_exactly_for_equal_prefixes(prompts: list[list[int]], block_size: int) -> None:
    chains = ChainIds()
    ids = [chains.of_tokens(prompt, block_size) for prompt in prompts]
    prefix_of: dict[int, tuple[int, ...]] = {}
    for prompt, chain in zip(prompts, ids, strict=True):
        assert len(chain) == len(prompt) // block_size
        for k, chain_id in enumerate(chain):
            prefix = tuple(prompt[: (k + 1) * block_size])
            assert prefix_of.setdefault(chain_id, prefix) == prefix
    assert len(set(prefix_of.values())) == len(prefix_of)


@both_loops
def test_hash_ids_share_like_the_tokens_they_stand_for(compiled: bool) -> None:
    """64-token ids over 16-token blocks give the records that token ids give."""
    prompts = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]]
    lengths = [180, 150, 64, 192]
    tokens = [[t for h in ids for t in [h] * 64][:n] for ids, n in zip(prompts, lengths, strict=True)]
    settings = Settings(num_gpu_blocks=40, max_num_seqs=2)
    given_hashes = Requests.of_hash_ids(prompts, 64, 16, prompt_tokens=lengths, output_tokens=[20] * 4)
    given_tokens = [Request(prompt_token_ids=t, output_tokens=20) for t in tokens]
    result = simulate(given_hashes, settings, compiled=compiled)
    assert result == simulate(given_tokens, settings, compiled=compiled)
    assert result.requests["cached_tokens"].to_pylist() == [0, 128, 0, 176]


@both_loops
def test_a_request_that_never_fits_is_refused(compiled: bool) -> None:
    fits = Request(prompt_token_ids=range(30), output_tokens=3)  # 32 tokens are fed: 2 blocks
    settings = Settings(num_gpu_blocks=3)
    assert len(simulate([fits], settings, compiled=compiled).requests) == 1
    larger = Request(prompt_token_ids=range(30), output_tokens=4)
    with pytest.raises(RequestNeverFitsError, match=r"request 1: 33 tokens need 3 blocks of 16, .* gives 2"):
        simulate([fits, larger], settings, compiled=compiled)


@both_loops
def test_an_unchunkable_prompt_over_the_budget_is_refused(compiled: bool) -> None:
    settings = Settings(num_gpu_blocks=99, max_num_batched_tokens=64, max_num_seqs=8, enable_chunked_prefill=False)
    with pytest.raises(TokenBudgetTooSmallError, match=r"request 0: up to 65 tokens.*max_num_batched_tokens=64"):
        simulate([Request(prompt_token_ids=range(60), output_tokens=6)], settings, compiled=compiled)


@both_loops
@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), -1.0])
def test_time_that_does_not_advance_is_an_error(seconds: float, compiled: bool) -> None:
    with pytest.raises(TimeStandsStillError, match=r"at 3.0 s a step takes .* 1 running, 0 waiting, 7 free"):
        simulate(
            [Request(prompt_token_ids=range(20), output_tokens=1, arrival_s=3.0)],
            Settings(num_gpu_blocks=10),
            StepCost(Work(steps=seconds)),
            compiled=compiled,
        )


def test_blocks_of_another_size_are_refused() -> None:
    requests = Requests.columns(block_size=32, prompt_tokens=[5], output_tokens=[1])
    with pytest.raises(ConfigError, match=r"block_size=16, .* blocks of 32"):
        simulate(requests, Settings(num_gpu_blocks=10))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_gpu_blocks", 1),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 100),
        ("watermark", 1.0),
        ("policy", "lifo"),
        ("long_prefill_token_threshold", -1),
    ],
)
def test_settings_that_vllm_refuses(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        Settings(**{"num_gpu_blocks": 10, setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"output_tokens": [1]}, "output_tokens has 1 entries"),
        ({"output_tokens": [1, 0]}, "request 1: output_tokens=0"),
        ({"arrival_s": [0.0, float("nan")]}, "request 1: arrival_s=nan"),
        ({"after": [-1, 1]}, "request 1: after=1"),
        ({"chain_offsets": [0, 1]}, "chain_offsets has 2 entries"),
    ],
)
def test_columns_that_do_not_fit_together(columns: dict[str, list[float]], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Requests.columns(**{"block_size": 16, "prompt_tokens": [3, 4], "output_tokens": [1, 1], **columns})  # type: ignore[arg-type]


def test_timeline_on_disk(tmp_path: Path) -> None:
    requests = [Request(prompt_token_ids=range(40), output_tokens=4, arrival_s=float(i)) for i in range(3)]
    result = simulate(requests, Settings(num_gpu_blocks=10, max_num_seqs=2, max_num_batched_tokens=16))
    write_parquet(result, tmp_path)
    assert pq.read_table(tmp_path / "steps.parquet") == result.steps
    write_chrome_trace(result, tmp_path / "trace.json")
    events = orjson.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["ts"] for e in steps] == [1e6 * t for t in result.steps["start_s"].to_pylist()]
    decoded = sum(e["args"]["steps"] for e in events if e["name"] == "decode")
    assert decoded == sum(result.steps["decode_tokens"].to_pylist()) == 9
