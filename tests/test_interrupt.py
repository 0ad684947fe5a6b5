"""Signals and the blocks that are to come to their end first."""

import subprocess
import sys
import textwrap
from pathlib import Path


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


def test_a_signal_within_mlflow_is_neither_lost_nor_cuts_off_a_transaction(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from mlflow import MlflowClient
        from llmexp import interrupt, tracking
        from llmexp.compose import compose
        interrupt.install()
        config = compose(["model=tiny_random", "gpu=cpu", f"tracking.dir={sys.argv[1]}"])
        create_run = MlflowClient.create_run
        def hit(*arguments, **more):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                pass  # as in a finalizer, whose exceptions Python drops
            return create_run(*arguments, **more)
        MlflowClient.create_run = hit
        try:
            tracking.start_study(config.tracking, Path("s"), "s", "identity", "")
            print("lost")
        except KeyboardInterrupt:
            client, experiment = tracking.open_store(config.tracking)
            print(*[run.info.run_name for run in client.search_runs([experiment])])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "mlruns")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "s\n"


def test_a_signal_within_a_finalizer_is_not_lost() -> None:
    """There Python drops what is raised, after a traceback."""
    script = """
        import os, signal, time
        from llmexp import interrupt
        class Dying:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
        interrupt.install()
        try:
            Dying()
            time.sleep(60)
            print("lost")
        except KeyboardInterrupt:
            print(interrupt.exit_code())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "130\n" and done.stderr == ""


def test_ctrl_c_while_modules_are_imported_ends_in_a_line() -> None:
    script = """
        import os, signal, sys
        class Interrupted:
            def find_spec(self, name, path=None, target=None):
                if name == "llmexp.commands":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupted())
        from llmexp.__main__ import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "llmexp: interrupted\n")
