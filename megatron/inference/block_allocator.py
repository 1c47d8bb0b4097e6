"""Allocates the blocks of the paged KV cache, with prefix caching. Bookkeeping only, no tensors.

The cache is divided into blocks of a few tokens. A sequence has a list of blocks, its block table; sequences with a common prefix share
the full blocks of it. A block that no sequence uses any more keeps its content until it is allocated again.

    table of a: 5 2 7      table of b: 5 2 9      free: 1 3 4 6      cached: 8, the third block of a sequence that has ended

Keys of a sequence in contiguous blocks are read in place; scattered ones must be gathered. So each sequence reserves a contiguous
run, long enough for its final length; others use these blocks only if there are no others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_NOWHERE = 0  # padding tokens are stored in block 0, which belongs to no sequence


class BlockAllocator:
    """Allocates a paged KV cache of `count` blocks (0 included) of `size` tokens. sharing: prefix caching."""

    def __init__(self, count: int, size: int, *, sharing: bool = True) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self._free = dict.fromkeys(range(_NOWHERE + 1, count))  # in the order of allocation
        # Per block: neither used nor reserved, so that a run may contain it.
        self._unused, self._reserved, self._last = np.arange(count) > _NOWHERE, np.zeros(count, bool), _NOWHERE
        self._users: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # without users, least recently used first
        self._by_content: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Number of blocks that sequences can have."""
        return self.count - 1

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now, free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of unused blocks whose content is still cached."""
        return len(self._cached)

    def num_blocks_for_tokens(self, tokens: int) -> int:
        """Return the number of blocks for so many tokens."""
        return -(-tokens // self.size)

    def reserve_contiguous(self, count: int, behind: Sequence[int] = ()) -> range:
        """Reserve a contiguous run of `count` blocks that are neither used nor reserved. Free blocks first, then cached
        ones, next-fit; an empty range if there is no such run. behind: a sequence's blocks, directly behind which up to
        `count` blocks are reserved instead.
        """
        open_ = self._unused & ~self._reserved
        if behind:
            first = behind[-1] + 1
            closed = np.flatnonzero(~open_[first : first + count])
            run = range(first, min(first + (int(closed[0]) if len(closed) else count), self.count))
        else:
            blank = open_.copy()
            blank[list(self._cached)] = False
            run = _contiguous_free_run(blank, count, self._last) or _contiguous_free_run(open_, count, self._last)
            self._last = run.stop or self._last
        self._reserved[run.start : run.stop] = True
        return run

    def allocate_block(self, wish: int = _NOWHERE) -> int:
        """Allocate and return a block; one must be available. wish: preferred block, taken if it is unused."""
        if not self._unused[wish]:
            unreserved = (block for block in self._free if not self._reserved[block])
            wish = next(unreserved, _NOWHERE) or next(iter(self._free), _NOWHERE) or next(iter(self._cached))
        if wish in self._cached:
            del self._cached[wish]
            del self._by_content[self._content.pop(wish)]
        else:
            del self._free[wish]
        self._users[wish], self._unused[wish] = 1, False
        return wish

    def release(self, blocks: Sequence[int], reserved: range = range(0)) -> None:
        """Release a sequence's blocks and reservation; its first blocks, likelier to be shared, are evicted last."""
        self._reserved[reserved.start : reserved.stop] = False
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            self._unused[block] = True
            (self._cached if block in self._content else self._free)[block] = None

    def take_cached_prefix_blocks(self, ids: Sequence[int], content: bytes = b"") -> list[int]:
        """Return the blocks of the longest cached prefix of `ids`, now shared with the sequence. At least the last
        token is left to compute.
        content: hash of what precedes the first token (the adapter), as in the first call of `cache_full_blocks`.
        """
        blocks: list[int] = []
        if not self.sharing:
            return blocks
        for start in range(0, len(ids) - self.size, self.size):
            content = _prefix_hash(content, ids[start : start + self.size])
            block = self._by_content.get(content)
            if block is None:
                break
            self._users[block], self._unused[block] = self._users.get(block, 0) + 1, False
            self._cached.pop(block, None)
            blocks.append(block)
        return blocks

    def block_hashes(self, ids: Sequence[int], content: bytes = b"") -> list[bytes]:
        """Return the prefix hash at each full block's end. content: hash of what precedes the first token."""
        known = list[bytes]()
        for start in range(0, len(ids) - self.size + 1, self.size):
            content = _prefix_hash(content, ids[start : start + self.size])
            known.append(content)
        return known

    def cache_full_blocks(self, blocks: Sequence[int], ids: Sequence[int], *, known: int, content: bytes) -> bytes:
        """Make the full blocks of a sequence available as a cached prefix. ids: tokens whose keys and values are
        stored. known: number of blocks published before, and content: the hash that that call returned. Returns the
        hash of everything published so far.
        """
        if not self.sharing:
            return content
        for place in range(known, len(ids) // self.size):
            content = _prefix_hash(content, ids[place * self.size : (place + 1) * self.size])
            if content not in self._by_content and blocks[place] not in self._content:
                self._by_content[content] = blocks[place]
                self._content[blocks[place]] = content
        return content

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache, as when the weights have changed."""
        self._free |= self._cached
        self._cached.clear()
        self._by_content.clear()
        self._content.clear()


def _contiguous_free_run(open_: np.ndarray, count: int, start: int) -> range:
    """Return the first run of `count` open blocks (bool [blocks]) from `start` on, else from 0, else none."""
    for skipped in (start, 0):
        edges = np.flatnonzero(np.diff(open_[skipped:], prepend=False, append=False)).reshape(-1, 2) + skipped
        long = edges[edges[:, 1] - edges[:, 0] >= count]
        if len(long):
            return range(int(long[0, 0]), int(long[0, 0]) + count)
    return range(0)


def _prefix_hash(before: bytes, ids: Sequence[int]) -> bytes:
    """Return the hash of a block's ids and of everything before it."""
    return hashlib.blake2b(before + np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
