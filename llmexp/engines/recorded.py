"""vLLM's scheduler, watched: one line a step of what it computed and how long that took.

`--scheduler-cls llmexp.engines.recorded.scheduler` makes it, in the engine core's process; the environment variable
LLMEXP_STEPS names the file. Needs nothing but vLLM there.
"""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

VARIABLE = "LLMEXP_STEPS"
COLUMNS = (
    "scheduled_s",  # when the scheduler was asked; monotonic, as `start_s`
    "start_s",  # when the step began: as it was scheduled, or as the step before ended, if the engine was busy then
    "duration_s",  # until the step's tokens were handed on
    "running",
    "waiting",
    "scheduled",
    "prefill_tokens",
    "decode_tokens",
    "sampled",
    "attended_pairs",
    "context_tokens",
    "free_blocks",
    "admitted",
    "preempted",
)


def scheduler(**arguments: Any) -> Any:
    """The scheduler that vLLM itself would take, and a recorder of its steps."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = arguments["vllm_config"].scheduler_config
    made = (AsyncScheduler if config.async_scheduling else Scheduler)(**arguments)
    Recorder(made, Path(os.environ[VARIABLE]))
    return made


class Recorder:
    """Stands before a scheduler's `schedule` and `update_from_output`.

    With async scheduling a step is scheduled while the one before is computed, so that two are under way; their
    outputs come in order. What lies between the end of a step and the next is the next one's time if requests
    were there to be computed: the engine's own work between steps.
    """

    def __init__(self, scheduler: Any, path: Path) -> None:
        self._file = path.open("w", buffering=1)  # a line reaches the disk as it is written
        self._file.write(",".join(COLUMNS) + "\n")
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._under_way: deque[tuple[float, tuple[int, ...]]] = deque()
        self._ended_s = 0.0
        self._busy = False
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        scheduled_s = time.monotonic()
        output = self._schedule(*arguments, **named)
        self._under_way.append((scheduled_s, self._counts(output)))
        return output

    def update_from_output(self, *arguments: Any, **named: Any) -> Any:
        answer = self._update(*arguments, **named)
        ended_s = time.monotonic()
        scheduled_s, counts = self._under_way.popleft()
        if any(counts):
            start_s = self._ended_s if self._busy else scheduled_s
            self._file.write(f"{scheduled_s:.6f},{start_s:.6f},{ended_s - start_s:.6f},{','.join(map(str, counts))}\n")
            self._ended_s, self._busy = ended_s, self._scheduler.has_unfinished_requests()
        return answer

    def _counts(self, output: Any) -> tuple[int, ...]:
        """The columns after the times, as `llmexp.simulate` counts them; nothing for an empty step."""
        if not output.num_scheduled_tokens:
            return ()
        requests = self._scheduler.requests
        prefill = decode = sampled = pairs = context = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            computed = request.num_computed_tokens  # this step's included
            before = computed - tokens
            samples = not request.is_prefill_chunk
            if samples and tokens == 1 and before >= request.num_prompt_tokens:
                decode += 1
            else:
                prefill += tokens
            sampled += samples
            pairs += tokens * before + tokens * (tokens + 1) // 2
            context += computed
        return (
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            len(output.num_scheduled_tokens),
            prefill,
            decode,
            sampled,
            pairs,
            context,
            self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids),
            len(output.preempted_req_ids or ()),
        )
