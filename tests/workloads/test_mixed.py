from typing import Any

import numpy as np
import pytest

from llmexp.schema.workloads import Mixed
from llmexp.workloads.audit import audit
from llmexp.workloads.build import build
from tests.workloads.conftest import make_model

CHAT = {
    "weight": 3,
    "prefix_tokens": 48,
    "suffix_tokens": {"distribution": "uniform", "min": 5, "max": 20},
    "priority": 1,
}
BATCH = {"weight": 1, "suffix_tokens": 200, "output_tokens": 30, "deadline_s": 9.0}
MIX: dict[str, Any] = {"classes": {"chat": CHAT, "batch": BATCH}, "num_requests": 40}


def test_classes_come_in_proportion_with_their_own_settings() -> None:
    workload = build(Mixed.model_validate(MIX), make_model())
    chat = workload.columns["class"] == "chat"
    assert chat.sum() == 30
    assert len(set(np.flatnonzero(~chat)) & set(range(10))) < 10  # mixed, not in a row
    assert set(workload.prompt_tokens[~chat]) == {200}
    assert 53 <= workload.prompt_tokens[chat].min() < workload.prompt_tokens[chat].max() <= 68
    assert set(workload.output_tokens[~chat]) == {30}
    assert set(workload.columns["deadline_s"][~chat]) == {9.0}
    assert np.isinf(workload.columns["deadline_s"][chat]).all()
    assert audit(workload, 16).reusable_tokens == 29 * 48


def test_priority_is_sent_only_if_asked_for() -> None:
    assert "priority" not in build(Mixed.model_validate(MIX), make_model()).columns
    workload = build(Mixed.model_validate({**MIX, "send_priority": True}), make_model())
    assert set(workload.columns["priority"][workload.columns["class"] == "chat"]) == {1}


def test_prefixes_of_different_classes_differ() -> None:
    classes = {name: {"prefix_tokens": 32, "num_prefixes": 2} for name in "ab"}
    workload = build(Mixed.model_validate({"classes": classes, "num_requests": 40}), make_model())
    assert len({prompt[:32].tobytes() for prompt in workload.prompts()}) == 4
    assert audit(workload, 16).reusable_tokens == 36 * 32


def test_reuse_target() -> None:
    workload = build(Mixed.model_validate({**MIX, "reuse": 0.5}), make_model())
    account = audit(workload, 16)
    assert abs(account.reusable_tokens - 0.5 * account.prompt_tokens) <= 16
    plain = build(Mixed.model_validate(MIX), make_model())
    assert workload.prompt_tokens.tolist() == plain.prompt_tokens.tolist()


def test_arrivals_are_poisson_at_the_rate() -> None:
    mix = Mixed.model_validate({**MIX, "num_requests": 20_000, "rate_per_s": 5})
    arrivals = build(mix, make_model(vocab_size=49152)).arrivals_s
    assert arrivals is not None
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_bursts_keep_the_mean_and_have_their_factor() -> None:
    bursts = {"every_s": 10, "duration_s": 2, "factor": 6}
    mix = Mixed.model_validate({**MIX, "num_requests": 30_000, "rate_per_s": 5, "bursts": bursts})
    arrivals = build(mix, make_model(vocab_size=49152)).arrivals_s
    assert arrivals is not None
    assert (np.diff(arrivals) >= 0).all()
    assert len(arrivals) / arrivals[-1] == pytest.approx(5, rel=0.03)
    within = (arrivals % 10 < 2).sum() / 2
    between = (arrivals % 10 >= 2).sum() / 8
    assert within / between == pytest.approx(6, rel=0.05)
