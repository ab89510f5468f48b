# SPDX-License-Identifier: BSD-3-Clause
"""Whose turn it is to issue an op: one thread at a time, in the order in which the child hears of them.

It is held as long as an op's deadline at most. A callback may issue while its own thread has the turn, waiting for
memory. Any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .._deadline import Deadline

__all__ = ["Turns"]

# A callback that wants to issue looks so often whether it can; meanwhile it reads.
_LOOK_S = 0.005


class Turns:
    """The turn, which whoever has it gives back by ``release``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(
        self, what: str, deadline: Deadline, read_on: Callable[[float], object] | None, has_room: Callable[[], bool]
    ) -> None:
        """Take the turn.

        Args:
            what: the op, for the message.
            deadline: of the op.
            read_on: in a callback, what to do instead of waiting: whoever issues, and the child when it takes no
                more, may wait for replies to be read. None in other threads.
            has_room: whether the child takes more; asked in a callback.

        Raises:
            DeadlineExceeded: others had it until the end of ``deadline``.
        """
        if read_on is None:
            taken = self._lock.acquire(timeout=deadline.remaining_s())
        else:
            while not (taken := has_room() and self.acquire_now()):
                if deadline.expired():
                    break
                read_on(_LOOK_S)
        if not taken:
            raise deadline.exceeded(f"{what}: waiting for other threads to issue", "the child does not keep up")

    def acquire_now(self) -> bool:
        """Take the turn if nobody has it; whether it was taken."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
