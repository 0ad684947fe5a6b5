"""Speed of the simulator beside vLLM's own scheduler, on one core.

    python benchmarks/simulator.py --lengths first_turn_lengths.csv [--mooncake conversation_trace.jsonl]

`--lengths`: CSV with a header, whose first two columns are prompt and output tokens (ShareGPT's first turns).
`--mooncake`: a Mooncake trace (JSON lines: timestamp, input_length, output_length, hash_ids).

vLLM's scheduler runs with faked model outputs; its time is that of `add_request`, `schedule` and
`update_from_output` alone. Both serve the same requests at the same simulated times (Poisson arrivals, 256
sequences, prefix caching over 16-token blocks), and the benchmark fails if a step of theirs differs.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmexp.simulate import Request, Requests, Settings, Simulation, StepCost, Work, simulate
from llmexp.simulate.requests import Ints

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK_SIZE = 16
COST = StepCost(
    Work(steps=5e-3, prefill_tokens=2e-5, decode_tokens=2e-5, context_tokens=1e-8)
)  # seconds: about an 8B model on one large GPU
SERVER = Settings(num_gpu_blocks=60_000, max_num_seqs=256, max_num_batched_tokens=8192)
RATE = 40.0  # requests per simulated second


def timed(function: Callable[[], Simulation]) -> tuple[float, Simulation]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def poisson(lengths: Ints, n: int) -> Requests:
    """n requests with lengths drawn from the data, nothing shared."""
    rng = np.random.default_rng(0)
    rows = lengths[rng.integers(0, len(lengths), n)]
    return Requests.columns(
        block_size=BLOCK_SIZE,
        prompt_tokens=rows[:, 0],
        output_tokens=rows[:, 1],
        arrival_s=np.cumsum(rng.exponential(1 / RATE, n)),
    )


def vllm_seconds(requests: Requests, ours: Simulation) -> float:
    """Let vLLM's scheduler take the same steps; raises if it would not."""
    from tests.simulate.oracle import Oracle, model_config

    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle(model_config(Path(folder)), SERVER)
    start_s = ours.steps["start_s"].to_numpy()
    scheduled = (ours.steps["prefill_tokens"].to_numpy() + ours.steps["decode_tokens"].to_numpy()).tolist()
    arrived = np.searchsorted(requests.arrival_s, start_s, side="right").tolist()
    sent = 0
    for tokens, due in zip(scheduled, arrived, strict=True):
        for i in range(sent, due):
            prompt = rng.integers(0, 50_000, requests.prompt_tokens[i]).tolist()
            length = int(requests.output_tokens[i])
            request = Request(prompt_token_ids=prompt, output_tokens=length, output_token_ids=[7] * length)
            oracle.add(i, request, float(requests.arrival_s[i]))
        sent = due
        output = oracle.schedule()
        if output.total_num_scheduled_tokens != tokens:
            raise SystemExit(f"vLLM schedules {output.total_num_scheduled_tokens} tokens, not {tokens}")
        oracle.update(output)
    return oracle.seconds


def beside_vllm(lengths: Ints, n: int) -> None:
    requests = poisson(lengths, n)
    compiled, result = timed(lambda: simulate(requests, SERVER, COST))
    plain, same = timed(lambda: simulate(requests, SERVER, COST, compiled=False))
    if same != result:
        raise SystemExit("the plain and the compiled loop differ")
    theirs = vllm_seconds(requests, result)
    print(f"\n{n:,} requests in {len(result.steps):,} steps, {np.mean(result.steps['running']):.0f} running on average")
    for name, seconds in (("llmexp", compiled), ("llmexp, plain", plain), ("vLLM's Scheduler", theirs)):
        print(f"  {name:18} {seconds:8.2f} s {n / seconds:10,.0f} requests/s {theirs / seconds:7.1f} x")


def scaling(lengths: Ints) -> None:
    print(f"\n{'requests':>10} {'seconds':>9} {'requests/s':>11} {'ns per sequence step':>21} {'peak GiB':>9}")
    for n in (1_000, 10_000, 100_000, 1_000_000):
        requests = poisson(lengths, n)
        seconds, result = timed(lambda requests=requests: simulate(requests, SERVER, COST))
        steps = result.spans["steps"].to_numpy().sum()
        print(f"{n:10,} {seconds:9.2f} {n / seconds:11,.0f} {1e9 * seconds / steps:21.0f} {peak_gib():9.2f}")


def mooncake(path: Path) -> None:
    start = time.perf_counter()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    requests = Requests.of_hash_ids(
        [row["hash_ids"] for row in rows],
        512,
        BLOCK_SIZE,
        prompt_tokens=[row["input_length"] for row in rows],
        output_tokens=[row["output_length"] for row in rows],
        arrival_s=[row["timestamp"] / 1000 for row in rows],
    )
    read = time.perf_counter() - start
    tokens = requests.prompt_tokens.sum()
    print(f"\nMooncake: {len(rows):,} requests, {tokens:,} prompt tokens, read in {read:.1f} s")
    for num_gpu_blocks in (100_000, 1_000_000):
        settings = Settings(num_gpu_blocks=num_gpu_blocks, max_num_seqs=256, max_num_batched_tokens=8192)
        seconds, result = timed(lambda settings=settings: simulate(requests, settings, COST))
        hits, queries = (result.steps[name].to_numpy().sum() for name in ("hits", "queries"))
        print(
            f"  {num_gpu_blocks:9,} blocks {seconds:6.1f} s {len(rows) / seconds:8,.0f} requests/s, "
            f"hit rate {hits / queries:.3f}, {result.steps['preempted'].to_numpy().sum()} preemptions, "
            f"peak {peak_gib():.2f} GiB"
        )


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--requests", type=int, default=10_000, help="for the comparison with vLLM")
    args = parser.parse_args()
    lengths = np.loadtxt(args.lengths, np.int64, delimiter=",", skiprows=1, usecols=(0, 1))
    lengths = lengths[(lengths > 0).all(axis=1)]
    simulate(poisson(lengths, 10), SERVER, COST)  # compiles
    if args.mooncake:
        mooncake(args.mooncake)
    scaling(lengths)
    beside_vllm(lengths, args.requests)


if __name__ == "__main__":
    main()
