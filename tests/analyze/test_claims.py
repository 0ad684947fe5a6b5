"""Claims: supported, refuted or undecided, and refused where nothing could answer them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from llmexp.analyze.claims import Answer, answer_claims, check_claims
from llmexp.analyze.study import load_study
from llmexp.errors import ConfigError
from llmexp.schema.study import Claim
from tests.analyze.synthetic import make_study, same_in_every_trial

SWEPT = {"cache": ("on", "off"), "max_num_seqs": ("8", "32")}
CELLS = [{"max_num_seqs": "8"}, {"max_num_seqs": "32"}]


def answers(folder: Path, claims: Sequence[Claim]) -> tuple[Answer, ...]:
    return answer_claims(load_study(folder).compare(), claims)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twice the speed in every cell, five trials."""
    folder = tmp_path_factory.mktemp("claims") / "s"
    make_study(folder, cells=CELLS, trials=5, requests=60)
    return folder


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        (Claim(measure="throughput_req_per_s", direction="higher"), "supported"),
        (Claim(measure="throughput_req_per_s", direction="higher", threshold=1.5), "supported"),
        (Claim(measure="throughput_req_per_s", direction="higher", threshold=3.0), "refuted"),
        (Claim(measure="throughput_req_per_s", direction="lower"), "refuted"),
        (Claim(measure="throughput_req_per_s", direction="equivalent"), "refuted"),
        (Claim(measure="throughput_req_per_s", direction="higher", threshold=2.0), "undecided"),
        (Claim(measure="e2e_ms_p95", direction="lower", threshold=0.7), "supported"),
        (Claim(measure="failed_requests", direction="equivalent"), "supported"),
        (Claim(measure="cache_hit_rate", direction="higher", threshold=0.5), "supported"),
        (Claim(measure="cache_hit_rate", direction="higher", threshold=0.9), "refuted"),
    ],
)
def test_what_a_doubled_throughput_says(study: Path, claim: Claim, outcome: str) -> None:
    (answer,) = answers(study, [claim])
    assert answer.outcome == outcome
    assert len(answer.evidence) == 2


def test_a_claim_covers_the_cells_that_it_names(study: Path) -> None:
    (answer,) = answers(
        study, [Claim(measure="ttft_ms_p50", direction="lower", cell={"max_num_seqs": "32", "cache": "on"})]
    )
    assert [row.cell for row in answer.evidence] == [{"max_num_seqs": "32"}]


def test_a_claim_falls_where_one_cell_refutes_it(tmp_path: Path) -> None:
    make_study(tmp_path / "s", cells=CELLS, trials=5, requests=60)
    make_study(tmp_path / "slow", cells=CELLS, trials=5, requests=60, speedups={"off": 1.0, "on": 0.5})
    fast, slow = load_study(tmp_path / "s"), load_study(tmp_path / "slow")
    mixed = [run for run in fast.runs if run.cell["max_num_seqs"] == "8"]
    mixed += [run for run in slow.runs if run.cell["max_num_seqs"] == "32"]
    comparison = type(fast)(fast.folder, fast.record, tuple(mixed)).compare()
    (answer,) = answer_claims(comparison, [Claim(measure="throughput_req_per_s", direction="higher")])
    assert answer.outcome == "refuted"


def test_more_claims_need_more_evidence(study: Path) -> None:
    sure = Claim(measure="throughput_req_per_s", direction="higher")
    open_questions = [Claim(measure="throughput_req_per_s", direction="higher", threshold=2.0)] * 9
    alone, among = answers(study, [sure])[0], answers(study, [sure, *open_questions])[0]
    assert alone.p == among.p == alone.q
    assert among.q == pytest.approx(10 * alone.q)


def test_what_is_exact_does_not_make_the_others_easier(study: Path) -> None:
    uncertain = Claim(measure="throughput_req_per_s", direction="higher")
    counted = Claim(measure="cache_hit_rate", direction="higher", threshold=0.5)
    alone, among = answers(study, [uncertain])[0], answers(study, [uncertain, counted, counted])
    assert (among[0].q, among[1].q) == (alone.q, None)
    assert among[1].outcome == "supported"


@pytest.mark.parametrize("trials", [2, 3])
def test_a_simulation_answers_for_its_model_and_says_so(tmp_path: Path, trials: int) -> None:
    make_study(tmp_path / "s", trials=trials, requests=8, simulated=True)
    same_in_every_trial(tmp_path / "s")
    claims = [Claim(measure="throughput_req_per_s", direction=each) for each in ("higher", "lower")]
    for answer, outcome in zip(answers(tmp_path / "s", claims), ("supported", "refuted"), strict=True):
        assert (answer.outcome, answer.q) == (outcome, None)
        assert answer.reason.endswith("the same in every trial of the simulation")


def test_claims_without_replication_stay_open(tmp_path: Path) -> None:
    make_study(tmp_path / "s", trials=2, requests=8)
    (answer,) = answers(tmp_path / "s", [Claim(measure="throughput_req_per_s", direction="higher")])
    assert answer.outcome == "undecided"
    assert "not replicated: 2 of the 3" in answer.reason
    (answer,) = answers(tmp_path / "s", [Claim(measure="itl_ms_p50", direction="lower")])
    assert (answer.outcome, answer.evidence) == ("undecided", ())


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"measure": "throughput_req_s"}, "did you mean throughput_req_per_s"),
        ({"measure": "ttft_ms_p50", "cell": {"max_num_seq": "8"}}, "did you mean max_num_seqs"),
        ({"measure": "ttft_ms_p50", "cell": {"max_num_seqs": "64"}}, r"not a swept value.*\(values: 8, 32\)"),
        ({"measure": "ttft_ms_p50", "threshold": 0}, "above 0"),
    ],
)
def test_claims_that_nothing_could_answer(claim: dict[str, object], message: str) -> None:
    good = Claim(measure="cache_hit_rate", direction="higher", threshold=0.0)
    with pytest.raises(ConfigError, match=rf"study.claims\[1\].*{message}"):
        check_claims([good, Claim.model_validate({"direction": "lower", **claim})], SWEPT)


def test_claims_that_can_be_answered_pass() -> None:
    check_claims(
        [
            Claim(measure="preemptions", direction="lower", threshold=-3.0),
            Claim(measure="ttft_ms_p50", direction="lower", cell={"cache": "on", "max_num_seqs": "8"}),
        ],
        SWEPT,
    )
