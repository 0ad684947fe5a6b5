"""Config of what answers: model, hardware, KV budget, prefix cache and engine."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from llmexp.schema.section import Bytes, Identifier, Section, Tokens, Words

Dtype = Literal["auto", "float32", "float16", "bfloat16"]


class ModelConfig(Section):
    """Which weights. The first of `path`, `package`, `hub_id` that is set and present is used."""

    name: str = Field(description="short name, used in tables")
    path: str | None = Field(default=None, description="model folder, or a Hub id")
    package: Identifier | None = Field(
        default=None, description="installed Python package that holds the weights as GGUF"
    )
    hub_id: str | None = Field(default=None, description="repository on the Hugging Face Hub")
    revision: str | None = Field(default=None, description="commit or tag of the Hub repository")
    generated: Literal["tiny_llama", "llama_8b"] | None = Field(
        default=None, description="a model's folder made on this machine, without weights"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(default="auto", description="dummy: random weights")
    max_model_len: Tokens | None = Field(default=None, description="longest prompt plus output; null: the model's")
    trust_remote_code: bool = Field(default=False, description="run code that the model's repository brings")


class GpuConfig(Section):
    """The device, with its datasheet where one is known."""

    name: str = Field(description="short name, used in tables")
    device: Literal["auto", "cuda", "cpu"] = Field(description="auto: the first GPU, or the CPU where there is none")
    dtype: Dtype | None = Field(default=None, description="type of weights and arithmetic; null: the model's")
    block_size: Tokens | None = Field(default=None, description="the device's usual KV block, in tokens")
    tensor_parallel_size: PositiveInt = Field(default=1, le=1024, description="devices that share the model")
    enforce_eager: bool | None = Field(default=None, description="skip torch.compile and CUDA graphs")
    kv_cache_bytes: Bytes | None = Field(default=None, description="KV cache where `kv` sets no budget; null: vLLM's")
    memory_bytes: Bytes | None = Field(default=None, description="device memory, by the datasheet")
    bandwidth_bytes_per_s: PositiveFloat | None = Field(
        default=None, description="device memory bandwidth, by the datasheet"
    )
    link_bytes_per_s: PositiveFloat | None = Field(
        default=None, description="from one device to the others, in one direction, by the datasheet"
    )
    flops_per_s: PositiveFloat | None = Field(
        default=None, description="dense matrix rate at 16 bits, by the datasheet"
    )
    cost_per_hour: NonNegativeFloat | None = Field(default=None, description="price of one device, in any currency")


class KvConfig(Section):
    """How much KV cache the engine has. At most one of the three budgets should be set."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="share of device memory to use")
    cache_memory_bytes: Bytes | None = Field(default=None, description="size of the KV cache")
    num_blocks: Tokens | None = Field(default=None, ge=2, description="number of KV blocks; block 0 is reserved")
    block_size: Tokens | None = Field(default=None, description="tokens in a KV block")
    dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"] = Field(
        default="auto", description="type of the KV cache; auto: the weights'"
    )


class CacheConfig(Section):
    """Prefix caching: on, off, or on with a salt of its own for every request (the machinery without reuse)."""

    name: Literal["on", "off", "salted"] = Field(description="short name, used in tables")
    enable_prefix_caching: bool = Field(description="vLLM's prefix cache")
    salt_requests: bool = Field(default=False, description="a salt of its own for every request, so that none hits")


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


ArgumentName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"), Words("a name of letters, digits and _ . -, no sign first")
]
VariableValue = Annotated[str, BeforeValidator(_as_text), Field(pattern=r"^[^\x00]*$"), Words("text or a number")]


class _Engine(Section):
    sample_interval_s: float = Field(
        default=0.5, ge=0.01, le=3600, description="between two reads of the engine's gauges"
    )
    gpu_sample_interval_s: float | None = Field(
        default=0.1, ge=0.1, description="between two reads of the GPU's power, clocks and use; null: none"
    )
    stall_timeout_s: PositiveFloat = Field(
        default=300.0,
        description="with requests in flight and no token for any of them, the engine hangs: the run fails",
    )


class OwnVllm(_Engine):
    """A vLLM of our own, started for the run."""

    python: str | None = Field(default=None, description="interpreter that has vLLM; null: this one")
    ready_timeout_s: PositiveFloat = Field(default=900.0, description="longest wait for the engine to answer")
    stop_timeout_s: PositiveFloat = Field(default=30.0, description="from SIGTERM to SIGKILL")
    args: dict[ArgumentName, str | int | float | bool | None] = Field(
        default_factory=dict, description="further arguments by vLLM's names, e.g. engine.args.swap_space=0"
    )
    env: dict[Identifier, VariableValue] = Field(
        default_factory=dict, description="further environment variables of the engine; secrets are to be exported"
    )
    record_steps: bool = Field(default=False, description="keep what each engine step computed, and its time")


class VllmServer(OwnVllm):
    """A vLLM OpenAI server of our own, bound to loopback."""

    kind: Literal["vllm_server"] = "vllm_server"
    port: int | None = Field(default=None, ge=1024, le=65535, description="null: a free one")


class VllmAsync(OwnVllm):
    """vLLM's AsyncLLM in a process of our own, without HTTP; the client runs in that process."""

    kind: Literal["vllm_async"] = "vllm_async"


class Endpoint(_Engine):
    """An OpenAI-compatible server that runs already. What it does not tell stays unknown."""

    kind: Literal["endpoint"] = "endpoint"
    url: str = Field(description="http://HOST:PORT or https://HOST")
    model: str | None = Field(default=None, description="the name that it serves; null: the only one there")
    api_key_env: Identifier | None = Field(default=None, description="environment variable that holds the key")


class Simulator(Section):
    """vLLM's scheduler and KV cache simulated, with steps that cost what a calibration or a roofline says."""

    kind: Literal["simulator"] = "simulator"
    calibration: str | None = Field(
        default=None, description="file of `llmexp calibrate`; null: the roofline of model and gpu"
    )
    sample_interval_s: float = Field(
        default=0.5, ge=0.01, le=3600, description="between two readings of the gauges, in simulated time"
    )


EngineConfig = Annotated[VllmServer | VllmAsync | Endpoint | Simulator, Field(discriminator="kind")]


class SchedulerConfig(Section):
    """vLLM's scheduler settings beside max_num_seqs, under vLLM's names; null: vLLM's default."""

    max_num_batched_tokens: Tokens | None = Field(default=None, description="tokens that a step computes at most")
    enable_chunked_prefill: bool | None = Field(default=None, description="spread a long prompt over several steps")
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="tokens of one prompt that a step takes at most; 0: no such limit"
    )
    policy: Literal["fcfs", "priority"] = Field(default="fcfs", description="who goes first: in order, or by priority")
    async_scheduling: bool | None = Field(default=None, description="schedule a step while the last one runs")
