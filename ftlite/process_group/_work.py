# SPDX-License-Identifier: BSD-3-Clause
"""What an op in a child returns: a Work that is told of its end by the session that issued it.

Any thread may use it; only the session ends it. From then on it holds the result and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._deadline import Deadline
from .._errors import StateError
from ._handle import OpWork
from ._loans import Lent
from ._nesting import require_shallow
from ._replies import Awaited

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["ChildWork"]


class ChildWork(OpWork):
    """An op in the child, and what it was lent."""

    kind = "cpu"  # where its tensors are

    def __init__(self, session: Session, what: str, deadline: Deadline, tensors: list[Any]) -> None:
        super().__init__(what, deadline.limit_s, tensors)
        self.name = what
        self.op_id = -1  # until it is sent
        self.source = -1
        self.ticket = -1
        self.lent: list[Lent] = []
        self.deadline = deadline
        self.has_ended = False  # its memory is free; callbacks may still run
        self._session: Session | None = session  # None once it is over

    def source_rank(self) -> int:
        """The rank that a receive got its tensor from.

        Raises:
            StateError: it has not come, or the op receives from no one rank.
        """
        if self.source < 0:
            raise StateError(
                f"{self._what} has no source rank: ask a recv or recv_anysource, after wait()",
                state="running" if not self.is_over() else "over",
                attempted="source_rank",
            )
        return self.source

    _source_rank = source_rank

    def until_over(self, limit_s: float) -> bool:
        """Wait until it has ended, for its memory; whether it has, within ``limit_s`` seconds.

        Its callbacks are not waited for: one may be waiting to issue an op, which this thread holds up.
        """
        session = self._session
        return session is None or self._wait_for(_Memory(self, session), session, limit_s)

    def wait_for_reader(self, limit_s: float) -> bool:
        """Wait until the reader has settled it; whether it has, within ``limit_s`` seconds."""
        return self._wait_over(limit_s)

    def references(self) -> list[tuple[Any, ...]]:
        """What the child is told of its tensors, in their order."""
        return [lent.reference() for lent in self.lent]

    def pair_number(self) -> int:
        """Which events on a device belong to it; -1 for none."""
        return -1

    def let_go(self) -> None:
        """It is over. Whoever keeps it keeps no session, and no memory for a result that there is not."""
        self._session = None
        if self._error is not None:
            self._tensors = []

    def _start(self) -> None:
        session = self._session
        if session is not None and not self.is_over():
            session.owner.require(self._what)

    def _await(self, limit_s: float, slack_s: float) -> None:
        deadline = Deadline(limit_s)
        session = self._session
        if session is not None and not self._wait_for(self, session, limit_s + slack_s):
            raise self._late(deadline)

    def _wait_for(self, end: Awaited, session: Session, limit_s: float) -> bool:
        if end.is_over():
            return True
        session.owner.require(self._what)
        require_shallow(self._what)
        session.pending.settle()  # in a callback: what this very thread was to settle next
        return end.is_over() or session.replies.wait(end, limit_s)


class _Memory:
    """The end of an op as far as its memory is concerned."""

    def __init__(self, work: ChildWork, session: Session) -> None:
        self._work = work
        self._pending = session.pending

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._work.has_ended

    def wait_for_reader(self, limit_s: float) -> bool:
        """Wait until the reader has noticed that; whether it has, within ``limit_s`` seconds."""
        return self._pending.until_ended(self._work, limit_s)
