"""An installed llmexp works from any folder: conf and the sweeper travel in the wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel built from this checkout, as an installer lays it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("llmexp-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def command(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-m", "llmexp", *arguments], cwd=cwd, env=paths, capture_output=True, text=True
    )


def test_conf_is_found_inside_the_package(installed: Path, tmp_path: Path) -> None:
    where = "import llmexp.compose as c; print(c.conf_dir())"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(installed / "llmexp" / "conf"), done.stderr
    for folder in (ROOT / "conf").rglob("*.yaml"):
        assert (installed / "llmexp" / "conf" / folder.relative_to(ROOT / "conf")).exists()


def test_a_plan_is_made_from_another_folder(installed: Path, tmp_path: Path) -> None:
    done = command(
        installed,
        tmp_path,
        "-m",
        "cache=on,off",
        "model=tiny_random",
        "gpu=cpu",
        "study.plan_only=true",
    )
    assert done.returncode == 0, done.stderr
    assert "2 runs on 2 engine launches" in done.stderr
    assert command(installed, tmp_path, "--help").returncode == 0
