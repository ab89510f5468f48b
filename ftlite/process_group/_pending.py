# SPDX-License-Identifier: BSD-3-Clause
"""The ops of one session that have not settled, and how each is told of its end.

Invariants: what an op has written is in the user's tensors before anybody is told, and after ``quiesce`` nothing is
written to them any more. Callbacks run without a lock held, in whichever thread comes first. One that waits for
another op may be in the very thread that was to settle that op next; so whoever waits settles what is due.

Locks: the session's guards the tables.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ._effects import Effect, Settle
from ._frames import frameless, fresh
from ._lenders import Lenders
from ._nesting import here, is_deep
from ._replies import Replies
from ._work import ChildWork

__all__ = ["Pending"]

# No stack or no memory is left here; whoever comes next may have it.
_SCARCE = (RecursionError, MemoryError)


class Pending:
    """Ops by their ids, in ``works``.

    Args:
        lock: the session's.
        ledger: where the ops have lent their tensors.
        replies: who reads for them.
        is_free: whether the child works no more on the memory of an op that has just ended.
    """

    def __init__(self, lock: threading.RLock, ledger: Lenders, replies: Replies, is_free: Callable[[], bool]) -> None:
        self.works: dict[int, ChildWork] = {}
        self._lock = lock
        self._ledger = ledger
        self._replies = replies
        self._is_free = is_free
        self._due: deque[Settle] = deque()
        self.writing = threading.RLock()  # held while results are written
        self._ended = threading.Condition(lock)
        self._waiting = 0  # for memory

    def until_ended(self, work: ChildWork, limit_s: float) -> bool:
        """Wait until somebody has noticed the end of ``work``; whether one has, within ``limit_s`` seconds."""
        with self._lock:
            self._waiting += 1
            try:
                return self._ended.wait_for(lambda: work.has_ended, limit_s)
            finally:
                self._waiting -= 1

    def bring_back(self, effect: Effect) -> Effect:
        """``effect``, with the result written if it is the end of an op; for whoever holds ``writing``."""
        if not isinstance(effect, Settle):
            return effect
        try:
            self._ledger.take_back(self.works[effect.op_id], effect.outcome is None)
        except Exception as error:  # the user has freed the memory
            return Settle(effect.op_id, effect.outcome or frameless(error))
        return effect

    def quiesce(self) -> None:
        """Wait until what is being written has been; for whoever has ended the session."""
        with self.writing:
            pass

    def end(self, is_free: bool) -> None:
        """The child is gone, or given up: whether memory ``is_free`` stays as it is.

        What was given as a method of the session is forgotten, or a garbage collection alone could free it.
        """
        self._is_free = lambda: is_free
        self._ledger.end()
        self._replies.end()

    def names(self) -> dict[int, str]:
        """What there is that nobody is about to settle, by ids."""
        due = {effect.op_id for effect in self._due.copy()}
        return {op_id: work.name for op_id, work in list(self.works.items()) if not (work.has_ended or op_id in due)}

    def settle(self, effects: Sequence[Settle] = ()) -> None:
        """Settle these, and what else is due, whichever thread was told of it.

        What callbacks raise, torch keeps to itself. After any other exception whoever comes next goes on.
        """
        self._due.extend(effects)
        if not self._due or is_deep():  # this very thread has more to settle once the callback that it is in has ended
            return
        here.depth += 1
        try:
            while self._due:
                try:
                    effect = self._due.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    self._settle(effect)
                except BaseException as error:
                    if not isinstance(error, Exception) or isinstance(error, _SCARCE):
                        self._due.appendleft(effect)
                    elif effect.outcome is None:  # it cannot end well: a device has failed
                        self._due.appendleft(Settle(effect.op_id, frameless(fresh(error))))
                    raise
        finally:
            here.depth -= 1

    def _settle(self, effect: Settle) -> None:
        work = self.works.get(effect.op_id)
        if work is None:
            return
        with self._lock:
            if not work.has_ended:
                with contextlib.suppress(LookupError):  # after Ctrl-C in the middle of a change to its tables
                    self._ledger.forget(work, self._is_free())
                work.has_ended = True
                if self._waiting:
                    self._ended.notify_all()
        work.source = effect.source
        work.settle(effect.outcome)
        work.let_go()
        with self._lock:
            self.works.pop(effect.op_id, None)
