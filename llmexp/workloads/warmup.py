"""Neutral prompts to send before the first round."""

import numpy as np

from llmexp.models import Model
from llmexp.workloads.audit import require_disjoint
from llmexp.workloads.draws import Vocabulary, integers
from llmexp.workloads.workload import Workload, packed

PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 8


def warm_up(workload: Workload, model: Model, concurrency: int, block_size: int, seed: int) -> Workload:
    """As many requests as the rounds have in flight, of the workload's own lengths, sharing no block with it.

    Together they prefill at most about `PROMPT_TOKENS`, a trade: a CPU at 200 tokens/s is done in 10 s, and
    vLLM's default step budget on small machines is filled once. The longest prompt takes up to half of it;
    the others, spread over the workload's lengths, are cut to share the rest. They generate 1 to
    `OUTPUT_TOKENS`, so that decode runs at full concurrency and below. Not warmed: a prefill longer than half
    the budget, and decode at a long context.

    Raises WorkloadError if a block is shared after all.
    """
    count = min(concurrency, len(workload))
    spread = np.sort(workload.prompt_tokens)[::-1][np.linspace(0, len(workload) - 1, count).astype(int)]
    first = min(int(spread[0]), PROMPT_TOKENS // 2)
    rest = max((PROMPT_TOKENS - first) // max(count - 1, 1), 1)
    lengths = np.minimum(spread, rest)
    lengths[0] = first
    most = min(OUTPUT_TOKENS, int(workload.output_tokens.max()))
    vocabulary = Vocabulary(model, seed)
    plain = np.concatenate([vocabulary.marks, vocabulary.body])
    unused = np.setdiff1d(plain, [prompt[0] for prompt in workload.prompts()])
    prompts = []
    for i, length in enumerate(lengths):
        tokens = plain[integers(int(length), len(plain), seed, "warm-up", i)]
        if len(unused):  # else the block of random tokens has to differ by itself; checked below
            tokens[0] = unused[i % len(unused)]
        prompts.append(tokens)
    prompt_at, prompt_tokens = packed(prompts)
    warm = Workload(
        name="warm_up",
        recipe={"kind": "warm_up", "for": workload.sha256, "requests": count, "seed": seed},
        prompt_at=prompt_at,
        prompt_tokens=prompt_tokens,
        output_tokens=(1 + np.arange(count)[::-1] % most).astype(np.int32),
    )
    require_disjoint(warm, workload, block_size)
    return warm
