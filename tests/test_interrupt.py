"""Signals and the blocks that are to come to their end first."""

import subprocess
import sys
import textwrap


def test_a_signal_waits_for_the_outermost_block_that_is_held() -> None:
    script = """
        import os, signal
        from llmexp import interrupt
        interrupt.install()
        done = []
        try:
            with interrupt.held():
                with interrupt.held():
                    os.kill(os.getpid(), signal.SIGTERM)
                    done.append("inner")
                done.append("outer")
            done.append("after")
        except KeyboardInterrupt:
            print(*done, interrupt.exit_code())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "inner outer 143\n"
