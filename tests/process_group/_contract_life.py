# SPDX-License-Identifier: BSD-3-Clause
"""The part of the contract about a group's life: configured anew, aborted, left by a peer, shut down."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests import load
from tests._support import SCALE, WAIT_S, descriptors, wait_until

errors = load("_errors")

# An abort takes milliseconds; a second is for a machine that does something else.
SOON_S = 1.0 * SCALE


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep what C++ prints out of the test's output: torch's store warns of each wait that times out."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class LifeContract:
    """Mixed in by ``ProcessGroupContract``."""

    def sums(self: Any, team: Any, ranks: list[int]) -> None:
        def body(group: Any, rank: int) -> None:
            tensor = torch.ones(3)
            group.allreduce([tensor]).wait()
            self.assertEqual(tensor.tolist(), [float(len(ranks))] * 3)
            self.assertEqual(group.size(), len(ranks))
            self.assertIsNone(group.errored())

        team.run(body, ranks)

    def test_the_size_changes(self: Any) -> None:
        with self.team(3) as team:
            for ranks in ([0, 1, 2], [0, 2], [1], [2, 1, 0]):
                team.configure(ranks)
                self.sums(team, ranks)

    def test_before_configure(self: Any) -> None:
        group = self.make_group(5)
        self.addCleanup(group.shutdown)
        with self.assertRaises(errors.StateError) as caught:
            group.allreduce([torch.ones(1)])
        self.assertIn("configure", str(caught.exception))
        group.abort()
        self.assertEqual(group.num_active_work(), 0)

    def pending(self: Any, group: Any) -> tuple[list[Any], list[BaseException], list[threading.Thread]]:
        """Ops that nobody answers, a wait for each in a thread of its own, and what these raise."""
        works = [group.allreduce([torch.ones(4)]), group.allreduce([torch.ones(4, 4)[::2]])]
        works.append(group.recv([torch.ones(1)], 1, 4))
        raised: list[BaseException] = []

        def wait(work: Any) -> None:
            try:
                work.wait()
            except Exception as error:
                raised.append(error)

        threads = [threading.Thread(target=wait, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        return works, raised, threads

    def test_abort_ends_what_is_pending(self: Any) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works, raised, threads = self.pending(group)
            futures = [work.get_future() for work in works]
            self.assertGreater(group.num_active_work(), 0)
            reason = RuntimeError("the quorum says so")
            started_s = time.monotonic()
            group.abort(reason)
            for thread in threads:
                thread.join(WAIT_S)
            self.assertLess(time.monotonic() - started_s, SOON_S)
            self.assertEqual(len(raised), 3, raised)
            for future in futures:
                wait_until(future.done, "the future of an aborted op is done")
                with self.assertRaises(Exception):  # noqa: B017 # the backend's own words are not ours
                    future.value()
            first = group.errored()
            self.assertIn(reason, (first, first.__cause__))
            with self.assertRaises(errors.FtliteError):
                group.allreduce([torch.ones(1)])
            group.abort("again")
            self.assertIs(group.errored(), first)
            team.configure()
            self.sums(team, [0, 1])

    def test_configure_with_ops_pending(self: Any) -> None:
        with self.team(2) as team:
            old, raised, threads = self.pending(team.groups[0])
            started_s = time.monotonic()
            team.configure()
            self.assertLess(time.monotonic() - started_s, 3 * SOON_S)
            for thread in threads:
                thread.join(WAIT_S)
            self.assertEqual(len(raised), 3, raised)
            self.sums(team, [0, 1])
            for work in old:  # they are of another time
                with self.assertRaises(Exception):  # noqa: B017 # the backend's own words are not ours
                    work.wait()
            self.sums(team, [0, 1])

    def test_other_threads_run_while_a_busy_group_is_left(self: Any) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works, _, threads = self.pending(group)
            ticks: list[float] = []
            stop = threading.Event()

            def tick() -> None:
                while not stop.wait(0.005):
                    ticks.append(time.monotonic())

            ticker = threading.Thread(target=tick)
            ticker.start()
            wait_until(lambda: len(ticks) > 5, "the ticker runs")
            group.shutdown()
            del works
            for thread in threads:
                thread.join(WAIT_S)
            count = len(ticks)
            wait_until(lambda: len(ticks) > count + 5, "the ticker runs on")
            stop.set()
            ticker.join()
            gaps = [later - earlier for earlier, later in itertools.pairwise(ticks)]
            self.assertLess(max(gaps), SOON_S)

    def test_a_peer_that_leaves(self: Any) -> None:
        with self.team(2, timeout_s=5 * SCALE) as team:
            work = team.groups[0].allreduce([torch.ones(4)])
            team.groups[1].shutdown()
            started_s = time.monotonic()
            with self.assertRaises(Exception):  # noqa: B017 # the backend's own words are not ours
                work.wait()
            self.assertLess(time.monotonic() - started_s, team.timeout_s + 3 * SCALE)
            wait_until(lambda: team.groups[0].errored() is not None, "the group knows that it failed")
            del work
            team.configure()
            self.sums(team, [0, 1])

    def test_an_op_that_nobody_joins_ends_at_the_timeout(self: Any) -> None:
        # enough for a configure on a busy machine
        limit_s = 3 * SCALE
        with self.team(2, timeout_s=limit_s) as team:
            for make in (lambda g: g.allreduce([torch.ones(2)]), lambda g: g.recv([torch.ones(2)], 1, 3)):
                team.configure()
                work = make(team.groups[0])
                started_s = time.monotonic()
                with self.assertRaises((TimeoutError, RuntimeError)):
                    work.wait()
                self.assertLess(time.monotonic() - started_s, limit_s + 3 * SCALE)
                self.assertIsNotNone(team.groups[0].errored())

    def test_configure_alone_ends_at_the_timeout(self: Any) -> None:
        with self.team(1) as team:
            group = self.make_group(1.0 * SCALE)
            self.addCleanup(group.shutdown)
            started_s = time.monotonic()
            with quiet_stderr(), self.assertRaises(TimeoutError):
                group.configure(team.address(), "alone", 0, 2)
            self.assertLess(time.monotonic() - started_s, 4 * SCALE)
            group.set_timeout(10.0 * SCALE)
            group.configure(team.address(), "alone", 0, 1)
            group.allreduce([torch.ones(1)]).wait()

    def test_shutdown_again_and_from_two_threads(self: Any) -> None:
        with self.team(2) as team:
            self.sums(team, [0, 1])
            group = team.groups[0]
            threads = [threading.Thread(target=group.shutdown) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
                self.assertFalse(thread.is_alive())
            group.shutdown()
            with self.assertRaises(errors.FtliteError):
                group.allreduce([torch.ones(1)])
            team.configure()
            self.sums(team, [0, 1])

    def test_many_configures_leave_nothing(self: Any) -> None:
        with self.team(2) as team:
            for _ in range(3):
                team.configure()
                self.sums(team, [0, 1])
            before = len(descriptors())
            for _ in range(20):
                team.configure()
                self.sums(team, [0, 1])
            wait_until(lambda: len(descriptors()) <= before + 5, "no descriptor is left behind")

    def test_set_timeout(self: Any) -> None:
        with self.team(2) as team:
            for group in team.groups:
                group.set_timeout(1.0 * SCALE)
            self.sums(team, [0, 1])
            started_s = time.monotonic()
            with self.assertRaises((TimeoutError, RuntimeError)):
                team.groups[0].allreduce([torch.ones(3)], dist.ReduceOp.SUM).wait()
            self.assertLess(time.monotonic() - started_s, 4 * SCALE)
