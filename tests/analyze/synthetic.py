"""Studies with known effects, written to disk as a multirun would leave them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmexp.client.records import TRACE_SCHEMA
from llmexp.measure.catalog import PERCENTILES
from llmexp.results import (
    TRACE,
    Percentile,
    PlannedRun,
    RoundResult,
    RunResult,
    StudyRecord,
    load_run,
    load_study_record,
    save_run,
    save_study,
)
from llmexp.schema.study import Claim


def make_study(
    folder: Path,
    *,
    speedups: Mapping[str, float] | None = None,
    cells: Sequence[Mapping[str, str]] = ({},),
    trials: int = 5,
    rounds: int = 2,
    requests: int = 24,
    compare: str | None = "cache",
    trial_noise: float = 0.02,
    claims: Iterable[Claim] = (),
    simulated: bool = False,
    seed: int = 0,
) -> StudyRecord:
    """Writes a study whose arm `name` serves `speedups[name]` times as fast as the baseline, the first arm.

    Every launch and round is off by log-normal noise; service times of neighbouring requests are correlated.
    """
    speedups = speedups or {"off": 1.0, "on": 2.0}
    arms = list(speedups)
    plans = [
        PlannedRun(
            name="-".join([*(f"{k}={v}" for k, v in cell.items()), f"{compare or 'run'}={arm}", f"t{trial}"]),
            arm=arm,
            cell=cell,
            trial=trial,
            position=2 * c + (i + trial) % len(arms),
        )
        for trial in range(trials)
        for c, cell in enumerate(cells)
        for i, arm in enumerate(arms)
    ]
    record = StudyRecord(
        name=folder.name,
        compare=compare,
        baseline=arms[0] if compare else None,
        arms=tuple(arms),
        cells=tuple(cells),
        trials=trials,
        margin=0.05,
        confidence=0.9,
        claims=tuple(claims),
        runs=tuple(plans),
        overrides=(f"{compare}={','.join(arms)}", f"study.trials={trials}") if compare else (),
    )
    save_study(record, folder)
    for i, plan in enumerate(plans):
        rng = np.random.default_rng([seed, i])
        save_run(_run(folder, record, plan, speedups[plan.arm], rounds, requests, trial_noise, simulated, rng))
    return record


def same_in_every_trial(folder: Path) -> None:
    """Gives every trial of a study the measures of the first, as a simulation does that no seed changes."""
    record = load_study_record(folder)
    first = {(plan.arm, str(plan.cell)): load_run(folder / plan.name) for plan in record.runs if plan.trial == 0}
    for plan in record.runs:
        one = first[plan.arm, str(plan.cell)]
        kept = {"measures": one.measures, "percentiles": one.percentiles, "rounds": one.rounds}
        save_run(load_run(folder / plan.name).model_copy(update=kept))


def _run(
    folder: Path,
    record: StudyRecord,
    plan: PlannedRun,
    speedup: float,
    rounds: int,
    requests: int,
    trial_noise: float,
    simulated: bool,
    rng: np.random.Generator,
) -> RunResult:
    here = folder / plan.name
    here.mkdir(parents=True)
    slots = int(plan.cell.get("max_num_seqs", 8))
    hits = 0.0 if plan.arm == "off" else 0.8
    launch = rng.normal(0, trial_noise)
    tables, results = [], []
    for index in range(rounds):
        slow = np.exp(launch + rng.normal(0, trial_noise / 2)) / speedup
        table = _trace(index, requests, slots, slow, hits, np.random.default_rng([plan.trial, index]), rng)
        tables.append(table)
        measures, percentiles = _measures(table)
        prompt_tokens = 600 * requests
        measures |= {"cache_hit_rate": hits, "preemptions": 0.0, "failed_requests": 0.0}
        measures |= {"expected_hit_tokens": hits * prompt_tokens, "observed_hit_tokens": hits * prompt_tokens}
        results.append(
            RoundResult(
                index=index,
                valid=True,
                invalid_reasons=(),
                measures=measures,
                percentiles=percentiles,
                contract={
                    "kind": "exact",
                    "expected_hit_tokens": int(hits * prompt_tokens),
                    "observed_hit_tokens": int(hits * prompt_tokens),
                    "queried_tokens": prompt_tokens,
                    "held": True,
                },
                client={},
            )
        )
    trace = pa.concat_tables(tables)
    pq.write_table(trace, here / TRACE)
    measures, percentiles = _measures(trace)
    return RunResult(
        study=record.name,
        name=plan.name,
        folder=here,
        status="complete",
        valid=True,
        invalid_reasons=(),
        simulated=simulated,
        arm=plan.arm,
        cell=plan.cell,
        trial=plan.trial,
        position=plan.position,
        seed=plan.trial,
        fingerprint=hashlib.sha256(plan.name.encode()).hexdigest(),
        workload_sha256=hashlib.sha256(f"{plan.cell} {plan.trial}".encode()).hexdigest(),
        measures=measures,
        percentiles=percentiles,
        rounds=tuple(results),
        engine={"version": "0.32.0", "block_size": 128, "kv_capacity_tokens": 81920},
        environment={"cpu": "8 cores", "python": "3.11.9", "vllm": "0.32.0"},
        timings_s={"engine_start": 48.0 + rng.random()},
        config={"model": {"name": "smollm2_135m"}},
    )


def _trace(
    index: int,
    requests: int,
    slots: int,
    slow: float,
    hits: float,
    workload: np.random.Generator,
    rng: np.random.Generator,
) -> pa.Table:
    """A closed loop of `slots` requests in flight; the workload's own variation is that of its trial and
    round."""
    size = np.exp(_correlated(requests, workload, 0.25) + _correlated(requests, rng, 0.08))
    free = np.zeros(slots)
    rows = []
    for i in range(requests):
        worker = int(free.argmin())
        due = float(free[worker])
        first = due + 0.35 * size[i] * slow * (1 + 0.02 * slots)
        chunks = first + 0.03 * size[i] * slow * np.arange(8)
        free[worker] = chunks[-1]
        rows.append(
            {
                "round": index,
                "request": i,
                "worker": 0,
                "intended_s": due,
                "sent_s": due + 2e-4,
                "first_token_s": first,
                "last_token_s": float(chunks[-1]),
                "end_s": float(chunks[-1]) + 1e-4,
                "chunk_s": chunks.tolist(),
                "prompt_tokens": 600,
                "cached_tokens": int(600 * hits),
                "output_tokens": 8,
                "finish_reason": "length",
            }
        )
    return pa.Table.from_pylist(rows, schema=TRACE_SCHEMA)


def _correlated(n: int, rng: np.random.Generator, deviation: float) -> np.ndarray:
    noise = rng.normal(0, deviation, n)
    for i in range(1, n):
        noise[i] = 0.5 * noise[i - 1] + np.sqrt(0.75) * noise[i]
    return noise


def _measures(table: pa.Table) -> tuple[dict[str, float], dict[str, Percentile]]:
    due, first, last = (table[name].to_numpy() for name in ("intended_s", "first_token_s", "last_token_s"))
    spans = [last[table["round"].to_numpy() == index].max() for index in np.unique(table["round"].to_numpy())]
    rate = len(due) / sum(spans)
    measures = {"throughput_req_per_s": rate, "throughput_output_tokens_per_s": 8 * rate}
    percentiles = {}
    for name, values in {"ttft": first - due, "e2e": last - due, "tpot": (last - first) / 7}.items():
        measures[f"{name}_ms_mean"] = 1000 * float(values.mean())
        for q in PERCENTILES:
            value = 1000 * float(np.percentile(values, q)) if len(values) * (100 - q) >= 100 else None
            percentiles[f"{name}_ms_p{q}"] = Percentile(value=value, low=value, high=value, n=len(values))
    return measures, percentiles
