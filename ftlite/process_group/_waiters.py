# SPDX-License-Identifier: BSD-3-Clause
"""Threads of the child that wait for Works which tell nobody of their end. Any thread may call."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Waiters"]


class Waiters:
    """As many threads as there are things to wait for at a time; they are used again."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, job: Callable[[], object]) -> None:
        """Call ``job``, which does not raise, in a thread that waits for nothing else."""
        with self._lock:
            fresh = self._idle == 0
            if not fresh:
                self._idle -= 1
        self._jobs.put(job)
        if fresh:
            threading.Thread(target=self._work, name="waiter", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1
