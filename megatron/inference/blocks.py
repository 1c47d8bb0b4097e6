"""Which block of the cache holds what: arithmetic, no tensors.

The cache is cut into blocks of a few tokens. A text has a list of blocks, its table; texts that begin alike share the full
blocks of their beginning. A block that no text uses any more keeps what it knows until it is wanted for something new.

    table of a: 5 2 7      table of b: 5 2 9      free: 1 3 4 6      kept: 8, the third block of a text that has left

A text whose blocks stand side by side is read where it lies; one that is scattered must be gathered. So each is promised a run
of neighbours, long enough for all that it may become; others stay out of it as long as they find something else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_NOWHERE = 0  # tokens that only fill a shape are stored in block 0, which belongs to no text


class Blocks:
    """The blocks of one cache. count: of all, with block 0; size: tokens in one."""

    def __init__(self, count: int, size: int, *, sharing: bool = True) -> None:
        self.count, self.size, self.sharing = count, size, sharing
        self._free = dict.fromkeys(range(_NOWHERE + 1, count))  # in the order in which they are to be taken
        # What a run may be made of, by block: nothing that is used, and nothing that is promised.
        self._unused, self._promised, self._last = np.arange(count) > _NOWHERE, np.zeros(count, bool), _NOWHERE
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # without users, the longest unused first
        self._by_content: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Blocks that texts can have."""
        return self.count - 1

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Blocks that nobody uses and that still know something."""
        return len(self._kept)

    def needed(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self.size)

    def promise(self, count: int, behind: Sequence[int] = ()) -> range:
        """So many neighbours that nobody uses and nobody is promised; of those behind a text's blocks as many as there are.
        Free ones first, then such as know something, round and round. Empty if there is no such run.
        """
        open_ = self._unused & ~self._promised
        if behind:
            first = behind[-1] + 1
            closed = np.flatnonzero(~open_[first:first + count])
            run = range(first, min(first + (int(closed[0]) if len(closed) else count), self.count))
        else:
            blank = open_.copy()
            blank[list(self._kept)] = False
            run = _run(blank, count, self._last) or _run(open_, count, self._last)
            self._last = run.stop or self._last
        self._promised[run.start:run.stop] = True
        return run

    def take(self, wish: int = _NOWHERE) -> int:
        """A block for something new; there must be one available. wish: which, if nobody uses it."""
        if not self._unused[wish]:
            unpromised = (block for block in self._free if not self._promised[block])
            wish = next(unpromised, _NOWHERE) or next(iter(self._free), _NOWHERE) or next(iter(self._kept))
        if wish in self._kept:
            del self._kept[wish]
            self._forget(wish)
        else:
            del self._free[wish]
        self._users[wish], self._unused[wish] = 1, False
        return wish

    def give_back(self, blocks: Sequence[int], promised: range = range(0)) -> None:
        """A text lets its blocks go, and what it was promised. The last are forgotten first, since a beginning is worth more
        than what follows it.
        """
        self._promised[promised.start:promised.stop] = False
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            self._unused[block] = True
            (self._kept if block in self._content else self._free)[block] = None

    def beginning(self, ids: Sequence[int]) -> list[int]:
        """Blocks that hold the beginning of a text already, now shared with it. At least its last token is left to be read."""
        found: list[int] = []
        if not self.sharing:
            return found
        content = b""
        for start in range(0, len(ids) - self.size, self.size):
            content = _mark(content, ids[start:start + self.size])
            block = self._by_content.get(content)
            if block is None:
                break
            self._users[block], self._unused[block] = self._users.get(block, 0) + 1, False
            self._kept.pop(block, None)
            found.append(block)
        return found

    def publish(self, blocks: Sequence[int], ids: Sequence[int], *, known: int, content: bytes) -> bytes:
        """Let other texts find the full blocks of this one.

        ids: those whose keys and values are stored. known: blocks from the first that were published before, and content: what
        that returned. Returns the content of all published so far.
        """
        if not self.sharing:
            return content
        for place in range(known, len(ids) // self.size):
            content = _mark(content, ids[place * self.size:(place + 1) * self.size])
            if content not in self._by_content and blocks[place] not in self._content:
                self._by_content[content] = blocks[place]
                self._content[blocks[place]] = content
        return content

    def forget_all(self) -> None:
        """No text finds a beginning any more, as when the weights have changed."""
        self._free |= self._kept
        self._kept.clear()
        self._by_content.clear()
        self._content.clear()

    def _forget(self, block: int) -> None:
        del self._by_content[self._content.pop(block)]


def _run(open_: np.ndarray, count: int, start: int) -> range:
    """The first run of so many open places from `start` on, else the first of all, else none."""
    for skipped in (start, 0):
        edges = np.flatnonzero(np.diff(open_[skipped:], prepend=False, append=False)).reshape(-1, 2) + skipped
        long = edges[edges[:, 1] - edges[:, 0] >= count]
        if len(long):
            return range(int(long[0, 0]), int(long[0, 0]) + count)
    return range(0)


def _mark(before: bytes, ids: Sequence[int]) -> bytes:
    """What tells a block's content, and all that stands before it, from any other."""
    return hashlib.blake2b(before + np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
