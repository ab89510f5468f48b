# SPDX-License-Identifier: BSD-3-Clause
"""What is still to be fetched: a queue of ranges of the flat byte space. Pure; its owner holds the lock.

Every range is one chunk, and remembers how far it got and the sum of what it has, so that it goes on with
the next byte over whichever connection takes it next. A range is with one stream at a time or in the queue,
never both; ``done_bytes`` counts verified and unverified bytes that have arrived, once each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ._checksum import RowSum


class Range:
    """Chunk ``number``: flat bytes ``start`` to ``end``, of which those before ``at`` have arrived."""

    __slots__ = ("at", "end", "number", "start", "sums")

    def __init__(self, number: int, start: int, end: int) -> None:
        self.number = number
        self.start = start
        self.end = end
        self.at = start
        self.sums = RowSum()


class RangeQueue:
    """The ranges of one transfer."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._all = [Range(i, start, end) for i, (start, end) in enumerate(zip([0, *ends], ends))]
        self._waiting = deque(self._all)
        self._taken: set[int] = set()
        self.total = ends[-1] if ends else 0

    def take(self) -> Range | None:
        """The next range, or None when none waits (those that are taken may come back)."""
        if not self._waiting:
            return None
        found = self._waiting.popleft()
        self._taken.add(found.number)
        return found

    def give_back(self, taken: Range) -> None:
        """The stream that had it is gone; it goes first, since the rest of its bytes are the oldest missing."""
        self._taken.remove(taken.number)
        self._waiting.appendleft(taken)

    def finish(self, taken: Range) -> None:
        """It has arrived and was verified."""
        self._taken.remove(taken.number)

    @property
    def done_bytes(self) -> int:
        """How many bytes have arrived."""
        return sum(each.at - each.start for each in self._all)

    @property
    def finished(self) -> bool:
        """Whether every range is finished."""
        return not self._waiting and not self._taken
