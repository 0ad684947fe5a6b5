"""The entry of `llmexp` and `python -m llmexp`."""

import sys

from llmexp import interrupt


def main() -> None:
    """Does what the command line asks for; exit codes: `llmexp.errors`, `llmexp.interrupt`."""
    interrupt.install()
    try:
        from llmexp.commands import command  # takes half a second, in which Ctrl-C may come

        command(sys.argv[1:])
    except KeyboardInterrupt as interruption:
        print(f"llmexp: {str(interruption) or 'interrupted'}", file=sys.stderr)
        sys.exit(interrupt.exit_code())


if __name__ == "__main__":
    main()
