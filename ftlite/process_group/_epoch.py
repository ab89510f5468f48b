# SPDX-License-Identifier: BSD-3-Clause
"""What one ``configure()`` of a group in this process made, and what is going on in it.

Invariants: the first failure stays; an op of an ended epoch has failed; nothing here reaches another epoch. Any
thread may call.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed import Work

from .._errors import UnsupportedOp
from ._handle import OpWork
from ._native import NativeWork, until_ended

__all__ = ["Epoch"]


class Epoch:
    """What one ``configure()`` made: the native group, and what is going on in it."""

    def __init__(
        self,
        native: Any,
        backend: Any,
        rank: int,
        size: int,
        timeout_s: float,
        breaker: Callable[[Epoch], None],
        always: bool = False,
    ) -> None:
        self.native = native
        self.backend = backend
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s  # as the native group knows it
        self._breaker = breaker  # makes everything pending in the native group fail, within milliseconds
        self._always = always  # whether even an idle native group is to be broken before it is destroyed
        self._ended = False
        self.overseer: Any = None  # who watches over the ops, where the backend lets nobody wait for them
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._works: set[OpWork] = set()
        self._aborted: list[OpWork] = []  # settled by us, while their native halves may still be about to end
        # native Works: by weak reference, so that no result lives longer than its user wants
        self._natives: collections.deque[weakref.ref[Work]] = collections.deque()

    def note(self, work: Work) -> None:
        """Take note of a native Work that was handed out."""
        self._natives.append(weakref.ref(work))
        while self._natives and self._is_done(self._natives[0]):
            self._natives.popleft()

    def track(self, work: OpWork) -> OpWork:
        """Take note of one of ours; it fails when the epoch ends."""
        with self._lock:
            error = self.error
            if error is None:
                self._works.add(work)
        if error is not None:
            work.settle(error)
        work.on_settled(self._settled)
        return work

    def fail(self, error: Exception) -> list[OpWork]:
        """Note the first failure, and return what was pending then, for the caller to settle."""
        with self._lock:
            self.error = self.error or error
            pending = list(self._works)
            self._works.clear()
            self._aborted += pending
        return pending

    def active(self) -> int:
        """How many ops are not finished."""
        with self._lock:
            ours = len(self._works)
        return ours + sum(not self._is_done(each) for each in list(self._natives))

    def look(self) -> Exception | None:
        """The first failure, native Works that were not looked at yet included."""
        for each in list(self._natives):
            self._is_done(each)
        return self.error

    def break_off(self) -> None:
        """Make everything pending in the native group fail."""
        if self.native is not None:
            self._breaker(self)

    def end(self, reason: Exception) -> None:
        """Fail what is pending because of ``reason``, and destroy the native group. Again is a no-op.

        What was pending ends first, since it needs the GIL for that. The backend is dropped last: the destructor
        of the ProcessGroup around it waits holding the GIL on torch 2.6, and that of a backend does not.
        """
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return
        busy = self._always or self.active() > 0
        pending = self.fail(reason)
        for work in pending:
            work.settle(reason)
        if busy:
            self.break_off()
        for work in self._aborted:
            if isinstance(work, NativeWork):
                work.until_ended()
        for each in list(self._natives):
            until_ended(each())
        self._natives.clear()
        self._aborted.clear()
        self.native = None
        self.backend = None

    def _is_done(self, reference: weakref.ref[Work]) -> bool:
        work = reference()
        if work is None:
            return True
        if not work.is_completed():
            return False
        try:
            work.wait()  # it has ended: this says how, and unlike exception() prints no warning
        except RuntimeError as error:
            self.error = self.error or error
        return True

    def _settled(self, work: OpWork) -> None:
        error = work._error
        with self._lock:
            self._works.discard(work)
            # a refusal harms nobody else, whatever else fails has left the ranks apart
            if isinstance(error, Exception) and not isinstance(error, UnsupportedOp):
                self.error = self.error or error
