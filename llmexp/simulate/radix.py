"""SGLang's prefix cache: a tree of token runs (Zheng et al. 2024; ``sglang.srt.mem_cache.radix_cache``).

Against vLLM's hashed blocks: equal prefixes are held once; a prompt can be hit when it has been computed,
generated tokens when their request is finished; and eviction takes leaves of the tree, the least recently used
first. The unit here is a block of tokens (SGLang's page); blocks of one token are its default.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from llmexp.simulate.sequence import Sequence


@dataclass(eq=False, slots=True)
class Node:
    """A run of blocks by chain id. ``users`` counts sequences in the batch that hold it or a descendant."""

    run: list[int]
    parent: "Node | None"
    children: dict[int, "Node"] = field(default_factory=dict)
    users: int = 0
    last_used: int = 0
    number: int = 0  # in order of creation


@dataclass(slots=True)
class Held:
    """What a sequence in the batch holds: the tree down to ``node``, and blocks outside of it."""

    node: Node
    in_tree: int
    private: int


class RadixCache:
    """A ``Cache`` of ``num_gpu_blocks - 1`` blocks (as many as vLLM's pool).

    ``trims``: eviction cuts only what is needed off the end of a leaf, where SGLang evicts the whole leaf.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, *, trims: bool = False) -> None:
        self.block_size = block_size
        self.trims = trims
        self.unused = num_gpu_blocks - 1
        self.evictable = 0
        self._root = Node([], None, users=1)
        self._held: dict[Sequence, Held] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # stale entries are told by last_used
        self._clock = self._num_nodes = 0

    @property
    def num_free_blocks(self) -> int:
        return self.unused + self.evictable

    def match(self, seq: Sequence) -> list[int]:
        """As ``Cache.match``. Like SGLang's, a lookup alone makes the prefix recently used."""
        most = (seq.num_tokens - 1) // self.block_size
        _, _, length = self._walk(seq.chain, most)
        return seq.chain[:length]

    def admit(self, seq: Sequence, hits: list[int], num_new: int, *, whole: bool, headroom: int) -> bool:
        num_tokens = seq.num_tokens if whole else len(hits) * self.block_size + num_new
        path, within, length = self._walk(seq.chain, len(hits))
        idle = sum(len(node.run) for node in path if not node.users)
        if path and not path[-1].users:
            idle -= len(path[-1].run) - within
        if self._blocks_for(num_tokens) > self.num_free_blocks - idle - headroom + length:
            return False
        node = self._root
        if path:
            node = path[-1] if within == len(path[-1].run) else self._split(path[-1], within)
        self._lock(node)
        self._held[seq] = Held(node, length, 0)
        self._take(self._held[seq], self._blocks_for(length * self.block_size + num_new) - length)
        return True

    def extend(self, seq: Sequence, num_new: int) -> bool:
        held = self._held[seq]
        need = self._blocks_for(seq.num_computed + num_new) - held.in_tree - held.private
        if need > self.num_free_blocks:
            return False
        if need > 0:
            self._take(held, need)
        return True

    def computed(self, seq: Sequence) -> None:
        """Prompts enter the tree, chunk by chunk; answers when they are finished."""
        if seq.num_tokens == seq.prompt_tokens:
            self._insert(seq)

    def release(self, seq: Sequence) -> None:
        if seq.is_finished:
            self._insert(seq)
        held = self._held.pop(seq)
        self.unused += held.private
        self._unlock(held.node)

    def _insert(self, seq: Sequence) -> None:
        """Move the sequence's full blocks into the tree. Those that are there already are held twice no more."""
        held = self._held[seq]
        full = seq.num_computed // self.block_size
        if full == held.in_tree:
            return
        path, within, length = self._walk(seq.chain, full)
        node = path[-1] if path else self._root
        if path and within < len(node.run):
            node = self._split(node, within)
        if length < full:
            leaf = self._node(seq.chain[length:full], node, self._clock)
            node.children[seq.chain[length]] = leaf
            self.evictable += full - length
            node = leaf
        self._lock(node)
        self._unlock(held.node)
        self.unused += length - held.in_tree
        self._held[seq] = Held(node, full, held.private - (full - held.in_tree))

    def _walk(self, chain: list[int], most: int) -> tuple[list[Node], int, int]:
        """The nodes along the first ``most`` blocks of the chain, how much of the last of them is matched, and
        how many blocks in all."""
        self._clock += 1
        path: list[Node] = []
        node, within, length = self._root, 0, 0
        while length < most and within == len(node.run):
            child = node.children.get(chain[length])
            if child is None:
                break
            node = child
            within = _common(node.run, chain, length, most)
            length += within
            path.append(node)
        for used in path:
            self._use(used)
        return path, within, length

    def _use(self, node: Node) -> None:
        node.last_used = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Let an idle leaf be evicted, in its turn."""
        if not node.users and not node.children:
            heappush(self._leaves, (node.last_used, node.number, node))

    def _node(self, run: list[int], parent: Node, last_used: int) -> Node:
        self._num_nodes += 1
        return Node(run, parent, last_used=last_used, number=self._num_nodes)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper one."""
        assert node.parent is not None
        upper = self._node(node.run[:at], node.parent, node.last_used)
        upper.children[node.run[at]] = node
        upper.users = node.users
        node.parent.children[node.run[0]] = upper
        node.run, node.parent = node.run[at:], upper
        return upper

    def _lock(self, node: Node | None) -> None:
        while node is not None:
            if not node.users:
                self.evictable -= len(node.run)
            node.users += 1
            node = node.parent

    def _unlock(self, node: Node | None) -> None:
        while node is not None:
            node.users -= 1
            if not node.users:
                self.evictable += len(node.run)
                self._offer(node)
            node = node.parent

    def _take(self, held: Held, count: int) -> None:
        count = max(count, 0)
        while self.unused < count:
            self._evict(count - self.unused)
        self.unused -= count
        held.private += count

    def _evict(self, count: int) -> None:
        """Drop the least recently used leaf, or its last ``count`` blocks."""
        last_used, _, leaf = heappop(self._leaves)
        if leaf.last_used != last_used or leaf.users or leaf.children or leaf.parent is None:
            return  # used again since, or gone
        dropped = min(count, len(leaf.run)) if self.trims else len(leaf.run)
        self.unused += dropped
        self.evictable -= dropped
        if dropped < len(leaf.run):
            del leaf.run[-dropped:]
            self._offer(leaf)
        else:
            parent, leaf.parent = leaf.parent, None
            del parent.children[leaf.run[0]]
            self._offer(parent)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _common(run: list[int], chain: list[int], start: int, stop: int) -> int:
    """Length of the common prefix of ``run`` and ``chain[start:stop]``, which share their first id. Equal ids
    mean equal prefixes, so bisection finds it."""
    low, high = 1, min(len(run), stop - start)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
