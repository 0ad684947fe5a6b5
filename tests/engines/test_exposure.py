"""A real vLLM, launched by a run: who can reach it, and where secrets of the environment end up."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.engines.test_runs import SMALL
from tests.family import answers, command_line, descendants, running

SECRETS = {
    "HF_TOKEN": "hf_CANARYone11111111111111",
    "OPENAI_API_KEY": "sk-CANARYtwo2222222222222",
    "MLFLOW_TRACKING_PASSWORD": "CANARYthree3333333333333",
    "AWS_SECRET_ACCESS_KEY": "CANARYfour44444444444444",
}
GUARDED = ("/v1/models", "/v1/completions", "/metrics", "/server_info", "/reset_prefix_cache", "/collective_rpc", "/")
ROUNDS = "rounds=100000"  # until the test has seen enough


POSTED = ("/v1/completions", "/reset_prefix_cache", "/collective_rpc")


@dataclass(frozen=True)
class Seen:
    """What a run with an engine of its own showed while it ran, and what it has left."""

    folder: Path
    output: str
    commands: str
    key: str
    listening: set[tuple[str, int]]
    codes: dict[str, int]  # of HTTP, without a key
    elsewhere: dict[str, str] | None  # what another network namespace finds at each address; None: no such allowed

    @property
    def told(self) -> list[int]:
        """The ports that the run itself says are open to others."""
        (summary,) = self.folder.glob("runs/s/*/summary.json")
        ports: list[int] = json.loads(summary.read_text())["engine"]["open_ports"]
        return ports


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("exposure")
    command = [sys.executable, "-m", "llmexp", *SMALL, ROUNDS, "study.name=s"]
    with running(command, folder, **SECRETS) as run:
        run.comes_to(lambda: "round 2 of" in run.said)
        family = [psutil.Process(run.process.pid), *descendants(run.process.pid)]
        listening = {
            (str(one.laddr.ip), int(one.laddr.port))
            for connections in answers(family, lambda process: process.net_connections(kind="inet"))
            for one in connections
            if one.status == psutil.CONN_LISTEN
        }
        commands = "\n".join(map(command_line, family))
        environments = answers(family, psutil.Process.environ)
        key = next(found["VLLM_API_KEY"] for found in environments if "VLLM_API_KEY" in found)
        port = int(re.findall(r"--port (\d+)", commands)[0])
        codes = {path: code(port, path) for path in GUARDED}
        elsewhere = from_another_namespace(sorted({number for _, number in listening}))
        run.process.send_signal(signal.SIGINT)
        run.process.wait()
    return Seen(folder, run.said, commands, key, listening, codes, elsewhere)


def code(port: int, path: str) -> int:
    """The status that a request without a key gets."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"{}" if path in POSTED else None)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def another_namespace() -> Iterator[tuple[list[str], str]]:
    """A command prefix that runs in a network namespace linked to this one, and our address there."""
    name, ours, theirs, address = f"llmexp{os.getpid()}", f"lx{os.getpid()}", f"ly{os.getpid()}", "10.231.77.1"
    ip("netns", "add", name)
    try:
        ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        ip("addr", "add", f"{address}/30", "dev", ours)
        ip("link", "set", ours, "up")
        for there in (["addr", "add", "10.231.77.2/30", "dev", theirs], ["link", "set", theirs, "up"]):
            ip("netns", "exec", name, "ip", *there)
        yield ["ip", "netns", "exec", name], address
    finally:
        ip("netns", "del", name)


def from_another_namespace(ports: list[int]) -> dict[str, str] | None:
    """What a connection to each port finds there; to "control", a socket of ours that is open to all."""
    script = (
        "import json, socket, sys\nfound = {}\n"
        "for name, port in json.loads(sys.argv[2]).items():\n"
        "    try:\n        socket.create_connection((sys.argv[1], port), 5).close(); found[name] = 'reached'\n"
        "    except OSError as error: found[name] = type(error).__name__\n"
        "print(json.dumps(found))"
    )
    try:
        with another_namespace() as (prefix, address), socket.create_server(("", 0)) as control:
            asked = {"control": control.getsockname()[1], **{str(port): port for port in ports}}
            command = [*prefix, sys.executable, "-c", script, address, json.dumps(asked)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_socket_of_a_run_is_on_loopback(seen: Seen) -> None:
    assert seen.listening
    assert {address for address, _ in seen.listening} <= {"127.0.0.1", "::1"}
    assert seen.told == [] and "can be reached from elsewhere" not in seen.output


def test_another_network_namespace_reaches_nothing(seen: Seen) -> None:
    if seen.elsewhere is None:
        pytest.skip("no network namespaces here (they need root and iproute2)")
    assert seen.elsewhere.pop("control") == "reached"
    assert set(seen.elsewhere.values()) == {"ConnectionRefusedError"}, seen.elsewhere


def test_requests_need_the_launchs_own_key(seen: Seen) -> None:
    assert set(seen.codes.values()) == {401}, seen.codes
    assert len(seen.key) >= 32 and seen.key not in seen.commands


def test_no_secret_is_in_anything_that_a_run_leaves_or_shows(seen: Seen) -> None:
    written = [path for path in seen.folder.rglob("*") if path.is_file()]
    assert {"engine.log", "mlflow.db", "config.yaml", "summary.json", "requests.parquet"} <= {
        path.name for path in written
    }
    for secret in (*SECRETS.values(), seen.key):
        assert secret not in seen.commands
        found = [path for path in written if secret.encode() in path.read_bytes()]
        assert not found, f"{secret} in {found}"
