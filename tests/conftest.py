"""For all tests: what an example takes says how busy the machine is, and nothing else; and no test depends on the shell
that it was started from."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

# What tells a program how wide and colourful its terminal is, and a way around it to a server on this machine.
_OF_A_TERMINAL = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
_PROXIES = tuple(f"{kind}_proxy" for kind in ("http", "https", "all"))


@pytest.fixture(scope="session", autouse=True)
def plain_shell() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as shell:
        for name in (*_OF_A_TERMINAL, *_PROXIES, *map(str.upper, _PROXIES)):
            shell.delenv(name, raising=False)
        yield
