"""Every experiment file makes a plan, and every run of it is sound: as written on its GPU, and reduced on a CPU."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from mlflow import MlflowClient
from omegaconf import OmegaConf

from llmexp import plan
from llmexp.analyze.claims import check_claims
from llmexp.compose import compose, conf_dir, open_keys
from llmexp.measure.catalog import MEASURES
from llmexp.prepare import prepare
from llmexp.schema.config import Config, register_defaults
from llmexp.simulate.studies.make import STUDIES
from tests.simulate.reduced import REDUCED as REDUCED_SIMULATED
from tests.sources import azure_file, mmlu_folder, mooncake_file

SMALL = [
    "model=tiny_random",
    "gpu=cpu",
    "max_num_seqs=4",
    "workload.num_requests=4",
    "workload.prefix_tokens=96",
    "workload.suffix_tokens=32",
    "workload.output_tokens=4",
    "study.cells=[]",
]
# What makes each experiment small enough for a CPU. A key given twice keeps its last value, as on the command line.
REDUCED = {
    "prefix_cache": SMALL,
    "server_vs_async": [*SMALL, "workload.output_tokens=4,8"],
    "kv_budget": [*SMALL, "kv.gpu_memory_utilization=null", "kv.num_blocks=40,65,200"],
    "tensor_parallel": [*SMALL, "workload.num_requests=2,4"],
    "saturation": [*SMALL, "max_num_seqs=16", "study.search_low=2", "study.search_high=16"],
    "context_length": [*SMALL, "workload.prefix_tokens=64,256"],
    "model_size": [*SMALL, "model=tiny_random,smollm2_135m"],
    "request_pressure": [*SMALL, "load.concurrency=2,4,8"],
    "scheduler_budget": [*SMALL, "scheduler.max_num_batched_tokens=2048,4096", "study.baseline='2048'"],
    "chunked_prefill": [*SMALL, "scheduler.max_num_batched_tokens=2048"],
    "salted_cost": SMALL,
    "telemetry_cost": SMALL,
    "front_end": [*SMALL, "load.concurrency=128,256"],
}

# The same for those that are made from files.
FEW_QUESTIONS = ["model=tiny_random", "gpu=cpu", "workload.num_questions=8"]
REDUCED_SOURCES = {
    "mmlu_prefix_cache": [*FEW_QUESTIONS, "max_num_seqs=2,4"],
    "mmlu_standard": [*FEW_QUESTIONS, "max_num_seqs=4"],
    "trace_replay": [
        *("model=tiny_random", "model.max_model_len=2048", "gpu=cpu", "max_num_seqs=4"),
        *("workload.limit=4", "workload.scale_lengths=0.0625", "load.speed=8,16"),
    ],
}


def test_no_experiment_is_left_out() -> None:
    files = {path.stem for path in (conf_dir() / "experiment").glob("*.yaml")}
    assert files == {*REDUCED, *REDUCED_SOURCES, *REDUCED_SIMULATED}


@pytest.mark.parametrize("experiment", REDUCED_SIMULATED)
def test_a_study_of_the_simulator_names_every_knob(experiment: str) -> None:
    """As written it composes without a GPU and without a file of data; `tests/simulate/test_studies.py` makes it."""
    written = OmegaConf.load(conf_dir() / "experiment" / f"{experiment}.yaml")
    config = compose([f"experiment={experiment}"])
    assert config.simulation is not None and config.simulation.kind in STUDIES
    assert set(written.simulation) == set(type(config.simulation).model_fields)
    assert config.model.generated is not None


def test_a_study_of_the_simulator_takes_no_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "-m", "experiment=block_size", "kv.block_size=16,32"]
    done = subprocess.run([*command, f"runs_dir={tmp_path}"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "llmexp: kv.block_size: got 16,32; a study of the simulator takes one value of each key\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("multirun", [[], ["-m"]])
def test_a_study_of_the_simulator_from_the_command_line(multirun: list[str], tmp_path: Path) -> None:
    places = [f"runs_dir={tmp_path}", f"tracking.dir={tmp_path / 'mlruns'}", "study.name=mine"]
    command = [sys.executable, "-m", "llmexp", *multirun, "experiment=paged_memory"]
    overrides = [*REDUCED_SIMULATED["paged_memory"], "simulation.sharing_requests=2", *places]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("SIMULATED")) == (0, 3), done.stderr
    assert (tmp_path / "mine" / "report.md").exists()
    found = MlflowClient(f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}").search_runs(["1"])
    assert [run.info.status for run in found] == ["FINISHED"]
    assert found[0].data.tags["llmexp.simulated"] == "true"
    assert found[0].data.metrics["tokens.max"] < found[0].data.metrics["tokens.blocks of 8"]
    assert found[0].data.params["simulation.capacity_tokens"] == "2048"


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """The override that gives each experiment its files."""
    questions = f"workload.path={mmlu_folder(tmp_path / 'mmlu')}"
    trace = f"workload.path={mooncake_file(tmp_path / 'trace.jsonl')}"
    return {"mmlu_prefix_cache": questions, "mmlu_standard": questions, "trace_replay": trace}


def runs_of(experiment: str, overrides: Sequence[str]) -> tuple[plan.Design, list[Config]]:
    """The plan of an experiment and the config of each of its runs, as the sweeper makes them."""
    register_defaults()
    parser = OverridesParser.create()
    chosen = f"experiment={experiment}"
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        whole: Any = hydra_compose("config", [chosen], return_hydra_config=True)
    GlobalHydra.instance().clear()
    stated = [f"{key}={value}" for key, value in whole.hydra.sweeper.params.items()]
    taken = plan.take_apart(parser.parse_overrides(open_keys([*stated, chosen, *overrides])))
    study = compose(taken.shared).study
    swept = dict(taken.swept)
    if study.search:
        swept[str(study.search_key)] = (str(study.search_low), str(study.search_high))
    design = plan.design(swept, study)
    made = []
    for arm, cell in itertools.product(design.arms, design.cells):
        values = {**({design.compare: arm} if design.compare else {}), **cell}
        made.append(compose([*taken.shared, *(f"{key}={value}" for key, value in values.items())]))
    if study.claims:
        check_claims(study.claims, swept | {key: tuple(cell[key] for cell in design.cells) for key in design.cells[0]})
    return design, made


@pytest.mark.parametrize("experiment", REDUCED)
def test_as_written_each_run_is_sound_and_differs_from_the_others(experiment: str) -> None:
    design, made = runs_of(experiment, ["gpu=h200"])
    assert len({config.model_dump_json() for config in made}) == len(made) >= 2
    assert design.baseline in design.arms
    for config in made:
        assert config.model.load_format == "dummy" and config.gpu.name == "h200"
        assert all(claim.measure in MEASURES for claim in config.study.claims)
        fixed = config.workload.model_dump()
        longest = fixed["prefix_tokens"] + (
            fixed["suffix_tokens"] if isinstance(fixed["suffix_tokens"], int) else fixed["suffix_tokens"]["max"]
        )
        assert longest + fixed["output_tokens"] <= (config.model.max_model_len or 0)


@pytest.mark.parametrize("experiment", REDUCED)
def test_reduced_it_is_ready_to_run_on_a_cpu(experiment: str) -> None:
    _, made = runs_of(experiment, REDUCED[experiment])
    assert {config.gpu.device for config in made} == {"cpu"}
    if experiment != "model_size":  # its other model is fetched or dequantised
        first = prepare(made[0])
        assert len(first.workload) <= 4


@pytest.mark.parametrize("experiment", REDUCED_SOURCES)
def test_as_written_what_is_made_from_files_is_sound(experiment: str, sources: dict[str, str]) -> None:
    design, made = runs_of(experiment, ["gpu=h200", sources[experiment]])
    assert len({config.model_dump_json() for config in made}) == len(made)
    assert (design.compare, design.baseline) == ("cache", "off")
    assert all(claim.measure in MEASURES for claim in made[0].study.claims)
    if experiment != "trace_replay":
        assert all(config.model.load_format == "auto" for config in made)  # random weights have no accuracy


def test_the_study_of_mmlu_with_one_prefix(sources: dict[str, str]) -> None:
    """Twelve runs: the cache, three numbers of requests, all of them in flight, and two orders of 500 questions."""
    design, made = runs_of("mmlu_prefix_cache", ["gpu=h200", sources["mmlu_prefix_cache"]])
    assert (len(design.arms), len(design.cells), len(made)) == (2, 6, 12)
    found = {(config.cache.name, config.max_num_seqs, config.workload.order) for config in made}  # type: ignore[union-attr]
    assert found == set(itertools.product(("on", "off"), (32, 128, 256), ("sorted", "shuffled")))
    for config in made:
        assert (config.load.kind, config.load.concurrency) == ("closed_loop", config.max_num_seqs)  # type: ignore[union-attr]
        asked = config.workload.model_dump()
        assert (asked["shots"], asked["prefix"], asked["num_questions"]) == (5, "fixed", 500)


@pytest.mark.parametrize("experiment", REDUCED_SOURCES)
def test_reduced_what_is_made_from_files_is_ready_on_a_cpu(experiment: str, sources: dict[str, str]) -> None:
    design, made = runs_of(experiment, [*REDUCED_SOURCES[experiment], sources[experiment]])
    assert {config.gpu.device for config in made} == {"cpu"}
    plans = [prepare(config) for config in made]
    is_trace = experiment == "trace_replay"
    for ready in plans:
        assert len(ready.workload) == (4 if is_trace else 8)
        assert (ready.config.load.kind == "trace", ready.workload.arrivals_s is not None) == (is_trace, is_trace)
    hashes = [ready.workload.sha256 for ready in plans]
    assert all(len(set(hashes[i :: len(design.cells)])) == 1 for i in range(len(design.cells)))


def test_a_trace_of_another_kind_can_be_replayed(tmp_path: Path) -> None:
    path = f"workload.path={azure_file(tmp_path / 'trace.csv')}"
    _, made = runs_of("trace_replay", [*REDUCED_SOURCES["trace_replay"], "workload=azure", path])
    assert {config.workload.kind for config in made} == {"azure"}
    assert len(prepare(made[0]).workload) == 4


def test_the_arms_of_an_experiment_send_the_same_requests() -> None:
    for experiment in ("prefix_cache", "tensor_parallel", "salted_cost"):
        design, made = runs_of(experiment, REDUCED[experiment])
        hashes = [prepare(config).workload.sha256 for config in made]
        by_arm = [hashes[i :: len(design.cells)] for i in range(len(design.cells))]
        assert all(len(set(same)) == 1 for same in by_arm)
