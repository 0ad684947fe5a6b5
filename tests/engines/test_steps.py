"""The recorder of steps over a faked scheduler, and the reading of its file."""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmexp.engines.recorded import COLUMNS, Recorder
from llmexp.engines.steps import steps_of_round


class FakeScheduler:
    """Schedules what it is told, as vLLM's scheduler shows it: `plan` holds (request, tokens) a step."""

    def __init__(self, plan: list[dict[str, int]], prompts: dict[str, int], outputs: dict[str, int]) -> None:
        self.plan = deque(plan)
        self.requests = {
            name: SimpleNamespace(num_prompt_tokens=tokens, num_computed_tokens=0, is_prefill_chunk=False)
            for name, tokens in prompts.items()
        }
        self.left = dict(outputs)
        self.running: list[Any] = list(self.requests)
        self.waiting: list[Any] = []
        pool = SimpleNamespace(get_num_free_blocks=lambda: 7)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        tokens = self.plan.popleft()
        for name, count in tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            request.is_prefill_chunk = request.num_computed_tokens < request.num_prompt_tokens
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            preempted_req_ids=None,
        )

    def update_from_output(self, output: Any, model_output: Any) -> dict[int, str]:
        for name in output.num_scheduled_tokens:
            self.left[name] -= not self.requests[name].is_prefill_chunk
        return {0: "outputs"}

    def has_unfinished_requests(self) -> bool:
        return any(count > 0 for count in self.left.values())


def rows(file: Path, origin_s: float = 0.0) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = steps_of_round(file, 3, origin_s).to_pylist()
    return listed


def test_it_counts_prefill_decode_pairs_and_context(tmp_path: Path) -> None:
    scheduler: Any = FakeScheduler([{"a": 6}, {"a": 4, "b": 5}, {"a": 1, "b": 1}], {"a": 10, "b": 5}, {"a": 2, "b": 2})
    Recorder(scheduler, tmp_path / "steps.csv")
    for _ in range(3):
        assert scheduler.update_from_output(scheduler.schedule(False), None) == {0: "outputs"}
    first, second, third = rows(tmp_path / "steps.csv")
    assert list(first) == ["round", *COLUMNS]
    assert first["round"] == 3
    counts = ("scheduled", "prefill_tokens", "decode_tokens", "sampled", "attended_pairs", "context_tokens")
    assert [first[name] for name in counts] == [1, 6, 0, 0, 21, 6]
    assert [second[name] for name in counts] == [2, 9, 0, 2, 4 * 6 + 10 + 15, 15]
    assert [third[name] for name in counts] == [2, 0, 2, 2, 11 + 6, 17]


def test_a_busy_engines_steps_leave_no_gap_and_an_idle_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 11.5, 13.0, 20.0, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    scheduler: Any = FakeScheduler([{"a": 5}, {"a": 1}, {"b": 5}], {"a": 5, "b": 5}, {"a": 2, "b": 0})
    Recorder(scheduler, tmp_path / "steps.csv")
    for _ in range(3):
        scheduler.update_from_output(scheduler.schedule(), None)
    times = [(row["scheduled_s"], row["start_s"], row["duration_s"]) for row in rows(tmp_path / "steps.csv", 10.0)]
    assert times == [(0.0, 0.0, 1.0), (1.5, 1.0, 2.0), (10.0, 10.0, 1.0)]


def test_a_step_scheduled_ahead_begins_when_the_one_before_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 10.1, 12.0, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    scheduler: Any = FakeScheduler([{"a": 5}, {"a": 1}], {"a": 5}, {"a": 2})
    Recorder(scheduler, tmp_path / "steps.csv")
    ahead = [scheduler.schedule(), scheduler.schedule()]
    for output in ahead:
        scheduler.update_from_output(output, None)
    times = [(row["start_s"], row["duration_s"]) for row in rows(tmp_path / "steps.csv")]
    assert times == [(10.0, 2.0), (12.0, 1.0)]


def test_empty_steps_earlier_rounds_and_half_a_line_are_left_out(tmp_path: Path) -> None:
    scheduler: Any = FakeScheduler([{"a": 5}, {}, {"a": 1}], {"a": 5}, {"a": 2})
    file = tmp_path / "steps.csv"
    Recorder(scheduler, file)
    scheduler.update_from_output(scheduler.schedule(), None)
    origin_s = time.monotonic()
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), None)
    with file.open("a") as cut:
        cut.write("123.4,12")  # the engine was killed as it wrote
    assert [row["decode_tokens"] for row in rows(file, origin_s)] == [1]
    assert len(rows(file)) == 2


def test_before_the_first_step_there_are_none(tmp_path: Path) -> None:
    Recorder(FakeScheduler([], {}, {}), tmp_path / "steps.csv")
    assert rows(tmp_path / "steps.csv") == []
