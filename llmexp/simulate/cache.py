"""What the scheduler needs of a KV cache; ``BlockCache`` and ``RadixCache`` provide it."""

from typing import Protocol

from llmexp.simulate.sequence import Sequence


class Cache(Protocol):
    """KV memory in blocks of ``block_size`` tokens, with the prefixes that it still holds."""

    block_size: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had, whether they still cache something or not."""

    def match(self, seq: Sequence) -> list[int]:
        """One entry for each cached block of the sequence's longest cached prefix, of at most
        ``num_tokens - 1`` tokens: the last token must be computed, for its logits."""

    def admit(self, seq: Sequence, hits: list[int], num_new: int, *, whole: bool, headroom: int) -> bool:
        """Blocks for a sequence that enters the batch: its ``hits``, and new ones for ``num_new`` tokens.

        Refused (False, and nothing changed) unless ``headroom`` blocks stay free. With ``whole``, all tokens of
        the sequence must have room, though only those of this step get it.
        """

    def extend(self, seq: Sequence, num_new: int) -> bool:
        """Blocks for ``num_new`` tokens more of a running sequence, or False."""

    def computed(self, seq: Sequence) -> None:
        """The step is over: the KV of the first ``num_computed`` tokens is there."""

    def release(self, seq: Sequence) -> None:
        """The sequence is finished or preempted."""
