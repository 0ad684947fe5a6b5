"""What the command says to wrong input, and how fast: nothing heavy is imported for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmexp.compose import compose, conf_dir, open_keys
from llmexp.errors import ConfigError, LlmexpError
from llmexp.prepare import prepare
from llmexp.schema.config import keys

TINY = ["model=tiny_random", "gpu=cpu", "tracking=off"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_num_seqs=0", ["max_num_seqs: got 0; accepted is an integer from 1 to 65536"]),
        ("max_num_seqs=many", ["max_num_seqs", "'many'", "integer"]),
        ("cache=onn", ["cache: got 'onn'; accepted is off, on or salted; did you mean on"]),
        ("cache=ON", ["cache: got 'ON'; accepted is off, on or salted; did you mean on?"]),
        ("cache=true", ["cache: got 'true'; accepted is off, on or salted; did you mean on?"]),
        ("cache=False", ["cache: got 'False'; accepted is off, on or salted; did you mean off?"]),
        ("cache=yes", ["cache: got 'yes'; accepted is off, on or salted; did you mean on?"]),
        ("cache=null", ["cache: got 'null'; accepted is off, on or salted"]),
        ("engine=3", ["engine: got '3'; accepted is endpoint, simulator, vllm_async or vllm_server"]),
        ("gpu=h201", ["gpu", "'h201'", "did you mean h200"]),
        ("max_num_seq=4", ["max_num_seq:", "did you mean max_num_seqs"]),
        ("workload.num_request=4", ["workload.num_request:", "did you mean workload.num_requests"]),
        (
            "kv.gpu_memory_utilization=2",
            ["kv.gpu_memory_utilization: got 2; accepted is a number above 0 and at most 1, or"],
        ),
        ("engine.port=http", ["engine.port", "'http'", "integer"]),
        ("engine.port=80", ["engine.port", "80", "1024"]),
        ("study.name=a/b", ["study.name", "a/b"]),
        ("run.name=../victim", ["run.name", "../victim"]),
        ("run.name=.", ["run.name", "'.'"]),
        ("seed=99999999999999999999", ["seed: got 99999999999999999999; accepted is an integer from 0 to 4294967295"]),
        ("load.concurrency=${nope}", ["load.concurrency", "nope"]),
        ("max_num_seqs=true", ["max_num_seqs: got true; accepted is an integer from"]),
        ("max_num_seqs=[1,2]", ["max_num_seqs: got [1, 2]; accepted is an integer"]),
        ("max_num_seqs=1000000", ["max_num_seqs: got 1000000", "65536"]),
        ("study.trials=1001", ["study.trials: got 1001", "1000"]),
        ("rounds=1000000", ["rounds: got 1000000", "100000"]),
        ("workload.num_requests=1000000000", ["workload.num_requests", "10000000"]),
        ("max_num_seqs=1k", ["max_num_seqs: got '1k'", "; did you mean 1000?"]),
        ("kv.cache_memory_bytes=4GiB", ["kv.cache_memory_bytes: got '4GiB'", "did you mean 4294967296?"]),
        ("kv.gpu_memory_utilization=5%", ["kv.gpu_memory_utilization: got '5%'", "did you mean 0.05?"]),
        ("max_num_seqs=1e3", ["max_num_seqs: got 1000.0; accepted is an integer from 1 to 65536; did you mean 1000?"]),
        ("engine.sample_interval_s=200ms", ["accepted is a number from 0.01 to 3600; did you mean 0.2?"]),
        ("engine.ready_timeout_s=2m", ["did you mean 120?"]),
        ("slo.ttft_ms=2s", ["did you mean 2000?"]),
        ("client.workers=0", ["client.workers: got 0; accepted is an integer from 1 to 256, or auto"]),
        ("workload.suffix_tokens=0", ["workload.suffix_tokens: got 0; accepted is an integer from 1 to"]),
        ("workload.suffix_tokens={distribution:uniform,min:1}", ["workload.suffix_tokens.max: it needs to be set"]),
        ("engine.url=http://host", ["engine.url: no key of this engine; it is one of the kind endpoint"]),
        ("workload.turns=3", ["workload.turns: no key of this workload; it is one of the kind multi_turn"]),
        ("workload={a:1}", ["workload: it takes the name of a file"]),
        ("cache=[on,off]", ["cache: got [on,off], a list"]),
        ("model=gpt2", ["model: got 'gpt2'", "model.path=OWNER/gpt2"]),
        ("model=openai/gpt2", ["model: got 'openai/gpt2'", "model.path=openai/gpt2"]),
        ("model=../gpu/cpu", ["model.device: no such key"]),
        ("runs_dir=", ["runs_dir: got ''; accepted is text of at least 1 character"]),
        ("tracking.dir=''", ["tracking.dir: got ''"]),
        ("engine.env.X=true", ["engine.env.X: got true; accepted is text or a number"]),
        ("engine.sample_interval_s=1e-300", ["engine.sample_interval_s", "0.01"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(override: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        compose([*TINY, override])
    for part in expected:
        assert part in str(error.value)


def test_one_wrong_value_behind_two_keys_is_reported_once() -> None:
    with pytest.raises(ConfigError) as error:
        compose([*TINY, "max_num_seqs=0"])
    assert str(error.value).splitlines() == ["max_num_seqs: got 0; accepted is an integer from 1 to 65536"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["kv.block_size=16"], ["kv.block_size", "16", "multiple of 32"]),
        (["workload.prefix_tokens=9000"], ["9032", "2048"]),
        (["model.path=/no/such/folder"], ["model.path", "/no/such/folder", "Hub id"]),
        (
            ["model.max_model_len=100000"],
            ["model.max_model_len: got 100000", "takes 8192", "model=random_8b"],
        ),
        (["load=trace"], ["load: got trace; this workload has no arrival times"]),
        (["runs_dir=/proc/nowhere"], ["runs_dir", "/proc/nowhere", "cannot be written"]),
        (["kv.num_blocks=64", "kv.cache_memory_bytes=1000000"], ["kv.num_blocks=64", "one KV budget"]),
    ],
)
def test_what_only_model_or_machine_can_refuse_is_refused_before_the_engine(
    overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    with pytest.raises(LlmexpError) as error:
        prepare(compose([*TINY, f"runs_dir={tmp_path}", *overrides]))
    for part in expected:
        assert part in str(error.value)


def test_a_model_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        prepare(compose([*TINY, f"model.path={tmp_path}", f"runs_dir={tmp_path}"]))


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"engine.port: got {port}, which is in use"):
            prepare(compose([*TINY, f"engine.port={port}", f"runs_dir={tmp_path}"]))


def test_gpu_auto_is_replaced_by_what_is_here_and_keeps_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmexp import hardware

    h200 = hardware.Gpu(0, "NVIDIA H200", "GPU-0", 150_000_000_000, "580")
    monkeypatch.setattr(hardware, "gpus", lambda: (h200,))
    gpu = compose(["gpu=auto", "gpu.tensor_parallel_size=2"]).gpu
    assert (gpu.name, gpu.device, gpu.block_size, gpu.tensor_parallel_size) == ("h200", "cuda", 16, 2)
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    assert compose(["gpu=auto"]).gpu.device == "cpu"
    unknown = hardware.Gpu(0, "NVIDIA B9999", "GPU-1", 1, "580")
    monkeypatch.setattr(hardware, "gpus", lambda: (unknown,))
    with pytest.raises(ConfigError, match="B9999"):
        compose(["gpu=auto"])


@pytest.mark.parametrize(
    ("product", "group"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
    ],
)
def test_products_are_known_by_their_names(product: str, group: str | None) -> None:
    from llmexp.hardware import Gpu

    assert Gpu(0, product, "GPU-0", 1, "580").group == group


def test_every_file_of_conf_composes() -> None:
    for folder in sorted(path for path in conf_dir().iterdir() if path.is_dir() and path.name != "experiment"):
        for file in sorted(folder.glob("*.yaml")):
            overrides = [f"{folder.name}={file.stem}", *([] if folder.name == "gpu" else ["gpu=cpu"])]
            if "???" in file.read_text():
                with pytest.raises(ConfigError, match=rf"{folder.name}\.\w+: .*needs it set"):
                    compose(overrides)
            else:
                compose(overrides)


def test_on_and_off_are_words_not_booleans() -> None:
    for name in ("on", "off"):
        assert yaml.safe_load((conf_dir() / "cache" / f"{name}.yaml").read_text())["name"] == name
        assert compose([*TINY, f"cache={name}"]).cache.name == name


@pytest.mark.parametrize("spelling", ["on", "'on'", '"on"'])
def test_a_group_is_named_with_quotes_or_without(spelling: str) -> None:
    assert compose([*TINY, f"cache={spelling}"]).cache.name == "on"
    (sweep,) = open_keys([f"cache={spelling},off"])
    assert sweep == "cache=on,off"


def test_an_unquoted_on_in_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /cache: on\n")
    said = refused(tmp_path, "--config-dir", str(tmp_path), "+experiment=mine", *TINY)
    assert said[0].startswith("llmexp: a file of the config has defaults with an unquoted on") and len(said) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["dcotor"],
            "dcotor: no such command; accepted is KEY=VALUE, or a command: report, … did you mean doctor?",
        ),
        (["max_num_seqs"], "max_num_seqs: no such command; accepted is KEY=VALUE, or"),
        (["max_num_seqs=4", "-m", "cache=on,of"], "cache: got 'of'; accepted is off, on or salted; did you mean off?"),
        (["-m", "cache=on,off,"], "cache: got on,off,, which is not understood; values stand between commas"),
        (["=3"], "=3: not understood; accepted is KEY=VALUE, or a command"),
        (["hydra=3"], "hydra: got a number or null; accepted is hydra.KEY=VALUE"),
        (["runs/x", "cache=on"], "runs/x: not understood; accepted is KEY=VALUE, or a command"),
        (["--multirunn", "cache=on,off"], "--multirunn: no such option; did you mean --multirun"),
        (["cache=on", "--foo=3"], "--foo: no such option"),
        (["--cfg"], "argument --cfg/-c: expected one argument"),
        (["audit", "--capacity", "5"], "--capacity: no such option; did you mean --capacities?"),
        (["doctor", "--fix"], "--fix: no such option"),
        (["record", "--put=x"], "--put: no such option; did you mean --out?"),
        (["calibrate", "--termz", "a"], "--termz: no such option; did you mean --terms?"),
        (["report", "--compre", "a"], "--compre: no such option; did you mean --compare?"),
        (["report"], "one of the arguments folder --mlflow-experiment is required"),
        (["-m", "cache=true,off"], "cache: got 'true'; accepted is off, on or salted; did you mean on?"),
    ],
)
def test_a_wrong_command_or_option_is_told_in_a_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (line,) = refused(tmp_path, *arguments)
    start, _, end = message.partition(" … ")
    assert line.startswith(f"llmexp: {start}") and end in line


def refused(folder: Path, *arguments: str) -> list[str]:
    """The lines that the command writes as it refuses its input."""
    done = subprocess.run([sys.executable, "-m", "llmexp", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_what_was_found_is_shown_cut(tmp_path: Path) -> None:
    for override in (f"max_num_seqs={'a' * 10_000}", f"gpu={'b' * 10_000}", f"{'c' * 10_000}=1", f"x{'=' * 9999}"):
        with pytest.raises(ConfigError) as error:
            compose([*TINY, override])
        assert len(str(error.value)) < 3000


def test_a_number_is_a_fine_variable_of_the_engine() -> None:
    assert compose([*TINY, "engine.env.OMP_NUM_THREADS=2"]).engine.env == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        ("max_num_seqs=glob(*)", "max_num_seqs: no values"),
        ("max_num_seqs=range(1,100000000)", "max_num_seqs: more than 10000 values"),
        ("max_num_seqs=range(1,5000) rounds=1,2,3", "study: 14997 runs in all"),
    ],
)
def test_a_sweep_without_an_end_is_refused(swept: str, expected: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmexp", "-m", *TINY, f"runs_dir={tmp_path}", *swept.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_python_in_yaml_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "evil.yaml").write_text(
        f"# @package _global_\narm: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n"
    )
    command = [sys.executable, "-m", "llmexp", "--config-dir", str(tmp_path), "+experiment=evil", *TINY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "evil.yaml" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "made").exists()


def test_engine_arguments_need_no_plus() -> None:
    assert compose([*TINY, "engine.args.swap_space=1"]).engine.args == {"swap_space": 1}


def test_help_lists_every_key() -> None:
    done = subprocess.run([sys.executable, "-m", "llmexp", "--help"], capture_output=True, text=True, check=True)
    assert "2 wrong input" in done.stdout and "143 SIGTERM" in done.stdout
    missing = [key for key in keys() if key.rpartition(".")[2] != "kind" and key not in done.stdout]
    assert not missing


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["max_num_seqs=0"],
        ["-m", "cache=on,off", "max_num_seqs=1,0"],
        ["gpu=h200", "gpu.tensor_parallel_size=64"],
        ["model=tiny_random", "gpu=cpu", "kv.block_size=16"],
        ["engine=simulator", "model=random_8b", "gpu=t4"],
        ["engine=simulator", "model=random_8b", "kv.num_blocks=10"],
        ["engine=simulator", "model=random_8b", "engine.calibration=/no/such/file"],
        ["-m", "engine=simulator", "model=random_8b", "kv.num_blocks=10,1000"],
        ["experiment=block_size", "gpu=cpu"],
        ["report", "/no/such/folder"],
    ],
)
def test_help_and_errors_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['llmexp', *{arguments}]\n"
        "from llmexp.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "else: code = 0\n"
        "heavy = {*'torch vllm mlflow transformers openai matplotlib scipy.stats pandas numba'.split()}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "print('code', code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"code {0 if arguments == ['--help'] else 2}" in done.stdout


def test_an_earlier_attempt_is_cleared_and_other_files_stay(tmp_path: Path) -> None:
    from llmexp.record import clear

    for name in ("summary.json", "requests-3.parquet", "engine.log", "notes.md"):
        (tmp_path / name).touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]


def test_the_version_is_llmexps() -> None:
    done = subprocess.run([sys.executable, "-m", "llmexp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("llmexp ")
