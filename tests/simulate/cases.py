"""Random workloads and engines, small and hard: shared prefixes, several turns, tight pools and budgets.

Some never come to an end, in vLLM as here: under priority, requests that came at the same time and do not fit side by
side may preempt each other for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import reject
from hypothesis import strategies as st

from llmexp.simulate import Request, Settings
from llmexp.simulate.errors import TimeStandsStillError


@dataclass(frozen=True)
class Case:
    settings: Settings
    requests: list[Request]
    max_concurrency: int | None


@contextmanager
def of_those_that_end() -> Iterator[None]:
    """Passes over a case that never ends."""
    try:
        yield
    except TimeStandsStillError:
        reject()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([16, 32, 128]))
    crowded = draw(st.booleans())  # many at once in a pool hardly larger than one needs: preemptions
    requests = draw(workloads(block_size, crowded))
    lengths = [len(r.prompt_token_ids) + r.output_tokens - 1 for r in requests]
    largest = -(-max(lengths) // block_size)
    total = sum(-(-length // block_size) for length in lengths)
    max_num_seqs = draw(st.integers(4, 12) if crowded else st.integers(1, 8))
    chunked = draw(st.booleans())
    least_budget = max_num_seqs if chunked else max(max_num_seqs, *lengths)
    return Case(
        Settings(
            # from a pool that the longest request fills up to one that holds everything
            num_gpu_blocks=1 + largest + draw(st.integers(0, 4) if crowded else st.integers(0, total)),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=least_budget + draw(st.integers(0, 16 * block_size)),
            enable_prefix_caching=draw(st.integers(0, 4)) > 0,
            enable_chunked_prefill=chunked,
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 7, block_size, 3 * block_size])),
            long_prefill_token_threshold_adaptive=draw(st.booleans()),
            scheduler_reserve_full_isl=draw(st.integers(0, 3)) > 0,
            watermark=draw(st.sampled_from([0.0, 0.0, 0.05, 0.3])),
        ),
        requests,
        draw(st.sampled_from([None, None, 1, 3])),
    )


@st.composite
def workloads(draw: st.DrawFn, block_size: int, crowded: bool) -> list[Request]:
    """Up to 16 requests. Token ids tell their prompt apart where prompts are not meant to share."""
    lengths = st.integers(1, 4 * block_size) | st.integers(1, 4).map(lambda k: k * block_size)
    documents = [[100 + d] * draw(lengths) for d in range(draw(st.integers(1, 3)))]
    requests: list[Request] = []
    for i in range(draw(st.integers(4, 16) if crowded else st.integers(1, 12))):
        kind = draw(st.sampled_from(["fresh", "document", "document", "turn", "repeat"]))
        earlier = draw(st.sampled_from(requests)) if requests else None
        tail = [1000 + i] * draw(st.integers(0, 2 * block_size))
        if kind == "document" or (earlier is None and kind != "fresh"):
            prompt = draw(st.sampled_from(documents)) + tail
        elif kind == "turn" and earlier and earlier.output_token_ids:
            prompt = [*earlier.prompt_token_ids, *earlier.output_token_ids, *tail]
        elif kind == "repeat" and earlier:
            prompt = list(earlier.prompt_token_ids)
        else:
            prompt = [1000 + i] * draw(lengths)
        prompt = prompt[: 8 * block_size]
        output_tokens = draw(st.integers(block_size, 4 * block_size) if crowded else st.integers(1, 2 * block_size))
        requests.append(
            Request(
                prompt_token_ids=prompt,
                output_tokens=output_tokens,
                output_token_ids=[draw(st.sampled_from([5000, 6000 + i]))] * output_tokens,
                arrival_s=float(draw(st.sampled_from([0, 0, 0, 1, 5] if crowded else [0, 1, 5, 40, 100]))),
                priority=draw(st.integers(0, 2)),
                after=draw(st.integers(0, i - 1)) if i and draw(st.integers(0, 3)) == 0 else None,
                cache_salt=draw(st.sampled_from([None, None, None, "salt"])),
            )
        )
    return requests
