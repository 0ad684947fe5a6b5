"""Stands in for vLLM's server, as `engine.python`: `python -m tests.faults.engine ARGUMENT…`, in vLLM's shape.

A front end answers, as the golden server does; an engine core, a process of its own, lets it: where the core is
stopped, so is every answer, and where it dies, the front end ends itself. It takes its orders from the environment:
FAULT_NOTES, the file for `Watched`; FAULT_BEHAVIOUR, fields of `Behaviour` in JSON; and FAULT_ENGINE, one of
`no_memory` (in vLLM's words), `deaf` (never answers), `port` (somebody takes the first engine's port first).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.faults.watched import Watched
from tests.golden.server import Behaviour

NO_MEMORY = (
    "ValueError: To serve at least one request with the models's max seq len (2048), 0.02 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.01 GiB)."
)
DYING_S = 0.2  # as vLLM, which fails its requests for a moment before it ends


def main(arguments: list[str]) -> int:
    if arguments[:2] != ["-m", "vllm.entrypoints.openai.api_server"]:
        os.execv(sys.executable, [sys.executable, *arguments])
    port, model = (arguments[arguments.index(name) + 1] for name in ("--port", "--served-model-name"))
    fault = os.environ.get("FAULT_ENGINE")
    print("Initializing a V1 LLM engine", flush=True)
    if fault == "no_memory":
        print(NO_MEMORY, flush=True)
        return 1
    if fault == "deaf":
        time.sleep(600)
    notes = Path(os.environ["FAULT_NOTES"])
    taken = socket.create_server(("127.0.0.1", int(port))) if fault == "port" and not notes.exists() else None
    notes.touch()
    core = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.05)", "EngineCore"])
    asked = {"ttft_s": 0.05, "itl_s": 0.02, **json.loads(os.environ.get("FAULT_BEHAVIOUR", "{}"))}
    if "fault_requests" in asked:
        asked["fault_requests"] = frozenset(asked["fault_requests"])
    try:
        server = Watched(Behaviour(**asked, model=model, block_size=32), int(port), notes)
    except OSError:
        print(f"OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already "
              "in use", flush=True)  # fmt: skip
        core.kill()
        return 1
    finally:
        if taken is not None:
            taken.close()
    while core.poll() is None:
        with contextlib.suppress(OSError):
            if _is_stopped(core.pid):
                gate = threading.Event()
                server.hold(gate)
                while _is_stopped(core.pid):
                    time.sleep(0.01)
                gate.set()
        time.sleep(0.01)
    print("EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", flush=True)
    time.sleep(DYING_S)
    return 0


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
