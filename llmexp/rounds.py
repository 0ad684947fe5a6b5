"""What is sent to a running engine: the warm-up, then one replay of the workload after the other, each judged."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llmexp import results
from llmexp.client import spill
from llmexp.client.check import ClientCheck
from llmexp.client.replay import Replay, replay
from llmexp.engines.counters import Counters, settled
from llmexp.engines.engine import Engine
from llmexp.engines.sampling import Sample, sampled
from llmexp.engines.simulator import Simulator
from llmexp.engines.steps import steps_of_round
from llmexp.engines.telemetry import GpuSample, gpu_sampled
from llmexp.measure.accuracy import accuracy_measures, is_scored, score
from llmexp.measure.contract import Expectation, hit_measures, judge
from llmexp.measure.engine import engine_measures
from llmexp.measure.gpu import gpu_measures
from llmexp.measure.limits import cost_measures, limit_measures
from llmexp.measure.pressure import pressure_measures
from llmexp.measure.requests import request_measures
from llmexp.measure.validity import invalid_reasons
from llmexp.prepare import Preparation
from llmexp.progress import phase
from llmexp.record import SoFar, part
from llmexp.results import RoundResult
from llmexp.schema.engine import Simulator as SimulatorConfig
from llmexp.schema.load import ClosedLoop
from llmexp.workloads.audit import Audit, shared_blocks_between
from llmexp.workloads.warmup import warm_up


def send_warm_up(plan: Preparation, engine: Engine | Simulator, account: Audit) -> int:
    """Sends the warm-up, which a simulation needs none of; returns how many KV blocks it shares with the workload."""
    config = plan.config
    if isinstance(engine, Simulator):
        return 0
    assert not isinstance(config.engine, SimulatorConfig)
    concurrency = config.load.concurrency if isinstance(config.load, ClosedLoop) else config.max_num_seqs
    if config.warm_up.prompts == "workload":
        warm = plan.workload
    else:
        warm = warm_up(plan.workload, plan.model, concurrency, account.block_size, config.seed)
    with phase(f"{plan.name}: warm-up", len(warm)) as tick:
        load = ClosedLoop(concurrency=concurrency)
        client = config.client.model_copy(update={"api": "completions", "prompt": "ids"})  # it has no text
        replay(
            engine.destination,
            warm,
            load,
            client,
            round_index=-1,
            progress=tick,
            stall_timeout_s=config.engine.stall_timeout_s,
        )
    return shared_blocks_between(warm, plan.workload, account.block_size)


def rounds_of(plan: Preparation) -> int:
    """How many rounds the run has: as many as asked, but one of a simulation, which another would only repeat."""
    return 1 if plan.config.engine.kind == "simulator" else plan.config.rounds


def one_round(
    plan: Preparation,
    engine: Engine | Simulator,
    expectation: Expectation,
    overlap_blocks: int,
    index: int,
    so_far: SoFar,
) -> None:
    """One replay from an empty cache: its trace goes to disk before anything is made of it."""
    spill.reserve(plan.folder, plan.workload)
    with phase(f"{plan.name}: round {index + 1} of {rounds_of(plan)}", len(plan.workload)) as tick:
        if isinstance(engine, Simulator):
            seen = _simulated(plan, engine, index, so_far)
        else:
            seen = _measured(plan, engine, index, so_far, tick)
    so_far.rounds.append(_judged(plan, engine, index, seen, expectation, overlap_blocks))


@dataclass(frozen=True)
class _Seen:
    """All that was seen of a round. `check` is None where there was no client."""

    trace: pa.Table
    check: ClientCheck | None
    counted: Counters
    samples: list[Sample]
    of_gpu: dict[str, float]
    reset_confirmed: bool | None


def _measured(plan: Preparation, engine: Engine, index: int, so_far: SoFar, tick: Callable[[int, int], None]) -> _Seen:
    config, workload = plan.config, plan.workload
    assert not isinstance(config.engine, SimulatorConfig)
    reset_confirmed = engine.reset_cache() if config.reset_cache else None
    before = settled(engine.counters)
    with (
        sampled(engine.counters, config.engine.sample_interval_s) as samples,
        gpu_sampled(engine.facts.gpus, config.engine.gpu_sample_interval_s) as gpu_samples,
    ):
        sent = replay(
            engine.destination,
            workload,
            config.load,
            config.client,
            round_index=index,
            salted=config.cache.salt_requests,
            seed=config.seed,
            progress=tick,
            spill=part(plan.folder, index),
            stall_timeout_s=config.engine.stall_timeout_s,
        )
    if engine.steps is not None:
        so_far.steps.append(steps_of_round(engine.steps, index, sent.origin_monotonic_s))
    counted = settled(engine.counters).since(before)
    for sample in [*samples, *gpu_samples]:
        time_s = (sample["monotonic_s"] or 0.0) - sent.origin_monotonic_s
        so_far.samples.append({"round": index, "time_s": time_s, **sample})
    return _Seen(sent.trace, sent.check, counted, samples, _of_gpu(sent, gpu_samples), reset_confirmed)


def _simulated(plan: Preparation, engine: Simulator, index: int, so_far: SoFar) -> _Seen:
    """The same without waiting: the trace, counters and gauges of a simulation, whose steps and spans are kept."""
    from llmexp.simulate.timeline import write_chrome_trace

    served = engine.simulated.serve(plan.config, plan.workload, index)
    spill.write(served.trace, part(plan.folder, index))
    rounds = pa.array([index] * len(served.simulation.steps), pa.int32())
    so_far.steps.append(served.simulation.steps.add_column(0, "round", rounds))
    pq.write_table(served.simulation.spans, plan.folder / results.SPANS)
    write_chrome_trace(served.simulation, plan.folder / results.TIMELINE)
    so_far.samples += [{"round": index, **sample} for sample in served.samples]
    return _Seen(served.trace, None, served.counted, served.samples, {}, True)


def _judged(
    plan: Preparation,
    engine: Engine | Simulator,
    index: int,
    seen: _Seen,
    expectation: Expectation,
    overlap_blocks: int,
) -> RoundResult:
    trace, check = seen.trace, seen.check
    contract = judge(expectation, seen.counted, trace)
    reasons = tuple(
        invalid_reasons(plan.config, plan.workload, trace, check, contract, seen.reset_confirmed, overlap_blocks)
    )
    of_requests, percentiles = request_measures(trace, plan.config.slo)
    done = trace.filter(pc.is_null(trace["error"]))
    of_engine, of_queue = engine_measures(seen.counted, seen.samples, of_requests.get("duration_s", 0.0), len(done))
    scored = is_scored(plan.workload) and check is not None
    measures = {
        **of_engine,
        **of_requests,
        **hit_measures(contract),
        **pressure_measures(trace, engine.facts.kv_capacity_tokens),
        **seen.of_gpu,
        **(limit_measures(plan.config, plan.model.config, done) if len(done) else {}),
        **cost_measures(plan.config, of_requests),
        **(accuracy_measures(score(plan.workload, trace)) if scored else {}),
    }
    return RoundResult(
        index=index,
        valid=not reasons,
        invalid_reasons=reasons,
        measures=measures,
        percentiles={**of_queue, **percentiles},
        contract={**asdict(contract), "held": contract.held, "reset_confirmed": seen.reset_confirmed},
        client={} if check is None else asdict(check),
    )


def _of_gpu(sent: Replay, samples: list[GpuSample]) -> dict[str, float]:
    """What the round took of the device."""
    trace = sent.trace
    done = trace.filter(pc.is_null(trace["error"]))
    if not len(done):
        return {}
    return gpu_measures(
        samples,
        pc.min(trace["sent_s"]).as_py() + sent.origin_monotonic_s,
        pc.max(trace["end_s"]).as_py() + sent.origin_monotonic_s,
        requests=len(done),
        output_tokens=pc.sum(done["output_tokens"]).as_py() or 0,
    )
