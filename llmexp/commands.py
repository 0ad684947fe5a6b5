"""What the command does: `python -m llmexp KEY=VALUE…` makes a run, with `-m` a study; see `--help`."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version

import hydra

from llmexp.arguments import in_hydras_order
from llmexp.compose import conf_dir, open_keys, plain_words
from llmexp.errors import ConfigError, LlmexpError, storage_error
from llmexp.schema.config import register_defaults
from llmexp.task import end_with, make_run
from llmexp.words import either, nearest


def command(arguments: list[str]) -> None:
    """Does what the arguments ask for.

    Exits with the codes of `llmexp.errors`. Raises KeyboardInterrupt, which may say what became of the work.
    """
    try:
        if arguments and arguments[0] in _COMMANDS:
            _COMMANDS[arguments[0]](arguments[1:])
        elif arguments and arguments[0].isidentifier():
            known = nearest(arguments[0], _COMMANDS)
            accepted = f"accepted is KEY=VALUE, or a command: {either(_COMMANDS)}"
            raise ConfigError(f"{arguments[0]}: no such command; {accepted}{known}")
        else:
            _experiment(arguments)
    except LlmexpError as error:
        end_with(error)
    except OSError as error:
        if refusal := storage_error(error):
            end_with(refusal)
        raise


def _experiment(arguments: list[str]) -> None:
    if {"--help", "-h"} & set(arguments):
        from llmexp.help import print_help

        print_help()
        return
    if "--version" in arguments:
        print(f"llmexp {version('llmexp')}")
        return
    arguments = in_hydras_order(arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come up to `main`, which words them
    sys.argv[1:] = open_keys(arguments)
    register_defaults()
    try:
        with plain_words():
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(make_run)()
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(str(interruption) or "interrupted before anything was measured") from None


def _report(arguments: list[str]) -> None:
    from llmexp.report.command import report

    report(arguments)


def _doctor(arguments: list[str]) -> None:
    from llmexp.doctor import main as doctor

    doctor(arguments)


def _audit(arguments: list[str]) -> None:
    from llmexp.auditing import audit

    audit(arguments)


def _record(arguments: list[str]) -> None:
    from llmexp.recording import record

    record(arguments)


def _log(arguments: list[str]) -> None:
    from llmexp.relog import log

    log(arguments)


def _calibrate(arguments: list[str]) -> None:
    from llmexp.simulate.command import calibrate

    calibrate(arguments)


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "report": _report,
    "audit": _audit,
    "doctor": _doctor,
    "log": _log,
    "record": _record,
    "calibrate": _calibrate,
}
