# SPDX-License-Identifier: BSD-3-Clause
"""Deadlines on the monotonic clock, and the one place where a user's timeout becomes seconds.

A deadline is made once, at the public call, and passed down; nothing below makes a second one.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import TypeAlias

from ._errors import DeadlineExceeded

__all__ = ["LONGEST_S", "Deadline", "Timeout", "seconds"]

Timeout: TypeAlias = timedelta | float | int

# Sockets, poll and multiprocessing.connection.wait count milliseconds in 31 bits and raise OverflowError
# above 24.8 days. Whoever gives more (timedelta.max) means "for ever" and gets 23 days.
LONGEST_S = 2_000_000.0


def seconds(value: Timeout | None, default_s: float | None = None, *, name: str = "timeout") -> float:
    """Turn a user's ``value`` into seconds.

    Args:
        value: a timedelta or a number of seconds; 0 means "try once"; None means ``default_s``; more than
            ``LONGEST_S`` is cut to that.
        default_s: what None stands for; None here makes None an error.
        name: the parameter's name, for the message.

    Raises:
        ValueError: the value is negative or not finite, or None without a default.
        TypeError: it is neither a timedelta nor a number.
    """
    if value is None:
        if default_s is None:
            raise ValueError(f"{name} is None: give a timedelta or seconds, since no call waits without a limit")
        return default_s
    if isinstance(value, timedelta):
        return seconds(value.total_seconds(), name=name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give a timedelta or a number of seconds")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {number!r}: give a finite number of seconds, 0 or more (0 means: try once)")
    return min(number, LONGEST_S)


class Deadline:
    """A moment on the monotonic clock. Immutable, so any thread may ask it."""

    __slots__ = ("_start_s", "limit_s")

    def __init__(self, limit_s: float) -> None:
        """Start now, end ``limit_s`` seconds from now."""
        self.limit_s = limit_s
        self._start_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start_s

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.limit_s - self.elapsed_s())

    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining_s() <= 0.0

    def exceeded(self, what: str, hint: str = "") -> DeadlineExceeded:
        """The error to raise when ``what`` was not finished in time."""
        return DeadlineExceeded(what, limit_s=self.limit_s, elapsed_s=self.elapsed_s(), hint=hint)
