"""KV blocks: the pool with its free queue, and the prefix cache that lies in it (vLLM V1's ``BlockPool`` and
``KVCacheManager`` for one full-attention group).

A full block is known by its chain id, a number that stands for the block's tokens *and* all tokens before
them (``requests.py`` makes them). vLLM uses SHA-256 digests for the same purpose.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from llmexp.simulate.sequence import Sequence

NULL_BLOCK = 0  # vLLM keeps block 0 as a placeholder; it never holds tokens


class BlockPool:
    """Reference counts, the free queue, and the cached blocks by chain id.

    The free queue is also the eviction queue. Its front is handed out next; a block that still has a chain id
    can be hit, and leaves the queue, until that happens.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        self.ref_count = [0] * num_gpu_blocks
        self.chain_id: list[int | None] = [None] * num_gpu_blocks
        self.cached: dict[int, dict[int, None]] = {}  # equal blocks are not merged: oldest first

    def lookup(self, chain_id: int) -> int | None:
        """The oldest block with this content."""
        blocks = self.cached.get(chain_id)
        return next(iter(blocks)) if blocks else None

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks from the front of the free queue; what they cached is evicted."""
        blocks = list(islice(self.free, count))
        for block in blocks:
            del self.free[block]
            self.ref_count[block] = 1
            self._evict(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Share hit blocks: idle ones leave the free queue."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free[block]
            self.ref_count[block] += 1

    def register(self, block: int, chain_id: int) -> None:
        """Make a full block hittable."""
        self.chain_id[block] = chain_id
        self.cached.setdefault(chain_id, {})[block] = None

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each block of a sequence, tail first.

        Idle blocks with content join the end of the queue, so a tail is evicted before its head and the least
        recently used first. Idle blocks without go to the front: nothing can hit them.
        """
        blank = []
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                if self.chain_id[block] is None:
                    blank.append(block)
                else:
                    self.free[block] = None
        for block in reversed(blank):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def _evict(self, block: int) -> None:
        chain_id = self.chain_id[block]
        if chain_id is not None:
            blocks = self.cached[chain_id]
            del blocks[block]
            if not blocks:
                del self.cached[chain_id]
            self.chain_id[block] = None


class BlockCache:
    """A ``Cache`` of hashed blocks, as vLLM's ``KVCacheManager``."""

    def __init__(self, num_gpu_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_gpu_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return len(self.pool.free)

    def match(self, seq: Sequence) -> list[int]:
        """As ``Cache.match``; the entries are block numbers. Changes nothing."""
        hits: list[int] = []
        if self.enable_prefix_caching:
            for chain_id in seq.chain[: (seq.num_tokens - 1) // self.block_size]:
                block = self.pool.lookup(chain_id)
                if block is None:
                    break
                hits.append(block)
        return hits

    def admit(self, seq: Sequence, hits: list[int], num_new: int, *, whole: bool, headroom: int) -> bool:
        """As ``Cache.admit``. Idle hits count as taken, since they leave the free queue."""
        num_tokens = len(hits) * self.block_size + num_new
        idle = sum(self.pool.ref_count[block] == 0 for block in hits)
        room = self.num_free_blocks - idle - headroom + len(hits)
        if self._blocks_for(seq.num_tokens if whole else num_tokens) > room:
            return False
        self.pool.touch(hits)
        seq.blocks = hits
        seq.num_cached_blocks = len(hits)
        self._fill(seq, num_tokens)
        return True

    def extend(self, seq: Sequence, num_new: int) -> bool:
        num_tokens = seq.num_computed + num_new
        if self._blocks_for(num_tokens) - len(seq.blocks) > self.num_free_blocks:
            return False
        self._fill(seq, num_tokens)
        return True

    def computed(self, seq: Sequence) -> None:
        """Blocks are hittable from the step that schedules them; those of tokens that were not known then, from now
        on."""
        if seq.blocks:
            self._register(seq, seq.num_computed - seq.num_ahead)

    def release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_cached_blocks = 0

    def _fill(self, seq: Sequence, num_tokens: int) -> None:
        """Allocate, and register at once every block that these tokens will fill: a sequence admitted later
        in the same step already hits it."""
        seq.blocks += self.pool.allocate(max(0, self._blocks_for(num_tokens) - len(seq.blocks)))
        self._register(seq, num_tokens)

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        if self.enable_prefix_caching:
            full = min(num_tokens, seq.num_tokens - seq.num_ahead) // self.block_size
            for i in range(seq.num_cached_blocks, full):
                self.pool.register(seq.blocks[i], seq.chain[i])
            seq.num_cached_blocks = max(seq.num_cached_blocks, full)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
