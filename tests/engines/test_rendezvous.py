"""Workers of an older vLLM meet by a file: none of them listens where another machine could reach it."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmexp.compose import compose
from llmexp.engines import rendezvous, vllm
from llmexp.engines.vllm_server import _free_port

TWO = """
import json, sys, psutil, torch.distributed as d
rank, there = int(sys.argv[1]), sys.argv[2]
d.init_process_group("gloo", init_method=there, rank=rank, world_size=2)
d.barrier()
listening = [one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"]
d.barrier()
print(json.dumps(listening))
"""


@pytest.mark.parametrize("by_file", [True, False])
def test_two_workers_meet_and_listen_on_loopback_alone(by_file: bool, tmp_path: Path) -> None:
    """By the address that vLLM gives them, the store of the first listens everywhere."""
    there = f"tcp://127.0.0.1:{_free_port()}"
    there = rendezvous.by_file(there, str(tmp_path)) if by_file else there
    environment = vllm._environment(())
    workers = [
        subprocess.Popen([sys.executable, "-c", TWO, str(rank), there], stdout=subprocess.PIPE, env=environment)
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:  # one that waits for the other, if that has failed
            worker.kill()
    listening = {address for told in said for address in json.loads(told)}
    assert (listening <= {"127.0.0.1"}) == by_file, listening


@pytest.mark.parametrize(
    ("version", "own", "by_file"),
    [
        ("0.24.0", {}, True),
        ("0.27.1+cu130", {}, True),
        ("0.28.0", {}, False),
        ("0.1.dev1+g1234567", {}, False),
        ("0.27.1", {"worker-cls": "mine.Worker"}, False),
        ("0.27.1", {"worker_extension_cls": "mine.Extension"}, False),
        ("0.27.1", {"distributed_executor_backend": "ray"}, False),
    ],
)
def test_only_an_older_vllm_is_told_so_and_not_one_with_a_worker_of_the_users(
    version: str, own: dict[str, str], by_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmexp.hardware.versions_of_engine", lambda python: {"vllm": version})
    settings = compose(
        ["model=tiny_random", "gpu=cpu", *(f"engine.args.{name}={value}" for name, value in own.items())]
    )
    with ExitStack() as launch:
        arguments, environment = vllm._meeting(vllm.section(settings), launch)
        assert arguments == (["--worker-cls", "llmexp.engines.rendezvous.worker"] if by_file else [])
        folder = environment.get(rendezvous.VARIABLE)
        assert (folder is not None and Path(folder).is_dir()) == by_file
    assert folder is None or not Path(folder).exists(), "it is the launch's own"


def test_all_workers_of_an_engine_find_the_same_file_and_vllm_its_port_in_the_name() -> None:
    """vLLM on the CPU names shared memory by what follows the last colon."""
    assert rendezvous.by_file("tcp://127.0.0.1:29500", "/tmp/x") == "file:///tmp/x/127.0.0.1:29500"
    assert rendezvous.by_file("tcp://[::1]:29500", "/tmp/x") == "file:///tmp/x/[::1]:29500"
    assert rendezvous.by_file("env://", "/tmp/x") == "env://"
