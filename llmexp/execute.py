"""One run, told from start to end: prepare, launch, warm up, replay in rounds, record."""

import itertools
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Literal

import psutil
from omegaconf import OmegaConf

from llmexp import interrupt, results, tracking
from llmexp.engines.engine import NoMemoryError
from llmexp.engines.lease import EngineLease
from llmexp.errors import StorageError, TrackingError, storage_error
from llmexp.measure.contract import expect
from llmexp.measure.limits import kv_bytes_per_token
from llmexp.prepare import Preparation, account, prepare
from llmexp.progress import phase
from llmexp.record import SoFar, clear, record
from llmexp.results import RunResult
from llmexp.rounds import one_round, rounds_of, send_warm_up
from llmexp.schema.config import Config

_RUNS_MADE = itertools.count()  # in this process


def run(config: Config, lease: EngineLease | None = None) -> RunResult:
    """Runs one config and returns what was measured; its folder and its MLflow run hold the same.

    Raises ConfigError, WorkloadError or TrackingError before anything starts, then what `make` raises.
    """
    plan = prepare(config)
    tracking.require_ready(config.tracking)
    return make(plan, lease or EngineLease(keep=False))


def make(plan: Preparation, lease: EngineLease) -> RunResult:
    """Makes a run that was prepared. Raises StorageError where the disk refuses.

    An engine that finds too little memory to start is a result too, of status "refused", with what it lacked.
    A failure or interruption is raised again once everything measured until then is on disk and in MLflow.
    """
    try:
        return _made(plan, lease)
    except OSError as error:
        raise storage_error(error, plan.folder) or error from None


def _made(plan: Preparation, lease: EngineLease) -> RunResult:
    clear(plan.folder)
    settings = plan.config.model_dump(mode="json")
    (plan.folder / results.CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    so_far = SoFar(engine={"kv_bytes_per_token": kv_bytes_per_token(plan.config, plan.model.config)})
    so_far.timings_s["prepare"] = plan.duration_s
    if next(_RUNS_MADE) == 0:  # for the others it would count the runs before them
        so_far.timings_s["process_to_launch"] = time.time() - psutil.Process().create_time()
    try:
        _measure(plan, lease, so_far)
    except NoMemoryError as refusal:
        so_far.engine |= {"needed_bytes": refusal.needed_bytes, "available_bytes": refusal.available_bytes}
        return _kept(plan, so_far, "refused", str(refusal))
    except BaseException as failure:
        interrupted = isinstance(failure, KeyboardInterrupt)
        try:
            _kept(plan, so_far, "killed" if interrupted else "failed", str(failure) or type(failure).__name__)
        except (OSError, StorageError):
            if not isinstance(failure, StorageError):  # which says the same, and where the trace is
                raise
        raise
    return _kept(plan, so_far, "complete", None)


def _kept(
    plan: Preparation, so_far: SoFar, status: Literal["complete", "failed", "killed", "refused"], error: str | None
) -> RunResult:
    """Records the run, whatever signals come meanwhile; where the disk refuses, MLflow at least is told why."""
    with interrupt.held():
        try:
            return record(plan, so_far, status, error)
        except (OSError, StorageError) as refusal:
            if so_far.tracked is not None:
                with suppress(TrackingError):
                    tracking.close_run(so_far.tracked, "failed", f"{plan.folder}: {refusal}")
            raise


def _tracked(plan: Preparation) -> tracking.TrackedRun | None:
    """Opens the MLflow run; None where that fails and the study will tell MLflow at its end."""
    if not plan.config.tracking.enabled:
        return None
    try:
        return tracking.start_run(plan.config, plan.study, plan.name)
    except TrackingError as failure:
        if plan.config.run.parent_run_id is None:
            raise
        print(f"{plan.name}: {failure}; it is told later", file=sys.stderr)
        return None


def _measure(plan: Preparation, lease: EngineLease, so_far: SoFar) -> None:
    config, workload = plan.config, plan.workload

    def while_starting() -> None:
        so_far.audit = account(config, workload, None)
        with interrupt.held():  # what is opened is known, and closed
            so_far.tracked = _tracked(plan)

    with ExitStack() as stack:
        asked = time.monotonic()
        with phase(f"{plan.name}: engine {config.engine.kind}, model {plan.model.name}, gpu {config.gpu.name}"):
            engine, reused = stack.enter_context(lease.engine(config, plan.model, plan.folder, while_starting))
        so_far.timings_s["engine_start"] = 0.0 if reused else engine.launch_s
        so_far.timings_s["engine_wait"] = time.monotonic() - asked - so_far.timings_s["engine_start"]
        so_far.engine |= {**asdict(engine.facts), "reused": reused}
        if engine.facts.open_ports and not reused:
            ports = ", ".join(map(str, engine.facts.open_ports))
            what = f"port {ports} of the engine can be reached from elsewhere; let a firewall keep others off"
            print(f"{plan.name}: {what}", file=sys.stderr)
        if so_far.audit is None or engine.facts.block_size not in (None, so_far.audit.block_size):
            so_far.audit = account(config, workload, engine.facts.block_size)
        began = time.monotonic()
        overlap_blocks = send_warm_up(plan, engine, so_far.audit)
        so_far.timings_s["warm_up"] = time.monotonic() - began
        expectation = expect(config, so_far.audit, engine.facts.num_gpu_blocks)
        for index in range(rounds_of(plan)):
            one_round(plan, engine, expectation, overlap_blocks, index, so_far)
        so_far.engine["throttled"] = any(item.measures.get("gpu_throttled_share", 0.0) > 0 for item in so_far.rounds)
        so_far.timings_s["rounds"] = time.monotonic() - began - so_far.timings_s["warm_up"]
