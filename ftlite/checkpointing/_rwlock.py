# SPDX-License-Identifier: BSD-3-Clause
"""A lock that many may hold to read and one to write.

A writer that waits keeps new readers out, so it is not starved; a thread that already reads must therefore
not read again. Not tied to threads: whoever acquired may have another thread release.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._deadline import Deadline, Timeout, seconds
from .._errors import StateError


class RWLock:
    """A timed readers-writer lock.

    Args:
        timeout: how long any acquire waits before it raises DeadlineExceeded; a timedelta or seconds, 0 tries
            once. The default is an hour: long enough for any transfer, and still not for ever.
    """

    def __init__(self, timeout: Timeout = 3600.0) -> None:
        self._timeout_s = seconds(timeout)
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    def r_acquire(self, timeout: Timeout | None = None) -> None:
        """Wait until nobody writes or waits to write, and read.

        Raises:
            DeadlineExceeded: after ``timeout`` (None: the constructor's).
        """
        deadline = Deadline(seconds(timeout, self._timeout_s))
        with self._changed:
            self._wait(lambda: not self._writing and not self._writers_waiting, deadline, "to read")
            self._readers += 1

    def r_release(self) -> None:
        """End reading.

        Raises:
            StateError: nobody reads.
        """
        with self._changed:
            if not self._readers:
                raise StateError("r_release() without a reader", state="no readers", attempted="r_release")
            self._readers -= 1
            self._changed.notify_all()

    @contextmanager
    def r_lock(self, timeout: Timeout | None = None) -> Iterator[None]:
        """Read within a ``with`` block."""
        self.r_acquire(timeout)
        try:
            yield
        finally:
            self.r_release()

    def w_acquire(self, timeout: Timeout | None = None) -> None:
        """Wait until nobody reads or writes, and write.

        Raises:
            DeadlineExceeded: after ``timeout`` (None: the constructor's).
        """
        deadline = Deadline(seconds(timeout, self._timeout_s))
        with self._changed:
            self._writers_waiting += 1
            try:
                self._wait(lambda: not self._writing and not self._readers, deadline, "to write")
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()  # readers wait for a writer that gave up as well

    def w_release(self) -> None:
        """End writing.

        Raises:
            StateError: nobody writes.
        """
        with self._changed:
            if not self._writing:
                raise StateError("w_release() without a writer", state="not writing", attempted="w_release")
            self._writing = False
            self._changed.notify_all()

    @contextmanager
    def w_lock(self, timeout: Timeout | None = None) -> Iterator[None]:
        """Write within a ``with`` block."""
        self.w_acquire(timeout)
        try:
            yield
        finally:
            self.w_release()

    def w_locked(self) -> bool:
        """Whether somebody writes at this moment."""
        with self._changed:
            return self._writing

    def _wait(self, free: Callable[[], bool], deadline: Deadline, purpose: str) -> None:
        if not self._changed.wait_for(free, deadline.remaining_s()):
            raise deadline.exceeded(
                f"the lock {purpose} ({self._readers} reading, {'one' if self._writing else 'none'} writing)"
            )
