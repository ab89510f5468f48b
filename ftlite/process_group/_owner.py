# SPDX-License-Identifier: BSD-3-Clause
"""Which process something belongs to. In a fork of it a child is out of reach: its pipe is the trainer's, and locks
may have been copied in a state that nobody will end. So this is asked before anything else.
"""

from __future__ import annotations

import os

from .._errors import StateError

__all__ = ["Owner"]


class Owner:
    """The process that made this."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self.pid

    def require(self, attempted: str) -> None:
        """Go on only where ``is_here``.

        Raises:
            StateError: in a fork.
        """
        if not self.is_here():
            raise StateError(
                f"{attempted}: process {os.getpid()} is a fork of {self.pid}, whose child it cannot use: "
                "make a group of its own",
                state="forked",
                attempted=attempted,
            )
