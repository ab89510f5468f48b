# SPDX-License-Identifier: BSD-3-Clause
"""Looks at ops that a device works on, which tell nobody when they fail or never end.

``watch`` from any thread; the reports come from a thread of the overseer's own, at most one of them.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .._deadline import Deadline

__all__ = ["Overseer", "Watched"]

# How often finished ops are let go of, with their tensors; and how late an op may be noticed. An event query per
# op in flight costs a microsecond.
_SWEEP_S = 0.1


class Watched(Protocol):
    """torch's Work, or what stands for it."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""


class _Op(NamedTuple):
    deadline: Deadline
    what: str
    work: Watched


class Overseer:
    """Looks at the ops of one epoch and reports the first that is late.

    Args:
        late: called with the deadline and the op, in words; the last that is heard of this overseer.
        ended: called with every op that has ended, and its work, to see how.
        looked: called after every look.
    """

    def __init__(
        self,
        late: Callable[[Deadline, str], None],
        ended: Callable[[str, Any], None] | None = None,
        looked: Callable[[], None] | None = None,
    ) -> None:
        self._late = late
        self._ended = ended
        self._looked = looked
        self._ops: collections.deque[_Op] = collections.deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overseer", daemon=True)
        self._thread.start()

    def watch(self, limit_s: float, what: str, work: Watched) -> None:
        """See that ``work`` ends within ``limit_s`` seconds from now."""
        self._ops.append(_Op(Deadline(limit_s), what, work))

    def stop(self) -> None:
        """Report no more; from then on nothing is held."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def active(self) -> int:
        """How many ops have not ended, as of the last look."""
        return len(self._ops)

    def _run(self) -> None:
        while not self._stopped.wait(_SWEEP_S):
            left = []
            for _ in range(len(self._ops)):
                op = self._ops.popleft()
                if not op.work.is_completed():
                    left.append(op)
                elif self._ended is not None:
                    self._ended(op.what, op.work)
                del op  # and with it, memory of the trainer's
            self._ops.extendleft(reversed(left))
            if self._looked is not None:
                self._looked()
            for op in left:
                if op.deadline.expired():
                    self._late(op.deadline, op.what)
                    self._ops.clear()
                    return
        self._ops.clear()
