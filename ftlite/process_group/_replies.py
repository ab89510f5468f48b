# SPDX-License-Identifier: BSD-3-Clause
"""Who reads the child's replies: one thread, which also runs the callbacks of the ops that they end.

So a callback that waits for another op must not sit and wait for itself: there, the wait goes on reading. For whoever
waits to read by itself, without a thread between, was tried and is no faster where the child has to have the cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from .._deadline import Deadline

__all__ = ["Awaited", "Replies"]

# How often the reader looks round when nothing comes; an op with a nearer limit may be issued meanwhile.
_TICK_S = 1.0


class Awaited(Protocol):
    """An op that somebody waits for."""

    def is_over(self) -> bool:
        """Whether it has ended."""

    def wait_for_reader(self, limit_s: float) -> bool:
        """Wait until the reader has ended it, at most ``limit_s`` seconds; whether it has."""


class Replies:
    """The reader of one pipe.

    Args:
        receive: waits for one message, at most so many seconds, and does what it asks for; False once all is over.
    """

    def __init__(self, receive: Callable[[float], bool]) -> None:
        self._receive = receive
        self._reader = 0

    def read(self) -> None:
        """The reader thread's loop; returns when all is over."""
        self._reader = threading.get_ident()
        try:
            while self._receive(_TICK_S):
                pass
        finally:
            self._reader = 0  # the number may be another thread's by now

    def is_mine(self) -> bool:
        """Whether the calling thread is the reader: it is in a callback."""
        return self._reader == threading.get_ident()

    def wait(self, op: Awaited, limit_s: float) -> bool:
        """Wait until ``op`` is over; whether it is, within ``limit_s`` seconds."""
        if not self.is_mine():
            return op.wait_for_reader(limit_s)
        deadline = Deadline(limit_s)
        while not op.is_over():
            remaining_s = deadline.remaining_s()
            if remaining_s <= 0.0:
                return False
            if not self._receive(min(remaining_s, _TICK_S)):
                return op.wait_for_reader(deadline.remaining_s())  # who has ended it all is about to say so
        return True

    def end(self) -> None:
        """All is over: forget ``receive``, and whom it belongs to."""
        self._receive = _nothing


def _nothing(wait_s: float) -> bool:
    """What is received when all is over."""
    return False
