"""Where does vLLM's front end stop merging tokens into chunks?

`python benchmarks/front_end.py` drives vLLM's own output handler with the outputs of an engine that is faster than its
clients can be told (no model, no HTTP: each chunk costs `--chunk-us` of the CPU, as its JSON and its write would).
The handler takes a step's outputs in slices of VLLM_V1_OUTPUT_PROC_CHUNK_SIZE (128) and lets other tasks run between
two of them. A step that fits into one slice is followed at once by the next one that waits, and their tokens are merged
into one chunk; from one output more on, every token is sent by itself.
"""

import argparse
import asyncio
import os
import time
from types import SimpleNamespace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

STEPS = 32


async def chunks(requests: int, step_s: float, chunk_s: float) -> tuple[int, float]:
    """How many chunks `STEPS` tokens of each of `requests` become, and the time that it takes."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    processor = OutputProcessor(None, log_stats=False)
    steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
    names = [str(i) for i in range(requests)]
    queues = {name: RequestOutputCollector(RequestOutputKind.DELTA, name) for name in names}
    params = SamplingParams(max_tokens=STEPS, output_kind=RequestOutputKind.DELTA, detokenize=False)
    for name in names:
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        processor.add_request(request, None, queue=queues[name])

    async def core() -> None:
        began = time.monotonic()
        for step in range(STEPS):
            if (due_s := began + step * step_s - time.monotonic()) > 0:  # else it is read with those before it
                await asyncio.sleep(due_s)
            reason = FinishReason.LENGTH if step == STEPS - 1 else None
            outputs = [EngineCoreOutput(name, [2], finish_reason=reason) for name in names]
            steps.put_nowait(EngineCoreOutputs(outputs=outputs))

    async def client(name: str) -> int:
        sent = 0
        while True:
            output = await queues[name].get()
            sent += 1
            until = time.perf_counter() + chunk_s
            while time.perf_counter() < until:
                pass
            if output.finished:
                return sent

    engine = SimpleNamespace(
        output_handler=None,
        engine_core=SimpleNamespace(get_output_async=steps.get),
        output_processor=processor,
        log_stats=False,
        logger_manager=None,
        renderer=SimpleNamespace(mm_processor_cache=None),
    )
    AsyncLLM._run_output_handler(engine)
    began = time.monotonic()
    feeding = asyncio.create_task(core())
    sent = sum(await asyncio.gather(*map(client, names)))
    took_s = time.monotonic() - began
    await feeding
    engine.output_handler.cancel()
    return sent, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=6.5, help="time of an engine step")
    parser.add_argument("--chunk-us", type=float, default=100.0, help="what a chunk costs the front end")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 120, 128, 129, 160, 256, 512])
    options = parser.parse_args()
    table = Table("outputs a step", "slices of", "tokens a chunk", "time (s)", box=SIMPLE_HEAD)
    for requests in options.requests:
        for size in (128, 1024):
            os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(size)
            sent, took_s = asyncio.run(chunks(requests, options.step_ms / 1e3, options.chunk_us / 1e6))
            table.add_row(str(requests), str(size), f"{requests * STEPS / sent:.2f}", f"{took_s:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
