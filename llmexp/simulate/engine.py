"""The engine that a run's config describes, simulated: its settings, the cost of its steps, and a round of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llmexp.architecture import Architecture
from llmexp.client.arrivals import arrivals
from llmexp.client.records import TRACE_SCHEMA
from llmexp.engines.counters import Counters, Histogram
from llmexp.errors import ConfigError
from llmexp.measure.limits import BYTES, KV_BYTES, kv_bytes_per_token
from llmexp.models import Model
from llmexp.schema.config import Config
from llmexp.schema.load import ClosedLoop
from llmexp.simulate.calibration import CalibrationFile
from llmexp.simulate.cost import NO_FRONT_END, FrontEnd, StepCost
from llmexp.simulate.requests import Floats, Requests
from llmexp.simulate.roofline import Gpu, roofline
from llmexp.simulate.settings import Settings
from llmexp.simulate.simulation import Simulation, simulate
from llmexp.simulate.workload import opens, requests_of
from llmexp.workloads.workload import Workload

_BLOCK_SIZE = 16  # vLLM's on a GPU
_MEMORY_UTILIZATION = 0.9  # vLLM's default, as is what follows (``EngineArgs.get_batch_defaults``)
_BATCHED_TOKENS = ((160 * 2**30, 16_384), (70 * 2**30, 8192))
_BATCHED_TOKENS_OF_SMALL = 2048
_QUEUE_BOUNDS = 400


@dataclass(frozen=True)
class Served:
    """What came of a round: the client's records (``TRACE_SCHEMA``), what vLLM would have counted, the gauges in
    simulated time, and the simulation itself."""

    trace: pa.Table
    counted: Counters
    samples: list[dict[str, float | None]]
    simulation: Simulation


@dataclass(frozen=True)
class SimulatedEngine:
    """Settings and cost of an engine. Raises nothing once it is made (``engine_of``)."""

    settings: Settings
    cost: StepCost
    front_end: FrontEnd

    def serve(self, config: Config, workload: Workload, round_index: int) -> Served:
        """Answers the workload once, from an empty cache, offered as ``config.load`` says.

        Raises ``SimulationError`` if it could never be served, WorkloadError or ConfigError if it cannot be offered
        so.
        """
        requests = _requests(config, workload, self.settings.block_size)
        closed = isinstance(config.load, ClosedLoop)
        simulation = _simulate(
            requests,
            self.settings,
            self.cost,
            max_concurrency=config.load.concurrency
            if isinstance(config.load, ClosedLoop)
            else config.load.max_in_flight,
            keeps_place=closed,
            front_end=self.front_end,
        )
        due_s = None if closed else _due_s(requests, simulation)
        return Served(
            trace=_trace(simulation, due_s, round_index),
            counted=_counters(simulation),
            samples=_samples(simulation, config.engine.sample_interval_s),
            simulation=simulation,
        )


def _simulate(requests: Requests, settings: Settings, *arguments: Any, **named: Any) -> Simulation:
    """As ``simulate``, without laying out blocks that no request would ever touch."""
    touched = int((-(-(requests.prompt_tokens + requests.output_tokens) // settings.block_size)).sum()) + 1
    if settings.num_gpu_blocks <= touched:
        return simulate(requests, settings, *arguments, **named)
    small = simulate(requests, replace(settings, num_gpu_blocks=max(touched, 2)), *arguments, **named)
    spare = settings.num_gpu_blocks - small.settings.num_gpu_blocks
    column = small.steps.schema.get_field_index("free_blocks")
    free = pc.add(small.steps["free_blocks"], spare)
    return replace(small, settings=settings, steps=small.steps.set_column(column, "free_blocks", free))


def engine_of(config: Config, model: Model, calibration: CalibrationFile | None) -> SimulatedEngine:
    """The engine as calibrated, or without a calibration at the roofline of model and GPU.

    Raises ConfigError where the calibration is of another engine, or the roofline's dimensions and rates are not
    known.
    """
    if calibration is not None:
        _require_same(config, calibration)
        cost, front_end = calibration.step_cost, calibration.delays
    else:
        cost, front_end = roofline_of(config, model), NO_FRONT_END
    return SimulatedEngine(settings_of(config, model, calibration), cost, front_end)


def settings_of(config: Config, model: Model, calibration: CalibrationFile | None = None) -> Settings:
    """The scheduler and KV cache that vLLM would have. What the config leaves open is as calibrated, else vLLM's
    default for the device."""
    scheduler, calibrated = config.scheduler, calibration
    block_size = config.kv.block_size or (calibrated.block_size if calibrated else config.gpu.block_size or _BLOCK_SIZE)
    ahead = scheduler.async_scheduling
    if ahead is None:
        ahead = calibrated.async_scheduling if calibrated else config.gpu.device != "cpu"
    batched = scheduler.max_num_batched_tokens or (calibrated.max_num_batched_tokens if calibrated else None)
    return Settings(
        num_gpu_blocks=_num_blocks(config, model, block_size, calibrated),
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched or max(_batched_tokens(config), config.max_num_seqs),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        enable_chunked_prefill=scheduler.enable_chunked_prefill is not False,
        policy=scheduler.policy,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        async_scheduling=ahead,
    )


def roofline_of(
    config: Config,
    model: Model,
    *,
    overhead_s: float = 0.0,
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 1.0,
) -> StepCost:
    """The roofline of the config's model on its GPU.

    Raises ConfigError where the model's dimensions or the datasheet's rates are not known.
    """
    gpu, dimensions = config.gpu, Architecture.of(model.config)
    if gpu.flops_per_s is None or gpu.bandwidth_bytes_per_s is None:
        raise ConfigError(
            f"gpu: got {gpu.name}, whose datasheet is not known; a simulation without a calibration needs one with "
            "gpu.flops_per_s and gpu.bandwidth_bytes_per_s, such as gpu=h200"
        )
    if dimensions is None:
        raise ConfigError(
            f"model={config.model.name}: its config.json is that of a mixture of experts or lacks a dimension, so that "
            "it has no roofline here: calibrate on measured steps instead (engine.calibration=FILE)"
        )
    width = BYTES[gpu.dtype or "auto"]
    return roofline(
        dimensions,
        Gpu(
            flops_per_s=gpu.flops_per_s,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
            link_bytes_per_s=gpu.link_bytes_per_s,
        ),
        weight_bytes=width,
        kv_bytes=KV_BYTES.get(config.kv.dtype, width),
        tensor_parallel_size=gpu.tensor_parallel_size,
        overhead_s=overhead_s,
        compute_efficiency=compute_efficiency,
        memory_efficiency=memory_efficiency,
    )


def weight_bytes(config: Config, model: Model) -> int | None:
    """What the weights take on each device; None where the model's dimensions are not known."""
    dimensions = Architecture.of(model.config)
    if dimensions is None:
        return None
    tables = 1 if model.config.get("tie_word_embeddings") else 2
    weights = dimensions.layer_weights + tables * dimensions.head_weights
    return weights * BYTES[config.gpu.dtype or "auto"] // config.gpu.tensor_parallel_size


def _num_blocks(config: Config, model: Model, block_size: int, calibration: CalibrationFile | None) -> int:
    """KV blocks on each device: as many as asked, as the budget holds, as calibrated, or as vLLM would make of the
    device's memory (without the activations, which only a run tells)."""
    kv, gpu = config.kv, config.gpu
    if kv.num_blocks is not None:
        return kv.num_blocks
    budget = kv.cache_memory_bytes
    if budget is None and kv.gpu_memory_utilization is None:
        if calibration is not None:
            return calibration.num_gpu_blocks * calibration.block_size // block_size
        budget = gpu.kv_cache_bytes
    token_bytes, weights = kv_bytes_per_token(config, model.config), weight_bytes(config, model)
    if budget is None and gpu.memory_bytes is not None and weights is not None:
        budget = int((kv.gpu_memory_utilization or _MEMORY_UTILIZATION) * gpu.memory_bytes) - weights
    if budget is None or token_bytes is None:
        raise ConfigError("kv.num_blocks: got null; the simulated engine needs it set for this model or device")
    blocks = budget * gpu.tensor_parallel_size // (token_bytes * block_size)
    if blocks < 2:
        raise ConfigError(
            f"gpu={gpu.name}: {max(budget, 0):,} bytes are left for the KV cache of {model.name}, not two blocks; "
            "take a larger gpu, gpu.tensor_parallel_size or KV budget"
        )
    return blocks


def _batched_tokens(config: Config) -> int:
    memory_bytes = config.gpu.memory_bytes or 0
    if config.gpu.device != "cpu" and config.gpu.name != "a100":
        for least, tokens in _BATCHED_TOKENS:
            if memory_bytes >= least:
                return tokens
    return _BATCHED_TOKENS_OF_SMALL


def _require_same(config: Config, calibration: CalibrationFile) -> None:
    asked: Mapping[str, Any] = {
        "model": config.model.name,
        "gpu": config.gpu.name,
        "dtype": config.gpu.dtype or "auto",
        "tensor_parallel_size": config.gpu.tensor_parallel_size,
    }
    for key, value in asked.items():
        if value != getattr(calibration, key):
            name = key if key in ("model", "gpu") else f"gpu.{key}"
            raise ConfigError(
                f"{name}: got {value}; engine.calibration was made with {getattr(calibration, key)}, and holds for that"
            )


def _requests(config: Config, workload: Workload, block_size: int) -> Requests:
    due_s = None
    if not isinstance(config.load, ClosedLoop):
        first = opens(workload)
        offsets_s = None if workload.arrivals_s is None else workload.arrivals_s[first]
        due_s = arrivals(config.load, int(first.sum()), seed=config.seed, offsets_s=offsets_s)
    requests = requests_of(workload, block_size, due_s)
    if not config.cache.salt_requests:
        return requests
    return Requests.columns(
        block_size=block_size,
        prompt_tokens=requests.prompt_tokens,
        output_tokens=requests.output_tokens,
        arrival_s=requests.arrival_s,
        priority=requests.priority,
        deadline_s=requests.deadline_s,
        after=requests.after,
    )


def _due_s(requests: Requests, simulation: Simulation) -> Floats:
    """When each request of an open loop was due: a next turn after its pause, from when the client had the answer."""
    _, delivered_s = simulation.token_times_s(delivered=True)
    ends_s = delivered_s[np.cumsum(requests.output_tokens) - 1]
    before_s = np.where(requests.after >= 0, ends_s[np.maximum(requests.after, 0)], 0.0)
    due_s: Floats = requests.arrival_s + before_s
    return due_s


def _trace(simulation: Simulation, due_s: Floats | None, round_index: int) -> pa.Table:
    table = simulation.requests
    n = len(table)
    offsets, times_s = simulation.token_times_s(delivered=True)
    last_s = times_s[offsets[1:] - 1]
    columns: dict[str, Any] = {
        "round": np.full(n, round_index, np.int32),
        "request": np.arange(n, dtype=np.int32),
        "worker": np.zeros(n, np.int16),
        "intended_s": table["sent_s"] if due_s is None else due_s,
        "sent_s": table["sent_s"],
        "first_token_s": times_s[offsets[:-1]],
        "last_token_s": last_s,
        "end_s": last_s,
        "chunk_s": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(times_s)),
        "engine_queued_s": pa.nulls(n, pa.float64()),
        "engine_scheduled_s": table["admitted_s"],
        "engine_first_token_s": table["first_token_s"],
        "engine_last_token_s": table["finished_s"],
        "prompt_tokens": table["prompt_tokens"].cast(pa.int32()),
        "cached_tokens": table["cached_tokens"].cast(pa.int32()),
        "output_tokens": table["output_tokens"].cast(pa.int32()),
        "finish_reason": pa.array(["length"] * n).cast(TRACE_SCHEMA.field("finish_reason").type),
        "error": pa.nulls(n, pa.string()),
        "text": pa.nulls(n, pa.string()),
        "logprobs": pa.nulls(n, pa.string()),
    }
    return pa.table(columns).select(TRACE_SCHEMA.names).cast(TRACE_SCHEMA)


def _counters(simulation: Simulation) -> Counters:
    """What vLLM's counters would have counted in the round."""
    steps, requests = simulation.steps, simulation.requests
    total = {name: float(np.sum(steps[name].to_numpy())) for name in ("queries", "hits", "preempted")}
    tokens = steps["prefill_tokens"].to_numpy() + steps["decode_tokens"].to_numpy()
    waits_s = requests["admitted_s"].to_numpy() - requests["sent_s"].to_numpy()
    bounds_s = np.unique(np.quantile(waits_s, np.linspace(0, 1, _QUEUE_BOUNDS)))
    return Counters(
        prefix_cache_queries_tokens=total["queries"],
        prefix_cache_hits_tokens=total["hits"],
        preemptions=total["preempted"],
        prompt_tokens=float(np.sum(requests["prompt_tokens"].to_numpy())),
        generation_tokens=float(np.sum(requests["output_tokens"].to_numpy())),
        steps=float(np.count_nonzero(tokens)),
        step_tokens=float(tokens.sum() + len(requests)),  # and what a request's last step gives out
        inference_s=float((requests["finished_s"].to_numpy() - requests["admitted_s"].to_numpy()).sum()),
        requests_running=0.0,
        requests_waiting=0.0,
        kv_usage=0.0,
        queue_time=Histogram(
            tuple(bounds_s.tolist()),
            tuple(np.searchsorted(np.sort(waits_s), bounds_s, side="right").astype(float).tolist()),
            float(waits_s.sum()),
        ),
    )


def _samples(simulation: Simulation, interval_s: float) -> list[dict[str, float | None]]:
    """The gauges every ``interval_s`` of simulated time, and when the last step begins."""
    steps = simulation.steps
    start_s = steps["start_s"].to_numpy()
    if not len(start_s):
        return []
    at_s: npt.NDArray[np.float64] = np.append(np.arange(0.0, start_s[-1], interval_s), start_s[-1])
    rows = np.maximum(np.searchsorted(start_s, at_s, side="right") - 1, 0)
    blocks = simulation.settings.num_gpu_blocks - 1
    used = 1.0 - steps["free_blocks"].to_numpy() / blocks
    running, waiting = steps["running"].to_numpy(), steps["waiting"].to_numpy()
    return [
        {
            "time_s": float(time_s),
            "requests_running": float(running[row]),
            "requests_waiting": float(waiting[row]),
            "kv_usage": float(used[row]),
        }
        for time_s, row in zip(at_s, rows, strict=True)
    ]
