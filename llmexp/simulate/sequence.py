"""A request while the engine holds it."""

import math
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Sequence:
    """Progress of one request: tokens it has, tokens whose KV is computed, blocks it holds.

    ``chain`` has the chain id of every full block that the request will ever have; ``arrival_s`` is when it
    entered the engine and ``order`` how many had entered before.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    order: int
    priority: int = 0
    deadline_s: float = math.inf  # absolute
    chain: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    num_ahead: int = 0  # of its tokens, those that steps under way have yet to give
    num_computed: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # the first of ``blocks``, registered in the prefix cache

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.num_tokens == self.prompt_tokens + self.output_tokens
