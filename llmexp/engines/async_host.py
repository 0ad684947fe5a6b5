"""AsyncLLM in a process of its own: `python -m llmexp.engines.async_host SOCKET VLLM_ARGUMENT…`.

It listens on SOCKET once the engine is ready. Whoever connects sends a function, which runs here with the engine
and talks over the connection (`llmexp.engines.host`). SIGTERM ends it; so does the death of vLLM's engine core.
"""

import asyncio
import contextlib
import gc
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import uvloop

from llmexp.engines.host import LENGTH

_PARTING_S = 1.0


class Talk:
    """The engine's end of a talk."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> Any:
        """The next value. Raises EOFError once the other end has hung up."""
        size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
        return pickle.loads(await self._reader.readexactly(size))

    def send(self, value: Any) -> None:
        """Sends without waiting."""
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._writer.write(LENGTH.pack(len(payload)) + payload)


async def version(engine: Any, talk: Talk) -> None:
    """Tells vLLM's version."""
    import vllm

    talk.send(vllm.__version__)


async def metrics(engine: Any, talk: Talk) -> None:
    """Tells the metrics, in the words of the server's page."""
    from prometheus_client import REGISTRY, generate_latest

    await engine.check_health()
    talk.send(generate_latest(REGISTRY).decode())


async def reset(engine: Any, talk: Talk) -> None:
    """Empties the prefix cache and tells whether that went well."""
    talk.send(bool(await engine.reset_prefix_cache()))


async def main(path: str, arguments: list[str]) -> int:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # type: ignore[no-untyped-call]
    parsed = parser.parse_args(arguments)
    # vLLM's defaults of max_num_batched_tokens and max_num_seqs depend on the context; take the server's.
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs.from_cli_args(parsed), usage_context=UsageContext.OPENAI_API_SERVER
    )
    gc.collect()
    gc.freeze()  # as vLLM's server does
    over = asyncio.Event()
    talks: set[asyncio.Task[Any]] = set()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    server = await listen(engine, path, over, talks)
    await over.wait()
    server.close()
    if talks:  # the callers that have died with this signal; what they leave behind is seen to first
        await asyncio.wait(talks, timeout=_PARTING_S)
    with contextlib.suppress(OSError):  # the owner may be dead, and leave the socket and its folder to us
        Path(path).unlink(missing_ok=True)
        Path(path).parent.rmdir()
    died = engine.errored
    engine.shutdown()
    return int(died)


async def listen(engine: Any, path: str, over: asyncio.Event, talks: set[asyncio.Task[Any]]) -> asyncio.Server:
    """Runs what is sent to the socket `path`, each call by itself, and in `talks` while it lasts; sets `over` if the
    engine dies of one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        task.add_done_callback(talks.discard)
        talk = Talk(reader, writer)
        try:
            await (await talk.receive())(engine, talk)
            await writer.drain()
        except (EOFError, ConnectionError):
            pass  # a caller that went away
        except Exception:
            traceback.print_exc()
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()
            if engine.errored:
                over.set()

    return await asyncio.start_unix_server(answer, path)


if __name__ == "__main__":
    sys.exit(uvloop.run(main(sys.argv[1], sys.argv[2:])))
