"""Root causes and facts from the logs of engines, as vLLM 0.24 and 0.32 write them."""

from pathlib import Path

import pytest

from llmexp.engines import log

FAILED_CORE = """\
(APIServer pid=11) INFO 11-29 17:03:14 [api_utils.py:286] non-default args: {'host': '127.0.0.1'}
(EngineCore pid=22) ERROR 11-29 17:03:40 [core.py:1200] EngineCore failed to start.
(EngineCore pid=22) ERROR 11-29 17:03:40 [core.py:1200] Traceback (most recent call last):
(EngineCore pid=22) ERROR 11-29 17:03:40 [core.py:1200]   File "core.py", line 1, in run_engine_core
(EngineCore pid=22) ERROR 11-29 17:03:40 [core.py:1200] ValueError: No common block size for 16.
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked objects
  warnings.warn('resource_tracker: leaked')
"""

KILLED_CORE = """\
(APIServer pid=11) WARNING 11-29 17:03:14 [core_client.py:817] MPClient: engine core exited unexpectedly
(APIServer pid=11) ERROR 11-29 17:03:14 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=11) ERROR 11-29 17:03:14 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=11) ERROR 11-29 17:03:14 [serving.py:474] Error in completion stream generator.
(APIServer pid=11) ERROR 11-29 17:03:14 [serving.py:474] Traceback (most recent call last):
(APIServer pid=11) ERROR 11-29 17:03:14 [serving.py:474] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
(APIServer pid=11) INFO:     Application shutdown complete.
"""
KILLED_WORKER = """\
(EngineCore pid=22) ERROR 11-29 17:03:14 [multiproc_executor.py:316] Worker proc VllmWorker-0 died unexpectedly \
(exit code: -9), shutting down executor.
(EngineCore pid=22) ERROR 11-29 17:03:14 [core.py:1200] RuntimeError: Executor failed.
(APIServer pid=11) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (FAILED_CORE, "ValueError: No common block size for 16."),
        ("usage: x\nserver.py: error: unrecognized options: --no\n", "server.py: error: unrecognized options: --no"),
        ("\x1b[36m(Worker pid=1)\x1b[0;0m torch.OutOfMemoryError: full\n", "torch.OutOfMemoryError: full"),
        ("Error in x\nException: of its own\n", "Exception: of its own"),
        ("INFO: started\nKilled\n\n", "Killed"),
        (KILLED_WORKER, "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."),
        (KILLED_CORE, "its core process had ended without a word (killed? out of memory? see dmesg)"),
        ("", "the log is empty"),
    ],
)  # fmt: skip
def test_the_root_cause_is_the_first_error_that_wraps_no_other(text: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(text)
    assert log.root_cause(tmp_path / "engine.log") == cause


@pytest.mark.parametrize(
    ("line", "capacity"),
    [
        ("(EngineCore pid=6955) INFO 11-29 17:03:46 [kv_cache_utils.py:2327] CPU KV cache size: 23,296 tokens", 23296),
        ("(EngineCore pid=1) INFO 11-29 17:03:46 [kv_cache_utils.py:829] GPU KV cache size: 1,011,616 tokens", 1011616),
        ("nothing of the kind", None),
    ],
)  # fmt: skip
def test_the_capacity_is_read(line: str, capacity: int | None, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(line)
    assert log.kv_capacity_tokens(tmp_path / "engine.log") == capacity


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("INFO 11-29 17:03:46 [cuda.py:300] Using FLASH_ATTN attention backend out of potential", "FLASH_ATTN"),
        ("INFO 11-29 17:03:46 [cuda.py:300] Using Flash Attention backend on V1 engine.", "FLASH_ATTN"),
        ("INFO 11-29 17:03:46 [cpu.py:1] Using CPU_ATTN backend.", "CPU_ATTN"),
        ("nothing of the kind", None),
    ],
)  # fmt: skip
def test_the_attention_backend_is_read(line: str, backend: str | None, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(line)
    assert log.attention_backend(tmp_path / "engine.log") == backend
