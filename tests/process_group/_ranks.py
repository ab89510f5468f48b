# SPDX-License-Identifier: BSD-3-Clause
"""N ranks as threads of one process, each with a group of its own, meeting at one TCPStore."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from tests._support import SCALE, wait_until

# The group's timeout in tests that do not look at it: a rank that fails aborts the others, so nobody waits for it.
TIMEOUT_S = 20 * SCALE


class Team:
    """``size`` groups from ``make(timeout)``, configured together; a context manager that shuts them down.

    ``run(body)`` calls ``body(group, rank)`` on every rank at the same time and returns the results by rank. If
    one raises, the others are aborted, and ``run`` raises an AssertionError with every rank's traceback.
    """

    def __init__(self, make: Callable[[timedelta], Any], size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.timeout_s = timeout_s
        self.broken = False  # a body failed since the last configure: the groups were aborted
        self._prefix = itertools.count()
        self.groups = [make(timedelta(seconds=timeout_s)) for _ in range(size)]
        try:
            self.configure()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def address(self) -> str:
        """A fresh one: no two configurations share a prefix."""
        return f"127.0.0.1:{self.store.port}/{next(self._prefix)}"

    def configure(self, ranks: list[int] | None = None) -> None:
        """Make the groups of ``ranks`` (all) peers, in that order."""
        members = list(range(len(self.groups))) if ranks is None else ranks
        address = self.address()

        def one(group: Any, rank: int) -> None:
            group.configure(address, f"replica{rank}", members.index(rank), len(members))

        keys = self.store.num_keys()

        def is_waiting() -> bool:
            nonlocal keys
            before, keys = keys, self.store.num_keys()
            return keys > before

        # One after the other, each when the one before has published its address and waits: TCPStore's constructor
        # enters its object into pybind's table without the GIL, and on torch 2.6 at least the process ends by an
        # abort when another thread makes or drops one of torch's objects at that moment.
        self.run(one, members, is_waiting)
        self.broken = False

    def run(
        self,
        body: Callable[[Any, int], Any],
        ranks: list[int] | None = None,
        next_when: Callable[[], bool] | None = None,
    ) -> list[Any]:
        members = list(range(len(self.groups))) if ranks is None else ranks
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}

        def one(rank: int) -> None:
            try:
                results[rank] = body(self.groups[rank], rank)
            except BaseException:  # an assertion of the test as well
                failures[rank] = traceback.format_exc()
                for other in members:
                    if other != rank and other not in failures:
                        self.groups[other].abort(f"rank {rank} failed")

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}", daemon=True) for rank in members]
        for rank, thread in zip(members, threads):
            thread.start()
            if next_when is not None and rank != members[-1]:
                # a rank that fails publishes nothing, and lets the others say so
                wait_until(lambda rank=rank: next_when() or rank in failures, "a rank waits for the next")
        end_s = time.monotonic() + 3 * self.timeout_s
        for thread in threads:
            thread.join(max(0.1, end_s - time.monotonic()))
        late = [thread.name for thread in threads if thread.is_alive()]
        if failures or late:
            self.broken = True
            texts = [f"--- rank {rank}:\n{text}" for rank, text in failures.items()]
            raise AssertionError("\n".join([*texts, f"still running: {late}" if late else ""]))
        return [results[rank] for rank in members]

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
