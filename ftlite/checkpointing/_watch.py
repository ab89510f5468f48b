# SPDX-License-Identifier: BSD-3-Clause
"""Threads that work on a transfer while the calling thread watches them.

The caller alone knows the deadline: a socket's timeout is per operation, and a name lookup has none. When the
time is up, or a job has failed, the caller cuts the connections, which ends whatever the jobs wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .._deadline import Deadline
from ._client import Link

TICK_S = 0.1  # how often the caller looks; ten times a second is as often as anybody looks at a progress bar
# A job ends as soon as its connection is cut; a copy to a device may take a moment, and a name lookup that cannot be
# interrupted is left behind (its thread is a daemon and touches nothing).
_JOIN_S = 1.0


class Watch:
    """``changed`` guards what the jobs share; ``over`` tells them to stop."""

    def __init__(self, links: Sequence[Link], deadline: Deadline) -> None:
        self.changed = threading.Condition()
        self.over = False
        self._links = links
        self._deadline = deadline
        self._failure: BaseException | None = None
        self._working = 0

    def run(self, jobs: Sequence[Callable[[], None]], tick: Callable[[], None], late: Callable[[], Exception]) -> None:
        """Run every job on a thread of its own until all have returned.

        Raises the first exception of a job; or, at the deadline, what ``late`` makes. ``tick`` is called about
        ten times a second, on this thread, and once at the end.
        """
        self._working = len(jobs)
        threads = [
            threading.Thread(target=self._work, args=(job,), name=f"heal-recv-{i}", daemon=True)
            for i, job in enumerate(jobs)
        ]
        finished = False
        try:
            for thread in threads:
                thread.start()
            while not self._wait():
                tick()
                if self._deadline.expired():
                    raise late()
            tick()
            if self._failure is not None:
                raise self._failure
            finished = True
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()
            if not finished:
                for link in self._links:
                    link.cut()
            until_s = time.monotonic() + _JOIN_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until_s - time.monotonic()))

    def pause(self, seconds: float) -> None:
        """For a job: wait, but not longer than the transfer goes on."""
        with self.changed:
            self.changed.wait_for(lambda: self.over, seconds)

    def _wait(self) -> bool:
        with self.changed:
            return self.changed.wait_for(self._done, min(TICK_S, self._deadline.remaining_s()))

    def _done(self) -> bool:
        return self._working == 0 or self._failure is not None

    def _work(self, job: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            job()
        except BaseException as e:  # it is raised on the caller's thread
            failure = e
        with self.changed:
            self._working -= 1
            if failure is not None and self._failure is None and not self.over:
                self._failure = failure
                self.over = True
            self.changed.notify_all()
