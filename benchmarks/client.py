"""How fast and how true llmexp's load generator is, beside the peers that are installed.

    python benchmarks/client.py speed         completed requests per second at concurrency 32 and 256, one core
    python benchmarks/client.py fidelity      reported latencies against the mock's own send times
    python benchmarks/client.py memory        100,000 requests of 100 tokens
    python benchmarks/client.py scaling       two workers against one

Needs a C compiler. The client runs on one core and the mock server (`mock.c`) on another. Rates come from the mock's
records, for every client alike: the middle nine tenths of its requests, so that no client's start-up or rundown counts.
Peers are found on PATH or given by their options; those that are not installed are skipped with a line.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 8
CORES = sorted(os.sched_getaffinity(0))
CLIENT_CORE, MOCK_CORE = CORES[0], CORES[-1]
TTFT_MS, ITL_MS = 50.0, 10.0


@dataclass(frozen=True)
class Seen:
    """What the mock saw: `first` tokens of prompts, `received` times, `cpu` seconds by then, and `sent` times, a row
    a request."""

    peak: int
    first: np.ndarray
    received: np.ndarray
    cpu: np.ndarray
    sent: np.ndarray

    def rate_and_busy(self) -> tuple[float, float]:
        """Requests per second and the mock's share of its core, over the middle nine tenths."""
        order = np.argsort(self.received)
        received, cpu = self.received[order], self.cpu[order]
        a, b = int(len(received) * 0.05), int(len(received) * 0.95)
        span = received[b] - received[a]
        return (b - a) / span, (cpu[b] - cpu[a]) / span


class Mock:
    """The mock server, on its core."""

    def __init__(self, binary: Path, *options: str) -> None:
        self._process = subprocess.Popen(
            [binary, "serve", *options],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {MOCK_CORE}),
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def seen(self) -> Seen:
        """What it saw since it was last asked; the answers' lengths must be equal."""
        with urllib.request.urlopen(f"{self.url}/times") as answer:
            peak, *_ = values = np.frombuffer(answer.read())
        rows = values[1:].reshape(-1, 4 + int(values[4])) if len(values) > 1 else np.empty((0, 4))
        return Seen(int(peak), rows[:, 0].astype(int), rows[:, 1], rows[:, 2], rows[:, 4:])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def mock(*options: str) -> Iterator[Mock]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "mock"
        subprocess.run(["cc", "-O2", "-o", binary, HERE / "mock.c"], check=True)
        server = Mock(binary, *options)
        try:
            yield server
        finally:
            server.stop()


def pinned(argv: list[str], cores: set[int] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a client on its core."""
    pin = cores or {CLIENT_CORE}
    return subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, pin), **options
    )


# Clients. Each runs in a process of its own: this script's own ones by `python client.py run NAME URL …`.


def run_llmexp(url: str, concurrency: int, requests: int, workers: int = 1, output: int = OUTPUT_TOKENS) -> Any:
    from llmexp.client.replay import replay
    from llmexp.engines.target import Target
    from llmexp.schema.load import ClientConfig, ClosedLoop
    from llmexp.workloads.workload import Workload

    def prompt_at(i: int) -> Any:
        prompt = 1000 + (np.arange(PROMPT_TOKENS, dtype=np.int32) * 7 + i) % 30000
        prompt[0] = i
        return prompt.astype(np.int32)

    lengths = np.full(requests, PROMPT_TOKENS, np.int32)
    workload = Workload("benchmark", {}, prompt_at, lengths, np.full(requests, output, np.int32))
    client = ClientConfig(workers=workers)
    return replay(Target(url, "mock"), workload, ClosedLoop(concurrency=concurrency), client, round_index=0)


def report_llmexp(url: str, concurrency: int, requests: int, workers: int = 1) -> dict[str, Any]:
    found = run_llmexp(url, concurrency, requests, workers)
    trace, check = found.trace, found.check
    complete = trace["error"].null_count == len(trace) == requests
    chunks = np.array(trace["chunk_s"].combine_chunks().value_lengths())
    times = np.stack(trace["chunk_s"].to_numpy()) if (chunks == OUTPUT_TOKENS).all() else None
    duration_s = float(trace["end_s"].to_numpy().max() - trace["sent_s"].to_numpy().min())
    return {
        "complete": bool(complete and (chunks == OUTPUT_TOKENS).all()),
        "lag_ms_p99": check.lag_ms_p99,
        "cpu_us": 1e6 * sum(check.cpu_shares) * duration_s / requests,
        "saturated": check.saturated,
        "times": None if times is None else (times + found.origin_monotonic_s).tolist(),
        "sent": (trace["sent_s"].to_numpy() + found.origin_monotonic_s).tolist(),
        "intended": (trace["intended_s"].to_numpy() + found.origin_monotonic_s).tolist(),
        "ttft_ms": (1e3 * (trace["first_token_s"].to_numpy() - trace["intended_s"].to_numpy())).tolist(),
    }


async def _gathered(one: Callable[[], Any], concurrency: int, requests: int) -> list[float]:
    """Runs `requests` calls, `concurrency` at once, and gathers what they return."""
    gate = asyncio.Semaphore(concurrency)

    async def gated() -> float:
        async with gate:
            return await one()

    return await asyncio.gather(*(gated() for _ in range(requests)))


def _body() -> dict[str, Any]:
    return {
        "model": "mock",
        "prompt": list(range(1000, 1000 + PROMPT_TOKENS)),
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def report_aiohttp(url: str, concurrency: int, requests: int, parse: bool) -> dict[str, Any]:
    import aiohttp
    import uvloop

    async def main() -> list[float]:
        body = _body()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one() -> float:
                start, first = time.monotonic(), 0.0
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    if not parse:
                        async for _ in response.content.iter_any():
                            first = first or time.monotonic()
                        return first - start
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            chunk = json.loads(line[6:])
                            if chunk["choices"] and chunk["choices"][0]["text"]:
                                first = first or time.monotonic()
                    return first - start

            return await _gathered(one, concurrency, requests)

    return {"ttft_ms": [1e3 * ttft for ttft in uvloop.run(main())]}


def report_openai(url: str, concurrency: int, requests: int) -> dict[str, Any]:
    import openai

    async def main() -> list[float]:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        body = _body()

        async def one() -> float:
            start, first = time.monotonic(), 0.0
            async for chunk in await client.completions.create(**body):
                if chunk.choices and chunk.choices[0].text:
                    first = first or time.monotonic()
            return first - start

        return await _gathered(one, concurrency, requests)

    return {"ttft_ms": [1e3 * ttft for ttft in asyncio.run(main())]}


OWN = {
    "llmexp": report_llmexp,
    "aiohttp-bare": lambda *args: report_aiohttp(*args, parse=False),
    "aiohttp-parsed": lambda *args: report_aiohttp(*args, parse=True),
    "openai": report_openai,
}


def own(name: str, url: str, concurrency: int, requests: int, folder: Path, cores: Any = None, *more: int) -> Any:
    argv = [sys.executable, __file__, "run", name, url, str(concurrency), str(requests), str(folder / "out.json")]
    done = pinned([*argv, *map(str, more)], cores)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads((folder / "out.json").read_text())


@dataclass(frozen=True)
class Peer:
    """A client: how to run it, and what it reported: TTFT p50 and p99 in ms, if it can be told, and more to show."""

    name: str
    requests: int  # as many as it completes in a few seconds
    run: Callable[[str, int, int, Path], dict[str, Any]]


def own_peer(name: str, label: str, requests: int) -> Peer:
    return Peer(label, requests, lambda url, c, n, folder: own(name, url, c, n, folder))


def vllm_bench(argv: list[str], tokenizer: str, url: str, concurrency: int, n: int, folder: Path) -> dict[str, Any]:
    options = {
        "backend": "openai",
        "base-url": url,
        "model": "mock",
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": OUTPUT_TOKENS,
        "num-prompts": n,
        "max-concurrency": concurrency,
        "metric-percentiles": "50,99",
        "result-dir": folder,
        "result-filename": "vllm.json",
    }
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    run_peer([*argv, *flags, "--save-result", "--disable-tqdm", "--ignore-eos"], folder)
    found = json.loads((folder / "vllm.json").read_text())
    return {"ttft_p50": found["median_ttft_ms"], "ttft_p99": found["p99_ttft_ms"]}


def guidellm(argv: list[str], tokenizer: str, url: str, concurrency: int, n: int, folder: Path) -> dict[str, Any]:
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    options = [
        *("--backend", f"kind=openai_http,target={url},model=mock,request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={concurrency}"),
        *("--constraint", f"kind=max_requests,count={n}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", data),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
        "--disable-console",
    ]
    run_peer([*argv, "run", *options], folder, GUIDELLM__MAX_WORKER_PROCESSES="1")
    return {}


def aiperf(argv: list[str], tokenizer: str, url: str, concurrency: int, n: int, folder: Path) -> dict[str, Any]:
    options = {
        "model": "mock",
        "url": url,
        "endpoint-type": "completions",
        "tokenizer": tokenizer,
        "concurrency": concurrency,
        "request-count": n,
        "synthetic-input-tokens-mean": PROMPT_TOKENS,
        "output-tokens-mean": OUTPUT_TOKENS,
        "extra-inputs": "ignore_eos:true",
        "artifact-dir": folder,
        "ui": "none",
    }
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    # Offline it takes no folder for a tokenizer.
    run_peer([*argv, "profile", *flags, "--streaming", "--use-legacy-max-tokens"], folder, HF_HUB_OFFLINE="0")
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())["time_to_first_token"]
    return {"ttft_p50": found["p50"], "ttft_p99": found["p99"]}


def inference_perf(argv: list[str], tokenizer: str, url: str, concurrency: int, n: int, folder: Path) -> dict[str, Any]:
    length = {"min": PROMPT_TOKENS, "max": PROMPT_TOKENS, "mean": PROMPT_TOKENS, "std_dev": 0, "total_count": n}
    config = {
        "load": {
            "type": "concurrent",
            "stages": [{"num_requests": n, "concurrency_level": concurrency}],
            "num_workers": 1,
            "worker_max_concurrency": concurrency,
        },
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "mock", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer},
        "data": {
            "type": "random",
            "input_distribution": length,
            "output_distribution": {**length, "min": OUTPUT_TOKENS, "max": OUTPUT_TOKENS, "mean": OUTPUT_TOKENS},
        },
        "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": False}},
        "storage": {"local_storage": {"path": str(folder / "reports")}},
    }
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    run_peer([*argv, "--config_file", str(folder / "config.yml")], folder)
    summary = json.loads(next((folder / "reports").rglob("summary_lifecycle_metrics.json")).read_text())
    found = summary["successes"]["latency"]["time_to_first_token"]
    return {"ttft_p50": 1e3 * found["median"], "ttft_p99": 1e3 * found["p99"]}


def run_peer(argv: list[str], folder: Path, **environment: str) -> None:
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = pinned(argv, cwd=folder, env={**os.environ, **quiet, **environment}, timeout=240)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:])


# `vllm bench serve` without the `vllm` command, which looks for a distribution of that very name.
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main;"
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def peers(args: argparse.Namespace) -> list[Peer]:
    """The peers that are here; a line for each that is not."""
    found = [
        own_peer("aiohttp-bare", "bare aiohttp on uvloop, nothing parsed", 12000),
        own_peer("aiohttp-parsed", "bare aiohttp, SSE and JSON parsed", 8000),
        own_peer("openai", "openai AsyncOpenAI in a gather loop", 600),
    ]
    installed: list[tuple[str, int, Any, list[str] | None]] = [
        ("vllm-rs bench serve (Rust)", 20000, vllm_bench, _command(args.vllm_rs, "bench", "serve")),
        ("vllm bench serve (Python)", 5000, vllm_bench, [args.vllm_python, "-c", VLLM_BENCH]),
        ("inference-perf, one worker", 2000, inference_perf, _command(args.inference_perf)),
        ("aiperf", 800, aiperf, _command(args.aiperf)),
        ("guidellm, one process", 600, guidellm, _command(args.guidellm)),
    ]
    if importlib.util.find_spec("vllm") is None and args.vllm_python == sys.executable:
        installed[1] = (*installed[1][:3], None)
    for name, requests, run, argv in installed:
        if argv is None:
            print(f"skipped, not installed: {name}")
        elif args.tokenizer is None:
            print(f"skipped, needs --tokenizer FOLDER: {name}")
        else:
            found.append(
                Peer(name, requests, lambda u, c, n, f, run=run, argv=argv: run(argv, args.tokenizer, u, c, n, f))
            )
    return [peer for peer in found if args.only in peer.name]


def _command(path: str, *rest: str) -> list[str] | None:
    return [found, *rest] if (found := shutil.which(path)) else None


# The tables.


def speed(args: argparse.Namespace) -> None:
    with mock(*(["--together"] if args.together else [])) as server, tempfile.TemporaryDirectory() as base:
        for concurrency in (32, 256):
            flood = [server._process.args[0], "flood", server.port, concurrency, 50000, PROMPT_TOKENS, OUTPUT_TOKENS]
            pinned([str(part) for part in flood])
            rate, busy = server.seen().rate_and_busy()
            print(f"\nconcurrency {concurrency}; the mock's ceiling: {rate:,.0f} requests/s, {busy:.0%} busy")
            print(
                "| client | requests/s | llmexp / it | mock busy | in flight at most |\n| --- | --- | --- | --- | --- |"
            )
            ours = None
            for peer in [own_peer("llmexp", "llmexp, one worker", 20000), *peers(args)]:
                rates, busys, peaks, note = [], [], [], ""
                for _ in range(args.repeat):
                    folder = Path(tempfile.mkdtemp(dir=base))
                    server.seen()
                    try:
                        found = peer.run(server.url, concurrency, peer.requests, folder)
                    except (RuntimeError, OSError, subprocess.TimeoutExpired, StopIteration, KeyError) as error:
                        note = f" failed: {error}"
                        break
                    seen = server.seen()
                    rate, busy = seen.rate_and_busy()
                    rates.append(rate), busys.append(busy), peaks.append(seen.peak)
                    if "complete" in found:
                        note = f" (records complete: {found['complete']}, lag p99 {found['lag_ms_p99']:.2f} ms, "
                        note += f"{found['cpu_us']:.0f} µs CPU a request, saturated: {found['saturated']})"
                if not rates:
                    print(f"| {peer.name}{note} | | | | |", flush=True)
                    continue
                rate = float(np.median(rates))
                ours = ours or rate
                print(
                    f"| {peer.name}{note} | {rate:,.0f} | {ours / rate:.2f} | {np.median(busys):.0%} |"
                    f" {int(np.median(peaks))} |",
                    flush=True,
                )


def fidelity(args: argparse.Namespace) -> None:
    concurrency = 64
    options = ("--ttft-us", str(TTFT_MS * 1e3), "--itl-us", str(ITL_MS * 1e3))
    with mock(*options) as server, tempfile.TemporaryDirectory() as base:
        print(f"\ntruth: TTFT {TTFT_MS} ms, ITL {ITL_MS} ms, concurrency {concurrency}; reported minus true")
        print("| client | TTFT p50, ms | TTFT p99, ms | in flight at most |\n| --- | --- | --- | --- |")
        for peer in [own_peer("llmexp", "llmexp, one worker", 6000), *peers(args)]:
            folder = Path(tempfile.mkdtemp(dir=base))
            server.seen()
            try:
                found = peer.run(server.url, concurrency, min(peer.requests, 6000), folder)
            except (RuntimeError, OSError, subprocess.TimeoutExpired, StopIteration, KeyError) as error:
                print(f"| {peer.name} failed: {error} | | | |", flush=True)
                continue
            seen = server.seen()
            true = 1e3 * (seen.sent[:, 0] - seen.received)
            if "ttft_ms" in found:
                found |= {f"ttft_p{q}": np.percentile(found["ttft_ms"], q) for q in (50, 99)}
            if "ttft_p50" not in found:
                print(f"| {peer.name} (its report was not read) | | | {seen.peak} |", flush=True)
                continue
            late = [found[f"ttft_p{q}"] - np.percentile(true, q) for q in (50, 99)]
            print(f"| {peer.name} | {late[0]:+.2f} | {late[1]:+.2f} | {seen.peak} |", flush=True)
            if found.get("times"):
                _per_request(found, seen)


def _per_request(found: dict[str, Any], seen: Seen) -> None:
    """llmexp's times against the mock's, event by event."""
    order = np.argsort(seen.first)
    sent, received = seen.sent[order], seen.received[order]
    times, asked = np.array(found["times"]), np.array(found["intended"])
    reported, true = np.diff(times).ravel(), np.diff(sent).ravel()
    apart = [1e3 * (np.percentile(reported, q) - np.percentile(true, q)) for q in (50, 99)]
    print(f"|   ITL | {apart[0]:+.2f} | {apart[1]:+.2f} | |")
    for name, late in {
        "due to received by the mock": received - asked,
        "mock's send to first token": times[:, 0] - sent[:, 0],
        "mock's send to any token": (times - sent).ravel(),
        "TTFT, reported - true": (times[:, 0] - asked) - (sent[:, 0] - received),
        "ITL, reported - true": (np.diff(times) - np.diff(sent)).ravel(),
    }.items():
        low, mid, high = np.percentile(1e3 * late, (1, 50, 99))
        print(f"|   per event: {name} | {mid:+.3f} | {high:+.3f} (p1 {low:+.3f}) | |")


def memory(args: argparse.Namespace) -> None:
    requests, output = 100_000, 100
    import pyarrow.parquet as pq

    with mock("--together") as server, tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, {CLIENT_CORE})
        found = run_llmexp(server.url, 256, requests, output=output)
        pq.write_table(found.trace, Path(folder) / "requests.parquet")
        size = (Path(folder) / "requests.parquet").stat().st_size
        chunks = np.array(found.trace["chunk_s"].combine_chunks().value_lengths())
    parent, worker = (
        resource.getrusage(who).ru_maxrss / 2**10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(
        f"{requests} requests, {chunks.sum()} token chunks, all complete: {found.trace['error'].null_count == requests}"
    )
    print(
        f"most resident memory: worker {worker:.0f} MiB (of it {requests * PROMPT_TOKENS * 4 / 2**20:.0f} MiB prompts,"
    )
    print(f"mapped from a file), parent {parent:.0f} MiB; the trace as Parquet: {size / 2**20:.0f} MiB")


def scaling(args: argparse.Namespace) -> None:
    """On more than two cores, rates; on two, which the mock shares, CPU time a request."""
    with mock() as server, tempfile.TemporaryDirectory() as folder:
        results = {}
        for workers in (1, 2):
            cores = set(CORES[:workers])
            server.seen()
            found = own("llmexp", server.url, 256, 20000 * workers, Path(folder), cores, workers)
            rate, busy = server.seen().rate_and_busy()
            results[workers] = rate, found["cpu_us"]
            print(
                f"{workers} workers on cores {sorted(cores)}, mock on {MOCK_CORE}: {rate:,.0f} requests/s,"
                f" {found['cpu_us']:.1f} µs CPU a request, mock busy {busy:.0%}"
            )
        shared = MOCK_CORE in set(CORES[:2])
        print(f"rates: {results[2][0] / results[1][0]:.2f} times" + (" (the mock takes its share)" if shared else ""))
        print(f"by CPU time a request: {2 * results[1][1] / results[2][1]:.2f} times")


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        _, _, name, url, concurrency, requests, out, *more = sys.argv
        found = OWN[name](url, int(concurrency), int(requests), *map(int, more))
        Path(out).write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["speed", "fidelity", "memory", "scaling"])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row; the median is shown")
    parser.add_argument("--together", action="store_true", help="the mock sends each answer in one piece")
    parser.add_argument("--only", default="", help="peers whose name holds this")
    parser.add_argument("--tokenizer", help="a tokenizer's folder, for peers that need one")
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python that has vllm")
    for name in ("vllm-rs", "inference-perf", "aiperf", "guidellm"):
        parser.add_argument(f"--{name}", default=name)
    args = parser.parse_args()
    {"speed": speed, "fidelity": fidelity, "memory": memory, "scaling": scaling}[args.table](args)


if __name__ == "__main__":
    main()
