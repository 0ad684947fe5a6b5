"""vLLM's own scheduler, driven without a model: every sampled token is faked."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from llmexp import simulate
from llmexp.simulate import Settings

MAX_MODEL_LEN = 1_000_000


def model_config(folder: Path) -> ModelConfig:
    """The smallest Llama that vLLM's config accepts; no weights are ever read."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "vocab_size": 128,
                "max_position_embeddings": MAX_MODEL_LEN,
            }
        )
    )
    return ModelConfig(model=str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True)


def make_scheduler(model: ModelConfig, settings: Settings) -> Scheduler:
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            policy=settings.policy,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
            watermark=settings.watermark,
            async_scheduling=settings.async_scheduling,
        ),
        cache_config=CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching),
        device_config=DeviceConfig("cpu"),
    )
    # set late: the config would hold the budget against max_model_len; the cases mind their own lengths
    config.scheduler_config.enable_chunked_prefill = settings.enable_chunked_prefill
    config.cache_config.num_gpu_blocks = settings.num_gpu_blocks
    config.scheduler_config.async_scheduling = settings.async_scheduling  # which a CPU turns off
    spec = FullAttentionSpec(block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (AsyncScheduler if settings.async_scheduling else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_size,
        log_stats=True,
    )


class Oracle:
    """vLLM's scheduler as a simulated engine: ``add``, ``schedule``, ``update``. ``seconds`` is the time that
    vLLM's own calls have taken."""

    def __init__(self, model: ModelConfig, settings: Settings) -> None:
        init_none_hash(sha256)
        self.scheduler = make_scheduler(model, settings)
        self._hasher = get_request_block_hasher(settings.block_size, sha256)
        self._answers: dict[str, Sequence[int]] = {}
        self._sampling: dict[int, set[str]] = {}  # of the steps under way, by their output's identity
        self.seconds = 0.0

    def add(self, index: int, request: simulate.Request, arrival_s: float) -> None:
        """Send a request; it will sample its ``output_token_ids``."""
        assert request.output_token_ids is not None
        name = _name(index)
        self._answers[name] = request.output_token_ids
        theirs = Request(
            request_id=name,
            prompt_token_ids=list(request.prompt_token_ids),
            sampling_params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            block_hasher=self._hasher,
        )
        with self._timed():
            self.scheduler.add_request(theirs)

    def schedule(self) -> SchedulerOutput:
        self.scheduler.kv_cache_manager.make_prefix_cache_stats()  # resets them
        with self._timed():
            output = self.scheduler.schedule()
        requests = (self.scheduler.requests[name] for name in output.num_scheduled_tokens)
        self._sampling[id(output)] = {request.request_id for request in requests if not request.is_prefill_chunk}
        return output

    def update(self, output: SchedulerOutput) -> set[int]:
        """Fake the step's tokens; returns the finished requests."""
        names = list(output.num_scheduled_tokens)
        before = set(self.scheduler.requests)
        sampling = self._sampling.pop(id(output))
        sampled = [
            [self._answers[name][self.scheduler.requests[name].num_output_tokens]] if name in sampling else []
            for name in names
        ]
        faked = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        with self._timed():
            self.scheduler.update_from_output(output, faked)
        return {int(name) for name in before - set(self.scheduler.requests)}

    @staticmethod
    def scheduled(output: SchedulerOutput) -> list[tuple[int, int]]:
        return [(int(name), tokens) for name, tokens in output.num_scheduled_tokens.items()]

    @staticmethod
    def preempted(output: SchedulerOutput) -> set[int]:
        return {int(name) for name in output.preempted_req_ids or ()}

    @property
    def running(self) -> list[int]:
        return [int(request.request_id) for request in self.scheduler.running]

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def statistics(self) -> tuple[int, int, int, int]:
        """Queries, hits, and both of preempted requests, of the latest ``schedule``."""
        stats = self.scheduler.kv_cache_manager.prefix_cache_stats
        assert stats is not None
        return stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits

    @property
    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def blocks(self, index: int) -> list[int]:
        return self.scheduler.kv_cache_manager.get_block_ids(_name(index))[0]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def _name(index: int) -> str:
    return f"{index:06}"  # names sort like their numbers
