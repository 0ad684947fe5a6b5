"""What a workload asks of the simulated engine."""

import numpy as np
import numpy.typing as npt

from llmexp.errors import WorkloadError
from llmexp.simulate.requests import Requests
from llmexp.workloads.blocks import blocks_of
from llmexp.workloads.workload import Workload


def opens(workload: Workload) -> npt.NDArray[np.bool_]:
    """Whether a request waits for no other's end, shape `(n,)`: all but the later turns of conversations."""
    return _turn_before(workload) < 0


def requests_of(workload: Workload, block_size: int, due_s: npt.ArrayLike | None = None) -> Requests:
    """The workload in blocks of `block_size` tokens, blocks shared exactly where its prompts are equal.

    `due_s` has the arrivals of the requests that wait for no other, in order; None: all are due at once. A
    later turn of a conversation is due its `think_s` after the end of the turn before.
    """
    before = _turn_before(workload)
    arrival_s = np.asarray(workload.columns.get("think_s", np.zeros(len(workload))), np.float64).copy()
    arrival_s[before < 0] = 0.0 if due_s is None else due_s
    blocks = blocks_of(workload, block_size)
    _, chain_ids = np.unique(blocks.keys, return_inverse=True)
    if chain_ids.max(initial=0) >= 2**31:
        raise WorkloadError(f"workload {workload.name}: more than 2**31 distinct blocks of {block_size} tokens")
    return Requests.columns(
        block_size=block_size,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        arrival_s=arrival_s,
        priority=workload.columns.get("priority"),
        deadline_s=workload.columns.get("deadline_s"),
        after=before,
        chain_offsets=blocks.starts,
        chain_ids=chain_ids,
    )


def _turn_before(workload: Workload) -> npt.NDArray[np.int64]:
    """The request of the same conversation before each request, -1: none, shape `(n,)`."""
    before = np.full(len(workload), -1, np.int64)
    latest: dict[int, int] = {}
    for i, conversation in enumerate(workload.columns.get("conversation", before).tolist()):
        if conversation != -1:
            before[i] = latest.get(conversation, -1)
            latest[conversation] = i
    return before
