"""What is sent to a running engine: the warm-up, then one replay of the workload after the other, each judged."""

from dataclasses import asdict

import pyarrow.parquet as pq

from llmexp.client.replay import Replay, replay
from llmexp.engines.counters import Counters, settled
from llmexp.engines.engine import Engine
from llmexp.engines.sampling import Sample, sampled
from llmexp.measure.contract import Expectation, judge
from llmexp.measure.engine import engine_measures
from llmexp.measure.requests import request_measures
from llmexp.measure.validity import invalid_reasons
from llmexp.prepare import Preparation
from llmexp.progress import phase
from llmexp.record import SoFar, part
from llmexp.results import RoundResult
from llmexp.schema.load import ClosedLoop
from llmexp.workloads.audit import Audit, shared_blocks_between
from llmexp.workloads.warmup import warm_up


def send_warm_up(plan: Preparation, engine: Engine, account: Audit) -> int:
    """Sends the warm-up; returns how many KV blocks it shares with the workload."""
    config = plan.config
    concurrency = config.load.concurrency if isinstance(config.load, ClosedLoop) else config.max_num_seqs
    if config.warm_up.prompts == "workload":
        warm = plan.workload
    else:
        warm = warm_up(plan.workload, plan.model, concurrency, account.block_size, config.seed)
    with phase(f"{plan.name}: warm-up", len(warm)) as tick:
        load = ClosedLoop(concurrency=concurrency)
        replay(engine.destination, warm, load, config.client, round_index=-1, salted=False, progress=tick)
    return shared_blocks_between(warm, plan.workload, account.block_size)


def one_round(
    plan: Preparation,
    engine: Engine,
    expectation: Expectation,
    overlap_blocks: int,
    index: int,
    so_far: SoFar,
) -> None:
    """One replay from an empty cache: its trace goes to disk before anything is made of it."""
    config, workload = plan.config, plan.workload
    reset_confirmed = engine.reset_cache() if config.reset_cache else None
    before = settled(engine.counters)
    text = f"{plan.name}: round {index + 1} of {config.rounds}"
    with (
        sampled(engine.counters, config.engine.sample_interval_s) as samples,
        phase(text, len(workload)) as tick,
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
        )
    pq.write_table(sent.trace, part(plan.folder, index))
    for sample in samples:
        time_s = (sample.pop("monotonic_s") or 0.0) - sent.origin_monotonic_s
        so_far.samples.append({"round": index, "time_s": time_s, **sample})
    so_far.rounds.append(
        _judged(
            plan,
            index,
            sent,
            settled(engine.counters).since(before),
            samples,
            expectation,
            reset_confirmed,
            overlap_blocks,
        )
    )


def _judged(
    plan: Preparation,
    index: int,
    sent: Replay,
    counted: Counters,
    samples: list[Sample],
    expectation: Expectation,
    reset_confirmed: bool | None,
    overlap_blocks: int,
) -> RoundResult:
    contract = judge(expectation, counted, sent.trace)
    reasons = tuple(
        invalid_reasons(plan.config, plan.workload, sent.trace, sent.check, contract, reset_confirmed, overlap_blocks)
    )
    measures, percentiles = request_measures(sent.trace, plan.config.slo)
    of_engine, of_queue = engine_measures(counted, samples)
    return RoundResult(
        index=index,
        valid=not reasons,
        invalid_reasons=reasons,
        measures={
            **measures,
            **of_engine,
            "expected_hit_tokens": float(expectation.hit_tokens),
        },
        percentiles={**percentiles, **of_queue},
        contract={**asdict(contract), "held": contract.held, "reset_confirmed": reset_confirmed},
        client=asdict(sent.check),
    )
