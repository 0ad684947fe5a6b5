"""The event loop, plain: arrivals, a step of the scheduler, the time it takes, its tokens. The reference for
``kernel.py``."""

from collections import deque

from llmexp.simulate.arrivals import Arrivals
from llmexp.simulate.cost import StepCost, Work
from llmexp.simulate.errors import StandstillReason, TimeStandsStillError, standstill
from llmexp.simulate.records import Recorder, Tables
from llmexp.simulate.requests import Requests, steps_without_token
from llmexp.simulate.scheduler import Scheduler, Step
from llmexp.simulate.sequence import Sequence


def run(requests: Requests, scheduler: Scheduler, cost: StepCost, arrivals: Arrivals) -> Tables:
    """Serve all requests; raises ``TimeStandsStillError`` if that never ends.

    With async scheduling a step is decided when the one before begins: requests that come while it is computed wait
    for one step more, and blocks come free one step later (vLLM's ``AsyncScheduler``).

    The engine core does one thing after the other: it decides a step, launches it, then, if as many steps are under
    way as may be, waits for the first of them. The device computes steps in their order, each from when it is
    decided, as the first kernels reach it then, until all of them have reached it, or longer.
    """
    records = Recorder(requests)
    patience = steps_without_token(requests)
    depth = 2 if scheduler.settings.async_scheduling else 1
    under_way: deque[tuple[int, Step, float, float]] = deque()  # number, step, when decided, when computed
    now_s = computed_s = ended_s = 0.0  # the engine core's clock, the device's, and when the last step ended
    entered = fruitless = 0
    while True:
        for index, sent_s in arrivals.take(now_s):
            scheduler.add(sequence(requests, index, sent_s, entered))
            records.sent(index, sent_s)
            entered += 1
        step = scheduler.schedule()
        if step.scheduled or step.preempted:
            work = work_of(step)
            duration_s = cost.duration_s(work) if step.scheduled else 0.0
            if step.scheduled and not 0.0 < duration_s < float("inf"):
                raise _standstill("timeless", now_s, duration_s, scheduler)
            number, decided_s = records.scheduled(step, scheduler, work, now_s), now_s
            now_s += cost.launch_s(work)
            computed_s = max(max(computed_s, decided_s) + duration_s, now_s)
            under_way.append((number, step, decided_s, computed_s))
            if depth > 1:
                scheduler.run_ahead(step)
            if len(under_way) < depth:
                continue
        elif not under_way:
            next_s = arrivals.next_s
            if next_s is not None and next_s > now_s:
                now_s = next_s
                continue
            if scheduler.running or scheduler.waiting or next_s is not None:
                raise _standstill("stuck", now_s, 0.0, scheduler)
            return records.tables()

        number, step, decided_s, step_computed_s = under_way.popleft()
        start_s = max(ended_s, decided_s)
        now_s = ended_s = max(now_s, step_computed_s)
        emitted, finished = scheduler.update(step)
        echoed = sum(seq.prompt_tokens for seq in emitted if not records.has_answered(seq))
        delivered_s = arrivals.hand_out(now_s, len(emitted), echoed)
        records.computed(number, emitted, finished, start_s, now_s, delivered_s)
        for seq in finished:
            arrivals.finish(seq.index, delivered_s)
        fruitless = 0 if emitted else fruitless + 1
        if fruitless > patience:
            raise _standstill("fruitless", now_s, now_s - start_s, scheduler)


def sequence(requests: Requests, index: int, sent_s: float, order: int) -> Sequence:
    """Request ``index`` as the engine gets it, at ``sent_s``, after ``order`` others."""
    return Sequence(
        index=index,
        prompt_tokens=int(requests.prompt_tokens[index]),
        output_tokens=int(requests.output_tokens[index]),
        priority=int(requests.priority[index]),
        arrival_s=sent_s,
        deadline_s=sent_s + float(requests.deadline_s[index]),
        order=order,
        chain=requests.chain(index),
    )


def work_of(step: Step) -> Work:
    """What the step computes; asked after ``schedule``, before ``update``."""
    prefill = decode = pairs = context = 0
    sampled = set(step.sampled)
    for seq, num_new in step.scheduled.items():
        before = seq.num_computed - num_new
        if num_new == 1 and before >= seq.prompt_tokens and seq in sampled:
            decode += 1
        else:
            prefill += num_new
        pairs += num_new * before + num_new * (num_new + 1) // 2
        context += seq.num_computed
    return Work(1, prefill, decode, len(sampled), pairs, context)


def _standstill(
    reason: StandstillReason, now_s: float, duration_s: float, scheduler: Scheduler
) -> TimeStandsStillError:
    free_blocks = scheduler.cache.num_free_blocks
    return standstill(reason, now_s, duration_s, len(scheduler.running), len(scheduler.waiting), free_blocks)
