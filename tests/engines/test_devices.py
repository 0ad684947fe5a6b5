"""One engine a device, for all llmexp processes of a host, whoever runs them and wherever their TMPDIR is."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmexp.engines import devices
from llmexp.errors import EngineError
from llmexp.hardware import Gpu

TRY = """
import os, sys; from pathlib import Path; from llmexp.engines import devices; from llmexp.errors import EngineError
devices._LOCKS = Path(sys.argv[1])
if len(sys.argv) > 2: os.setuid(int(sys.argv[2]))
try:
    with devices.claim("cpu", 1, 0.0): print("claimed")
except EngineError as error: print(error)
"""


def test_what_a_machine_lacks_is_told_by_the_key_that_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0, "NVIDIA H200", "GPU-0", 150_000_000_000, "580")
    monkeypatch.setattr(devices, "visible_gpus", lambda: ())
    assert devices.lacking("cuda", 1) == "gpu.device: got cuda; no GPU is visible here"
    assert devices.lacking("cpu", 1) is None
    monkeypatch.setattr(devices, "visible_gpus", lambda: (gpu,))
    assert devices.lacking("cuda", 1) is None
    assert devices.lacking("cuda", 2) == "gpu.tensor_parallel_size: got 2; 1 GPU visible here"


@pytest.fixture(autouse=True)
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # which other users may enter, as they may /tmp
        Path(name).chmod(0o1777)
        monkeypatch.setattr(devices, "_LOCKS", Path(name))
        yield Path(name)


def another(locks: Path, *user: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TRY, str(locks), *user],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_another_folder_for_temporary_files_gives_no_second_claim(locks: Path, tmp_path: Path) -> None:
    with devices.claim("cpu", 1, 0.0):
        refused = another(locks, TMPDIR=str(tmp_path))
    assert refused == f"cpu: 0 of 1 free after 0 s; llmexp runs in process {os.getpid()}"
    assert another(locks, TMPDIR=str(tmp_path)) == "claimed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_users_keep_each_other_off(locks: Path) -> None:
    with devices.claim("cpu", 1, 0.0):
        assert "llmexp runs in process" in another(locks, "65534")
    assert another(locks, "65534") == "claimed"


def test_a_lock_file_that_was_removed_meanwhile_is_made_anew(locks: Path) -> None:
    with devices.claim("cpu", 1, 0.0) as first:
        (locks / "llmexp-cpu.lock").unlink()
        assert first.locks
    with devices.claim("cpu", 1, 5.0):
        assert (locks / "llmexp-cpu.lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("trap", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_named_and_left_alone(trap: str, locks: Path, tmp_path: Path) -> None:
    path, precious = locks / "llmexp-cpu.lock", tmp_path / "precious"
    precious.write_text("x")
    if trap == "link":
        path.symlink_to(precious)
    elif trap == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with (
        pytest.raises(EngineError, match=f"{path}, by which users share a device, .*remove it"),
        devices.claim("cpu", 1, 0.0),
    ):
        pass
    assert precious.read_text() == "x"
