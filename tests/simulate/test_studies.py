"""The studies of the simulator, reduced, and effects that the literature reports."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compose import compose
from llmexp.errors import ConfigError, WorkloadError
from llmexp.simulate import Request, Requests, Settings, StepCost, Work, simulate
from llmexp.simulate.allocators import beam_blocks
from llmexp.simulate.starvation import overtaken
from llmexp.simulate.studies import make
from llmexp.simulate.studies.block_size import empty_share
from llmexp.simulate.studies.findings import Findings
from llmexp.simulate.studies.paged_memory import beams, samples
from llmexp.simulate.studies.setting import setting
from llmexp.simulate.summary import inter_token_s, reuse_bound, summary
from tests.simulate.cases import Case, cases, of_those_that_end
from tests.simulate.reduced import REDUCED

COST = StepCost(Work(steps=0.01, prefill_tokens=1e-4, decode_tokens=1e-4))


@pytest.fixture(scope="module")
def found() -> Callable[[str], Findings]:
    """The findings of an experiment, reduced; each is made once."""
    made: dict[str, Findings] = {}

    def of(experiment: str) -> Findings:
        if experiment not in made:
            config = compose([f"experiment={experiment}", *REDUCED[experiment]])
            assert config.simulation is not None
            made[experiment] = make.STUDIES[config.simulation.kind](setting(config), config.simulation)
        return made[experiment]

    return of


@pytest.mark.parametrize("experiment", REDUCED)
def test_every_study_gives_numbers_that_fit_a_terminal(experiment: str, found: Callable[[str], Findings]) -> None:
    from rich.console import Console

    findings = found(experiment)
    assert findings.headline and all(np.isfinite(list(findings.headline.values())))
    for numbers in findings.tables:
        assert len(numbers.frame) > 1
        assert set(numbers.shown) <= set(numbers.frame)
        console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(make.table(numbers))
        drawn = console.export_text()
        assert "SIMULATED" in drawn
        rows = [line for line in drawn.splitlines() if line.strip()]
        assert len(rows) == len(numbers.frame) + 3, "a row is broken in two"  # title, headings, rule


def table(findings: Findings, name: str) -> pd.DataFrame:
    return next(numbers.frame for numbers in findings.tables if numbers.name == name)


def test_paged_memory_holds_more_tokens_the_smaller_its_blocks(found: Callable[[str], Findings]) -> None:
    shares = table(found("paged_memory"), "reservations").set_index("reservation")
    assert shares[["tokens", "later", "internal", "external"]].sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert shares["tokens"]["max"] < shares["tokens"]["pow2"] < shares["tokens"]["oracle"]
    assert shares["tokens"]["oracle"] < shares["tokens"]["blocks of 64"] < shares["tokens"]["blocks of 8"]
    sharing = table(found("paged_memory"), "sharing").pivot(index="group_size", columns="method", values="saved_share")
    assert (sharing["beams"] > sharing["parallel samples"]).all()


def test_large_blocks_reuse_less_waste_more_and_are_fewer(found: Callable[[str], Findings]) -> None:
    frame = table(found("block_size"), "block_sizes")
    small, large = (frame[frame["block_size"] == size].set_index("capacity_tokens") for size in (8, 64))
    assert (large["bound"] < small["bound"]).all()  # 192 of 200 tokens are whole blocks of 64, all 200 of 8
    assert large["hit_rate"][16384] <= large["bound"][16384]
    assert (large["empty_share"] > small["empty_share"]).all()
    assert (large["hashed_blocks_per_request"] < small["hashed_blocks_per_request"] / 7).all()


def test_radix_and_blocks_reuse_the_same_where_memory_suffices(found: Callable[[str], Findings]) -> None:
    frame = table(found("radix_vs_blocks"), "caches")
    roomy = frame[frame["capacity_share"] == frame["capacity_share"].max()]["hit_rate"]
    assert roomy.max() - roomy.min() < 0.02
    assert roomy.min() > 0.3  # answers are reused too


def test_order_moves_reuse_towards_the_bound(found: Callable[[str], Findings]) -> None:
    frame = table(found("scheduling_order"), "by_memory")
    tight = frame[frame["capacity_tokens"] == 640].set_index("order")  # of six prefixes, two fit
    bound = 54 * 192 / (60 * 240)
    assert tight["bound"].to_numpy() == pytest.approx(bound)
    assert tight["hit_rate"]["first come, first served"] < 0.4
    assert tight["hit_rate"]["depth first"] == pytest.approx(bound, abs=0.02)
    assert tight["hit_rate"]["longest cached prefix"] > 0.9 * bound
    assert tight["overtaken_max"]["first come, first served"] == 0 < tight["overtaken_max"]["depth first"]
    assert (frame["hit_rate"] <= frame["bound"] + 1e-12).all()


def test_static_batches_are_slower_than_continuous_ones(found: Callable[[str], Findings]) -> None:
    frame = table(found("static_vs_continuous"), "batchings")
    fast = frame[frame["rate_per_s"] == 200].set_index("batching")
    assert fast["request_throughput"]["continuous"] > 1.2 * fast["request_throughput"]["static"]
    slow = frame[frame["rate_per_s"] == 1].set_index("batching")
    assert slow["request_throughput"].to_numpy() == pytest.approx(slow["request_throughput"].iloc[0], rel=0.05)


def test_a_policy_is_told_by_whom_it_serves(found: Callable[[str], Findings]) -> None:
    policies = table(found("scheduler_policies"), "policies").set_index("policy")
    classes = table(found("scheduler_policies"), "classes")
    assert len(policies) == 8 and len(classes) == 8 * 4
    assert policies["overtaken_max"]["first come"] == 0 < policies["overtaken_max"]["shortest service"]
    assert classes["deadlines_met"].isna().eq(classes["class"] == "batch").all()
    assert classes.groupby("policy")["requests"].sum().eq(60).all()


def test_small_budgets_shorten_the_gaps_between_tokens(found: Callable[[str], Findings]) -> None:
    frame = table(found("chunked_prefill_simulated"), "budgets")
    gaps = frame.set_index(["chunked_prefill", "max_num_batched_tokens"])["itl_ms_p99"]
    assert ("off", 128) not in gaps.index  # the longest prompt does not fit a step
    assert gaps["on", 128] < gaps["on", 1024]


def test_files_say_simulated_and_a_repetition_is_equal(tmp_path: Path) -> None:
    def made(folder: str) -> Path:
        overrides = [*REDUCED["paged_memory"], f"runs_dir={tmp_path / folder}", "study.name=s", "tracking=off"]
        return make.make(setting(compose(["experiment=paged_memory", *overrides])))

    first, second = made("a"), made("b")
    names = sorted(path.name for path in first.iterdir())
    expected = ["config.yaml", "figure.png", "figure.svg", "report.md"]
    expected += [f"{name}.{kind}" for name in ("reservations", "sharing") for kind in ("csv", "parquet")]
    assert names == sorted([*expected, "simulation.json"])
    for name in set(names) - {"config.yaml"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert "# SIMULATED" in (first / "report.md").read_text()
    frame = pd.read_parquet(first / "sharing.parquet")
    pd.testing.assert_frame_equal(frame, pd.read_csv(first / "sharing.csv"))
    assert made("a") == first  # made again in its place


def test_what_a_folder_holds_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = compose(["experiment=paged_memory", *REDUCED["paged_memory"], f"runs_dir={tmp_path}", "study.name=mine"])
    with pytest.raises(ConfigError, match=r"study\.name: got mine, whose folder holds something else"):
        make.make(setting(config))


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ["experiment=paged_memory", "simulation.block_sizes=[0]"],
            ConfigError,
            r"simulation\.block_sizes\[0\]: got 0",
        ),
        (["experiment=paged_memory", "simulation.block_sizes=8"], ConfigError, r"got 8; accepted is a list"),
        (["experiment=block_size", "simulation.capacity_tokens=[99]"], ConfigError, "num_gpu_blocks=13 gives 12"),
        (["experiment=paged_memory", "simulation.blocks=8"], ConfigError, r"simulation\.blocks: no such key"),
        (["experiment=paged_memory", "simulation.kind=pages"], ConfigError, "paged_memory"),
        (["experiment=paged_memory", "simulation.max_model_len=64"], WorkloadError, r"simulation\.max_model_len=64"),
        (["experiment=block_size", "gpu=cpu"], ConfigError, "gpu: got cpu, whose datasheet is not known"),
        (["experiment=scheduler_policies", "workload=many_prefixes"], ConfigError, "workload: got shared_prefix"),
    ],
)
def test_wrong_input_is_named(overrides: list[str], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        make.make(setting(compose([*overrides, f"runs_dir={tmp_path}", "tracking=off"])))


@settings(deadline=None)
@given(case=cases())
def test_no_engine_reuses_more_than_the_bound(case: Case) -> None:
    """Without answers that later prompts repeat."""
    fresh = [replace(request, output_token_ids=None) for request in case.requests]
    requests = Requests.of(fresh, case.settings.block_size)
    with of_those_that_end():
        result = simulate(requests, case.settings, max_concurrency=case.max_concurrency, compiled=False)
    assert summary(result)["hit_rate"] <= reuse_bound(requests) + 1e-12


def test_the_bound_worked_out_by_hand() -> None:
    """Blocks of 4: ``abcd`` alone computes its block, and the longer prompts hit it, whoever comes first."""
    prompts = [list(b"abcd"), list(b"abcdefgh"), list(b"abcdefghi"), list(b"xyz")]
    requests = Requests.of([Request(prompt_token_ids=p, output_tokens=1) for p in prompts], 4)
    assert reuse_bound(requests) == (2 * 4 + 1 * 4) / 24


def test_empty_places_and_gaps_worked_out_by_hand() -> None:
    """A prompt of 6 and 3 tokens in blocks of 4: 6, 7 and 8 tokens held, in two blocks."""
    result = simulate([Request(prompt_token_ids=[0] * 6, output_tokens=3)], Settings(num_gpu_blocks=9, block_size=4))
    assert empty_share(result) == (2 + 1 + 0) / 24
    assert inter_token_s(result).tolist() == [1.0, 1.0]


def test_the_random_order_is_an_order_and_always_the_same() -> None:
    requests = [Request(prompt_token_ids=[i] * 8, output_tokens=1) for i in range(20)]
    engine = Settings(num_gpu_blocks=9, max_num_seqs=1, policy="random")
    first, second = (simulate(requests, engine).requests["admitted_s"].to_pylist() for _ in range(2))
    assert first == second and sorted(first) == [float(i) for i in range(20)] != first


@settings(deadline=None)
@given(size=st.integers(2, 5), steps=st.integers(1, 40), prompt=st.integers(1, 40), seed=st.integers(0, 99))
def test_beams_save_more_than_samples_and_less_than_clones(size: int, steps: int, prompt: int, seed: int) -> None:
    """Beams that all go on from the best share all but their last blocks."""
    chosen = beams(np.random.default_rng(seed), size, steps, 0.5)
    assert len(chosen) == steps and all(len(parents) == size for parents in chosen)
    apart, searched, clones = (
        sum(beam_blocks(prompt, parents, 4)[0]) for parents in (samples(size, steps), chosen, [[0] * size] * steps)
    )
    assert clones <= searched <= apart


def test_overtaking_is_counted() -> None:
    first = Request(prompt_token_ids=[0] * 16, output_tokens=5)
    low = Request(prompt_token_ids=[1] * 16, output_tokens=1, arrival_s=1.0, priority=9)
    high = [Request(prompt_token_ids=[2] * 16, output_tokens=1, arrival_s=t) for t in (2.0, 3.0)]
    result = simulate([first, low, *high], Settings(num_gpu_blocks=9, max_num_seqs=1, policy="priority"))
    assert overtaken(result).tolist() == [0, 2, 0, 0]
