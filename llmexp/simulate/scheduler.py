"""vLLM V1's scheduler (``vllm.v1.core.sched.scheduler``): one token budget for prefill and decode."""

from dataclasses import dataclass, field

from llmexp.simulate.blocks import BlockCache
from llmexp.simulate.cache import Cache
from llmexp.simulate.policies import POLICIES, WaitingQueue
from llmexp.simulate.radix import RadixCache
from llmexp.simulate.sequence import Sequence
from llmexp.simulate.settings import Settings

NO_CAP = 2**62


@dataclass(slots=True)
class Step:
    """What one call of ``schedule`` decided. ``scheduled`` maps sequences to new tokens, in batch order; ``sampled``
    are those of them that get a token by it, and ``finished`` those for which it is the last.

    Prefix cache statistics are tokens, counted at admission as vLLM's ``PrefixCacheStats`` does: those of
    re-admissions after a preemption apart.
    """

    scheduled: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    queries: int = 0
    hits: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    sampled: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    ahead: bool = False  # its tokens are counted already


class Scheduler:
    """Decides, step by step, which sequences compute how many tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache = make_cache(settings)
        self.policy = POLICIES[settings.policy]
        self.waiting = WaitingQueue(self.policy, self.cache)
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def schedule(self) -> Step:
        """The next step: running sequences first, then new ones from the queue, if nothing was preempted."""
        step = Step()
        cap = self._long_prefill_cap()
        budget = self._continue_running(step, self.settings.max_num_batched_tokens, cap)
        if not step.preempted and (self.settings.batching == "continuous" or not self.running):
            self._admit_waiting(step, budget, cap)
        for seq, num_new in step.scheduled.items():
            seq.num_computed += num_new
            if seq.num_computed == seq.num_tokens:
                step.sampled.append(seq)
        return step

    def run_ahead(self, step: Step) -> None:
        """Count the step's tokens while it is under way, so that the next can be scheduled. Call before it."""
        self._count_tokens(step)
        for seq in step.sampled:
            seq.num_ahead += 1
        step.ahead = True

    def update(self, step: Step) -> tuple[list[Sequence], list[Sequence]]:
        """The step is computed: sequences without tokens left to compute get a new one. Returns the sequences
        that got one, and those of them that are finished."""
        if step.ahead:
            for seq in step.sampled:
                seq.num_ahead -= 1
        for seq in step.scheduled:
            self.cache.computed(seq)
        if not step.ahead:
            self._count_tokens(step)
        for seq in step.finished:
            if seq in self.running:
                self.cache.release(seq)
                self.running.remove(seq)
            else:
                self.waiting.remove(seq)  # preempted while its last token was computed
        return step.sampled, step.finished

    def _continue_running(self, step: Step, budget: int, cap: int) -> int:
        """Schedule the running sequences in order of admission; returns what is left of the budget."""
        i = 0
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            if seq.is_finished:  # its last token is being computed
                i += 1
                continue
            num_new = min(seq.num_tokens - seq.num_computed, cap, budget)
            while not self.cache.extend(seq, num_new):
                position = self._victim()
                victim = self.running.pop(position)
                i -= position < i
                budget += step.scheduled.pop(victim, 0)
                self._preempt(victim, step)
                if victim is seq:
                    return budget  # nobody behind gets a turn
            step.scheduled[seq] = num_new
            budget -= num_new
            i += 1
        return budget

    def _admit_waiting(self, step: Step, budget: int, cap: int) -> None:
        """Admit from the queue until the first that does not fit: it blocks those behind it."""
        settings, block_size = self.settings, self.settings.block_size
        if budget > 0 and len(self.running) < settings.max_num_seqs:
            self.waiting.reorder()
        passed = []
        while budget > 0 and self.waiting and len(self.running) < settings.max_num_seqs:
            seq = self.waiting.peek()
            hits = self.cache.match(seq)
            num_new = min(seq.num_tokens - len(hits) * block_size, cap)
            if num_new > budget and not settings.enable_chunked_prefill:
                break
            num_new = min(num_new, budget)
            headroom = settings.watermark_blocks if self.running else 0
            num_hit_tokens = len(hits) * block_size
            whole = settings.scheduler_reserve_full_isl
            if not self.cache.admit(seq, hits, num_new, whole=whole, headroom=headroom):
                if not self.policy.skips:
                    break
                passed.append(self.waiting.pop())
                continue
            self.running.append(self.waiting.pop())
            seq.num_computed = num_hit_tokens
            step.admitted.append(seq)
            step.scheduled[seq] = num_new
            budget -= num_new
            self._count(step, seq, num_hit_tokens)
        for seq in passed:
            self.waiting.push(seq)

    def _count_tokens(self, step: Step) -> None:
        for seq in step.sampled:
            seq.num_tokens += 1
        step.finished = [seq for seq in step.sampled if seq.is_finished]

    def _long_prefill_cap(self) -> int:
        """Most tokens of one sequence in a step; no cap for the only sequence there is."""
        threshold = self.settings.long_prefill_token_threshold
        num_seqs = len(self.running) + len(self.waiting)
        if threshold == 0 or num_seqs <= 1:
            return NO_CAP
        if self.settings.long_prefill_token_threshold_adaptive:
            return max(threshold, self.settings.max_num_batched_tokens // num_seqs)
        return threshold

    def _victim(self) -> int:
        """Position in the batch of the sequence to preempt: the last, or that of least priority."""
        if self.settings.policy != "priority":
            return len(self.running) - 1
        return max(range(len(self.running)), key=lambda i: (self.running[i].priority, self.running[i].arrival_s))

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Give up the blocks and start over later. Generated tokens stay, and cached blocks may survive."""
        self.cache.release(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        self.waiting.push(seq)
        step.preempted.append(seq)

    def _count(self, step: Step, seq: Sequence, num_hit_tokens: int) -> None:
        if not self.settings.enable_prefix_caching:
            return
        if seq.num_preemptions:
            step.preempted_queries += seq.num_tokens
            step.preempted_hits += num_hit_tokens
        else:
            step.queries += seq.num_tokens
            step.hits += num_hit_tokens


def make_cache(settings: Settings) -> Cache:
    if settings.prefix_cache == "blocks":
        return BlockCache(settings.num_gpu_blocks, settings.block_size, settings.enable_prefix_caching)
    trims = settings.prefix_cache == "radix_trimmed"
    return RadixCache(settings.num_gpu_blocks, settings.block_size, trims=trims)
