# SPDX-License-Identifier: BSD-3-Clause
"""When replies are read one by one, and when a few at a time.

With some dozen ops in flight, each reply on its own costs a change of threads here and in the child, which is as much
as the op itself. So the reader leaves them a moment to become a few. What one waits for, while others in flight take
their time, is not held up: there has to be a burst. Pure.
"""

from __future__ import annotations

__all__ = ["REST_S", "Pace"]

# A small op takes 0.1 to 0.3 ms, so that some have ended by then; what nobody notices that long costs little where so
# many others are in flight.
REST_S = 0.001
# Fewer in flight are over before a rest is.
_MANY = 8
# One op after the other, each waited for, is one reply and one op to a look; a burst is more of either.
_FEW = 1


class Pace:
    """What the reader has seen since it last had nothing to read."""

    def __init__(self) -> None:
        self._replies = 0
        self._submitted = 0
        self._lasting = 0  # as many as were in flight at each of the last looks

    def heard(self) -> None:
        """A reply has come."""
        self._replies += 1

    def is_burst(self, submitted: int, in_flight: int) -> bool:
        """Whether to rest, now that there is nothing to read.

        Args:
            submitted: how many ops there were so far.
            in_flight: how many of them have not settled.
        """
        replies, self._replies = self._replies, 0
        issued, self._submitted = submitted - self._submitted, submitted
        # receives that were posted ahead are none of a burst: one more at each look counts as such
        self._lasting = min(in_flight, self._lasting + 1)
        return in_flight - self._lasting >= _MANY and (replies > _FEW or issued > _FEW)
