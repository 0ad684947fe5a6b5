"""No process of an engine outlives its owner, however either of them ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmexp.engines import process

# A front end with a child, as vLLM has; both write their pids. `deaf` ignores SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = {deaf!r}
if deaf: signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; " + ("signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else "") + "time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
print("family", os.getpid(), child.pid, flush=True)
time.sleep({lives_s})
sys.exit(7)
"""


def family(
    folder: Path, *, deaf: bool = False, lives_s: float = 600, niceness: int = 0
) -> tuple[process.EngineProcess, list[int]]:
    command = [sys.executable, "-c", FAMILY.format(deaf=deaf, lives_s=lives_s)]
    engine = process.start(command, os.environ, folder / "engine.log", stop_timeout_s=1.0, niceness=niceness)
    return engine, pids_in(folder / "engine.log")


def pids_in(log: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        words = log.read_text().split() if log.exists() else []
        if words[:1] == ["family"] and len(words) >= 3:
            return [int(word) for word in words[1:3]]
        time.sleep(0.02)
    raise AssertionError("the family did not start")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_an_engine_yields_to_its_client_also_where_sessions_share_the_cores_out(tmp_path: Path) -> None:
    engine, (front, child) = family(tmp_path, niceness=10)
    try:
        assert [psutil.Process(pid).nice() for pid in (front, child)] == [10, 10]
        groups = [Path(f"/proc/{pid}/autogroup") for pid in (front, child)]
        if groups[0].exists():
            assert all(group.read_text().split()[-1] == "10" for group in groups)
        assert psutil.Process().nice() == 0
    finally:
        engine.stop()


@pytest.mark.parametrize("deaf", [False, True])
def test_stop_ends_every_process(deaf: bool, tmp_path: Path) -> None:
    engine, pids = family(tmp_path, deaf=deaf)
    assert set(pids) < set(engine.pids())
    engine.stop()
    assert not any(alive(pid) for pid in pids)
    assert engine.pids() == []
    assert engine.exit_code is not None


def test_the_children_of_an_engine_that_ends_by_itself_go_too(tmp_path: Path) -> None:
    engine, pids = family(tmp_path, lives_s=0.3)
    assert engine.popen.wait(20) == 7
    assert gone(pids)
    engine.stop()


def test_an_engine_that_was_stopped_still_ends_in_good_order(tmp_path: Path) -> None:
    engine, pids = family(tmp_path)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    engine.stop()
    assert engine.exit_code == 128 + signal.SIGTERM, "by the first signal, not by the one that follows"
    assert gone(pids)


def test_the_exit_code_tells_the_signal(tmp_path: Path) -> None:
    engine, pids = family(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert engine.popen.wait(20) == 128 + signal.SIGKILL
    assert gone(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_dies_with_its_owner(how: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from llmexp.engines import process\n"
        "process.start([sys.executable, '-c', sys.argv[1]], os.environ, Path(sys.argv[2]), 1.0)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "engine.log"
    owner = subprocess.Popen([sys.executable, "-c", script, FAMILY.format(deaf=True, lives_s=600), str(log)])
    pids = pids_in(log)
    owner.send_signal(how)
    owner.wait()
    assert gone(pids)


def test_stop_works_after_the_keeper_was_killed(tmp_path: Path) -> None:
    engine, pids = family(tmp_path)
    os.kill(engine.popen.pid, signal.SIGKILL)
    engine.popen.wait()
    engine.stop()
    assert gone(pids)


def test_a_port_is_known_by_the_process_that_listens(tmp_path: Path) -> None:
    serve = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print('port', s.getsockname()[1], flush=True); time.sleep(600)"
    )
    engine = process.start([sys.executable, "-c", serve], os.environ, tmp_path / "log", 1.0)
    try:
        while not (words := (tmp_path / "log").read_text().split()):
            time.sleep(0.02)
        assert {address for address, port in engine.listening() if port == int(words[1])} == {"127.0.0.1"}
        with socket.create_server(("127.0.0.1", 0)) as ours:
            assert ours.getsockname()[1] not in {port for _, port in engine.listening()}
    finally:
        engine.stop()
