"""Workloads and replays for the client's tests."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmexp.client.replay import Replay, replay
from llmexp.engines.target import Target
from llmexp.schema.load import ClientConfig, ClosedLoop, LoadConfig
from llmexp.workloads.workload import Workload, packed
from tests.golden.server import GoldenServer, Seen

# Within it, two times may belong to one event. A busy machine makes any event later for one of two processes.
CLOSE_S = 0.1


def numbered(
    n: int,
    *,
    prompt_tokens: int = 5,
    output_tokens: int = 4,
    columns: Mapping[str, Any] | None = None,
    arrivals_s: list[float] | None = None,
    **more: Any,
) -> Workload:
    """`n` requests; every token of request i's prompt is i."""
    prompt_at, lengths = packed(np.full(prompt_tokens, i, np.int32) for i in range(n))
    return Workload(
        name="numbered",
        recipe={},
        prompt_at=prompt_at,
        prompt_tokens=lengths,
        output_tokens=np.full(n, output_tokens, np.int32),
        arrivals_s=None if arrivals_s is None else np.array(arrivals_s),
        columns={name: np.array(values) for name, values in (columns or {}).items()},
        **more,
    )


def said(text: str) -> str:
    """A user's chat message, as the column `messages` holds it."""
    return json.dumps([{"role": "user", "content": text}])


def send(
    server: GoldenServer | str,
    workload: Workload,
    load: LoadConfig | None = None,
    client: Mapping[str, Any] | None = None,
    **more: Any,
) -> Replay:
    """Replays the workload, one request after another unless told otherwise."""
    url = server if isinstance(server, str) else server.url
    options = {"round_index": 0, **more}
    load = load or ClosedLoop(concurrency=1)
    return replay(Target(url, "golden"), workload, load, ClientConfig(**(client or {})), **options)


def by_request(server: GoldenServer) -> dict[int, Seen]:
    """What the server saw, by the request's number."""
    return {seen.body["prompt"][0]: seen for seen in server.seen}


def lateness_s(found: Replay, seen: Mapping[int, Seen]) -> NDArray[np.float64]:
    """How much later than the server sent each token, by what it saw of each request, its chunk was read: one row a
    request."""
    return np.array(
        [
            np.array(row["chunk_s"]) + found.origin_monotonic_s - seen[row["request"]].sent_s
            for row in found.trace.to_pylist()
        ]
    )
