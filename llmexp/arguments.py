"""Options of the commands, whose mistakes are told in a line and not by a page of usage."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from llmexp.errors import ConfigError
from llmexp.words import nearest


class Arguments(argparse.ArgumentParser):
    """A command's options. Raises ConfigError for wrong ones."""

    def error(self, message: str) -> NoReturn:
        _refuse(self, message)

    def with_overrides(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the rest: overrides of the config."""
        options, rest = self.parse_known_args(arguments)
        _refuse_options(self, rest)
        return options, rest


def in_hydras_order(arguments: Sequence[str]) -> list[str]:
    """Options, then overrides, wherever they stood. Raises ConfigError for what Hydra would answer with its usage."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.prog = "llmexp"
    parser.error = lambda message: _refuse(parser, message)  # type: ignore[method-assign]
    found, rest = parser.parse_known_intermixed_args(arguments)
    _refuse_options(parser, rest)
    return [*(argument for argument in arguments if argument not in found.overrides), *found.overrides]


def _refuse_options(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    if options := [argument for argument in rest if argument.startswith("-")]:
        _refuse(parser, f"unrecognized arguments: {' '.join(options)}")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    what, colon, unknown = message.partition("unrecognized arguments: ")
    if colon and not what:
        option = unknown.split()[0].partition("=")[0]
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        message = f"{option}: no such option{nearest(option, known)}"
    raise ConfigError(f"{message} ({parser.prog} --help tells which there are)")
