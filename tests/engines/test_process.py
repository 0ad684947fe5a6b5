"""No process of an engine outlives its owner, however either of them ends."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmexp.engines import process
from tests.family import running
from tests.waiting import PATIENCE_S, until

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
    folder: Path, *, deaf: bool = False, lives_s: float = 600, niceness: int = 0, stop_timeout_s: float = 1.0
) -> tuple[process.EngineProcess, list[int]]:
    command = [sys.executable, "-c", FAMILY.format(deaf=deaf, lives_s=lives_s)]
    engine = process.start(command, os.environ, folder / "engine.log", stop_timeout_s, niceness)
    return engine, pids_in(folder / "engine.log")


def pids_in(log: Path) -> list[int]:
    until(lambda: log.exists() and log.read_text().endswith("\n"), "the family")
    said, front, child = log.read_text().split()
    assert said == "family"
    return [int(front), int(child)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
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
    assert engine.popen.wait(PATIENCE_S) == 7
    assert gone(pids)
    engine.stop()


def test_an_engine_that_was_stopped_still_ends_in_good_order(tmp_path: Path) -> None:
    engine, pids = family(tmp_path, stop_timeout_s=PATIENCE_S)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    engine.stop()
    assert engine.exit_code == 128 + signal.SIGTERM, "by the first signal, not by the one that follows"
    assert gone(pids)


def test_the_exit_code_tells_the_signal(tmp_path: Path) -> None:
    engine, pids = family(tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert engine.popen.wait(PATIENCE_S) == 128 + signal.SIGKILL
    assert gone(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_dies_with_its_owner(how: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from llmexp.engines import process\n"
        "process.start([sys.executable, '-c', sys.argv[1]], os.environ, Path(sys.argv[2]), 1.0)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "engine.log"
    command = [sys.executable, "-c", script, FAMILY.format(deaf=True, lives_s=600), str(log)]
    with running(command, tmp_path) as owner:
        pids = pids_in(log)
        owner.process.send_signal(how)
        owner.process.wait()
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
        until(lambda: (tmp_path / "log").read_text().endswith("\n"), "the port")
        served = int((tmp_path / "log").read_text().removeprefix("port "))
        assert {address for address, port in engine.listening() if port == served} == {"127.0.0.1"}
        with socket.create_server(("127.0.0.1", 0)) as ours:
            assert ours.getsockname()[1] not in {port for _, port in engine.listening()}
    finally:
        engine.stop()
