# SPDX-License-Identifier: BSD-3-Clause
"""When the ops in flight are due.

Pure: no clock, no lock. An op that settles is not looked for here, which would cost more than all the rest: it is
left out when it comes up, or when most of what is kept has settled. So memory goes with the ops in flight, and not
with all that were issued within one timeout. The caller's lock is held around every call but ``next_s``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Sized
from typing import Protocol

__all__ = ["Limits"]

# So many settled ones are kept at least, at 100 bytes each: to sort the rest anew pays off for more than a few.
_SETTLED = 256


class _Pending(Sized, Container[int], Protocol):
    """The ids of the ops in flight."""


class Limits:
    """The moments at which ops have to have settled.

    Args:
        pending: the ids of the ops that have not; kept up to date by the caller.
    """

    def __init__(self, pending: _Pending) -> None:
        self._pending = pending
        self._heap: list[tuple[float, int]] = []

    def add(self, at_s: float, op_id: int) -> None:
        """``op_id``, which is pending, is due at ``at_s``."""
        heapq.heappush(self._heap, (at_s, op_id))
        if len(self._heap) > _SETTLED + 2 * len(self._pending):
            left = [each for each in self._heap if each[1] in self._pending]
            heapq.heapify(left)
            self._heap = left

    def next_s(self) -> float:
        """When there is something to look at; for the one thread that calls ``pop_due``, without the lock."""
        heap = self._heap
        return heap[0][0] if heap else math.inf

    def pop_due(self, now_s: float) -> int | None:
        """The next op that is pending and due at ``now_s``, which is forgotten here; None without one."""
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            _, op_id = heapq.heappop(heap)
            if op_id in self._pending:
                return op_id
        return None
