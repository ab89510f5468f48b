# SPDX-License-Identifier: BSD-3-Clause
"""How deep callbacks are nested in the calling thread, whichever group they are of.

A callback that waits goes on reading replies, and so may run the next callback within itself. Python ends that at
1,000 frames, with an exception in the middle of anything; so it is ended here before, with one that says why. Nothing
here may need a frame of its own where it is to be undone: there may be none left. Any thread may call.
"""

from __future__ import annotations

import threading

from .._errors import StateError

__all__ = ["here", "is_deep", "require_shallow"]

# Each takes 12 frames of Python's 1,000, and those of what the user calls in it, for which the other half is left.
DEEPEST = 32


class _Here(threading.local):
    """What is known of the calling thread: in how many callbacks it is."""

    depth = 0


here = _Here()


def is_deep() -> bool:
    """Whether the calling thread is in more callbacks than may wait."""
    return here.depth > DEEPEST


def require_shallow(what: str) -> None:
    """Check that the calling thread may wait for ``what``.

    Raises:
        StateError: it is in too many callbacks.
    """
    if here.depth > DEEPEST:
        raise StateError(
            f"waiting for {what} in a callback that runs within {DEEPEST} others, which wait as well: wait outside of "
            "callbacks, or hand what has to follow to another thread",
            state="nested",
            attempted="wait",
        )
