# SPDX-License-Identifier: BSD-3-Clause
"""Who reads the child's replies: a thread of ours, or whoever waits for one.

Each hand-over from one thread to another costs more than the reply itself (a wake-up and the GIL, 50-100 us). So a
thread that waits for its op reads the pipe itself when nobody else does, and handles whatever comes, other ops' replies
included. The reader thread stands back for as long as that goes on and nobody else is to be told anything: no future,
no callback, no second waiter.

One thread at a time has the turn, and only it receives. A callback that waits for another op, in the thread that has
the turn, goes on reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from .._deadline import Deadline

__all__ = ["Awaited", "Replies"]

# So long after the last wait the reader takes over again. A training loop waits for its next op before that; and as
# long is a reply left lying that nobody waits for.
_STAND_BACK_S = 0.01
# How often the reader looks round when nothing comes.
_TICK_S = 1.0


class Awaited(Protocol):
    """An op that somebody waits for."""

    def is_over(self) -> bool:
        """Whether it has ended."""

    def wait_for_others(self, limit_s: float) -> bool:
        """Wait until it has ended by another thread's doing, at most ``limit_s`` seconds; whether it has."""


class Replies:
    """The turns at one pipe.

    Args:
        receive: waits for one message, at most so many seconds, and does what it asks for; False once all is over.
    """

    def __init__(self, receive: Callable[[float], bool]) -> None:
        self._receive = receive
        self._turn = threading.RLock()  # which knows its owner; nobody takes it twice
        self._owner = 0
        self._wake = threading.Event()
        self._waited_s = float("-inf")
        self._others = 0

    def read(self) -> None:
        """The reader thread's loop; returns when all is over."""
        going_on = True
        while going_on:
            if not self._others and time.monotonic() - self._waited_s < _STAND_BACK_S:
                self._wake.wait(_STAND_BACK_S)
                self._wake.clear()
                continue
            with self._turn:
                self._owner = threading.get_ident()
                try:
                    going_on = self._receive(_TICK_S)
                finally:
                    self._owner = 0

    def wait(self, op: Awaited, limit_s: float) -> bool:
        """Wait until ``op`` is over; whether it is, within ``limit_s`` seconds."""
        self._waited_s = time.monotonic()
        me = threading.get_ident()
        if self._owner == me:
            return self._read_until(op, limit_s)
        has_turn = False
        try:
            has_turn = self._turn.acquire(blocking=False)
            if not has_turn:
                return op.wait_for_others(limit_s)
            self._owner = me
            return self._read_until(op, limit_s)
        except BaseException:
            # Ctrl-C may come in the moment between the two: nobody could ever read again
            has_turn = has_turn or self._turn._is_owned()  # type: ignore[attr-defined]
            raise
        finally:
            if has_turn:
                self._owner = 0
                self._turn.release()
                self._waited_s = time.monotonic()
                if self._others:
                    self._wake.set()

    def is_mine(self) -> bool:
        """Whether the calling thread has the turn: it is in a callback."""
        return self._owner == threading.get_ident()

    def end(self) -> None:
        """All is over: forget ``receive``, and whom it belongs to."""
        self._receive = _nothing

    def tell(self, others: int) -> None:
        """``others`` ops are to be told of by the reader: a future was asked for, or a second thread waits."""
        self._others = others
        if others:
            self._wake.set()

    def _read_until(self, op: Awaited, limit_s: float) -> bool:
        deadline = Deadline(limit_s)
        while not op.is_over():
            remaining_s = deadline.remaining_s()
            if remaining_s <= 0.0:
                return False
            # no longer than a tick: another thread may issue an op with a nearer limit meanwhile
            if not self._receive(min(remaining_s, _TICK_S)):
                return op.wait_for_others(deadline.remaining_s())  # who has ended it all is about to say so
        return True


def _nothing(wait_s: float) -> bool:
    """What is received when all is over."""
    return False
