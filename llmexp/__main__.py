"""The command: `python -m llmexp KEY=VALUE…` makes a run, with `-m` a study; see `--help`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from llmexp.compose import conf_dir, open_keys, plain_words, resolve
from llmexp.errors import ConfigError, LlmexpError, WorkloadError
from llmexp.schema.config import register_defaults

if TYPE_CHECKING:
    from llmexp.engines.lease import EngineLease

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def job(composed: DictConfig, lease: "EngineLease | None" = None) -> str:
    """Hydra's task: one run. Returns its folder."""
    from llmexp.run import run

    try:
        return str(run(resolve(composed), lease).folder)
    except LlmexpError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the study goes on with its other runs
        _fail(error)


def _fail(error: LlmexpError) -> NoReturn:
    print(f"llmexp: {error}", file=sys.stderr)
    sys.exit(WRONG_INPUT if isinstance(error, ConfigError | WorkloadError) else FAILED)


def main() -> None:
    """The entry of `llmexp` and `python -m llmexp`. Exit codes: 2 wrong input, 1 failure, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    try:
        if not arguments or arguments[0] not in _COMMANDS:
            _experiment(arguments)
        else:
            _COMMANDS[arguments[0]](arguments[1:])
    except LlmexpError as error:
        _fail(error)
    except KeyboardInterrupt:
        print("llmexp: interrupted; what was measured is kept", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _experiment(arguments: list[str]) -> None:
    if {"--help", "-h"} & set(arguments):
        from llmexp.help import print_help

        print_help()
        return
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come up to `main`, which words them
    sys.argv[1:] = open_keys(arguments)
    register_defaults()
    with plain_words():
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _report(arguments: list[str]) -> None:
    from llmexp.report.command import report

    report(arguments)


def _audit(arguments: list[str]) -> None:
    from llmexp.compose import compose
    from llmexp.workloads.command import audit

    audit(compose(arguments))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {"report": _report, "audit": _audit}


if __name__ == "__main__":
    main()
