# SPDX-License-Identifier: BSD-3-Clause
"""The readers-writer lock. What must hold: many read at once, one writes alone, no writer starves."""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable
from datetime import timedelta

from tests import load
from tests._support import WAIT_S, GuardedTestCase, wait_until

errors = load("_errors")
rwlock = load("checkpointing._rwlock")

LONG_WAIT_S = 6 * WAIT_S


class Alone(unittest.TestCase):
    """What one thread sees."""

    def setUp(self) -> None:
        self.lock = rwlock.RWLock(0)

    def test_many_read_at_once(self) -> None:
        with self.lock.r_lock(), self.lock.r_lock(), self.lock.r_lock():
            self.assertFalse(self.lock.w_locked())
        self.lock.w_acquire()

    def test_a_writer_is_alone(self) -> None:
        with self.lock.w_lock():
            self.assertTrue(self.lock.w_locked())
            with self.assertRaises(errors.DeadlineExceeded):
                self.lock.r_acquire()
            with self.assertRaises(errors.DeadlineExceeded):
                self.lock.w_acquire()
        self.assertFalse(self.lock.w_locked())
        self.lock.r_acquire()
        with self.assertRaises(TimeoutError):
            self.lock.w_acquire()

    def test_a_writer_that_gave_up_leaves_nothing_behind(self) -> None:
        with self.lock.r_lock():
            with self.assertRaises(errors.DeadlineExceeded):
                self.lock.w_acquire()
            self.lock.r_acquire()
            self.lock.r_release()
        with self.lock.w_lock():
            pass

    def test_release_without_a_holder(self) -> None:
        for release in (self.lock.r_release, self.lock.w_release):
            with self.assertRaises(errors.StateError):
                release()
        self.lock.r_acquire()
        with self.assertRaises(errors.StateError) as caught:
            self.lock.w_release()
        self.assertEqual((caught.exception.state, caught.exception.attempted), ("not writing", "w_release"))
        self.lock.r_release()
        self.lock.w_acquire()
        with self.assertRaises(errors.StateError):
            self.lock.r_release()
        self.assertTrue(self.lock.w_locked())

    def test_a_body_that_raises(self) -> None:
        for holding in (self.lock.r_lock, self.lock.w_lock):
            with self.assertRaises(KeyError), holding():
                raise KeyError
            with self.lock.w_lock():
                pass

    def test_a_block_that_was_not_entered_releases_nothing(self) -> None:
        self.lock.w_acquire()
        for holding in (self.lock.r_lock, self.lock.w_lock):
            with self.assertRaises(errors.DeadlineExceeded), holding():
                self.fail("entered")
            self.assertTrue(self.lock.w_locked())

    def test_what_a_timeout_may_be(self) -> None:
        for good in (0, 1, 0.5, timedelta(seconds=1), timedelta(0)):
            rwlock.RWLock(good).r_acquire(good)
        for bad in (-1, float("nan"), float("inf"), timedelta(seconds=-1)):
            with self.assertRaises(ValueError):
                rwlock.RWLock(bad)
            for acquire in (self.lock.r_acquire, self.lock.w_acquire):
                with self.assertRaises(ValueError):
                    acquire(bad)
        with self.assertRaises(ValueError):
            rwlock.RWLock(None)
        with self.lock.w_lock(None):
            pass

    def test_the_callers_timeout_rules_over_the_constructors(self) -> None:
        for lock, given, limit_s in ((rwlock.RWLock(3600), 0.02, 0.02), (rwlock.RWLock(0.02), None, 0.02)):
            lock.w_acquire()
            for acquire in (lock.r_acquire, lock.w_acquire):
                began_s = time.monotonic()
                with self.assertRaises(errors.DeadlineExceeded) as caught:
                    acquire(given)
                self.assertGreaterEqual(time.monotonic() - began_s, limit_s)
                self.assertEqual(caught.exception.limit_s, limit_s)

    def test_the_error_says_who_holds_it(self) -> None:
        with self.lock.r_lock(), self.lock.r_lock(), self.assertRaisesRegex(TimeoutError, "2 reading, none writing"):
            self.lock.w_acquire()
        with self.lock.w_lock(), self.assertRaisesRegex(TimeoutError, "0 reading, one writing"):
            self.lock.r_acquire()


class Together(GuardedTestCase):
    """What threads see of each other."""

    def setUp(self) -> None:
        super().setUp()
        self.lock = rwlock.RWLock(LONG_WAIT_S)
        self.done: list[str] = []
        self.threads: list[threading.Thread] = []
        self.addCleanup(self.join)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)

    def start(self, job: Callable[[], None], name: str) -> None:
        def run() -> None:
            job()
            self.done.append(name)

        self.threads.append(threading.Thread(target=run, name=name))
        self.threads[-1].start()

    def waiting(self, count: int) -> None:
        wait_until(lambda: len(self.lock._changed._waiters) >= count, f"{count} waiting")

    def finished(self, *names: str) -> None:
        wait_until(lambda: len(self.done) >= len(names), f"{names} done")
        self.assertEqual(self.done, list(names))

    def test_a_writer_waits_for_the_last_reader(self) -> None:
        self.lock.r_acquire()
        self.lock.r_acquire()
        self.start(self.lock.w_acquire, "writer")
        self.waiting(1)
        self.lock.r_release()
        self.assertEqual(self.done, [])
        self.assertFalse(self.lock.w_locked())
        self.lock.r_release()
        self.finished("writer")
        self.assertTrue(self.lock.w_locked())

    def test_a_waiting_writer_goes_before_new_readers(self) -> None:
        self.lock.r_acquire()
        self.start(self.lock.w_acquire, "writer")
        self.waiting(1)
        with self.assertRaises(errors.DeadlineExceeded):
            self.lock.r_acquire(0)
        self.start(self.lock.r_acquire, "reader")
        self.waiting(2)
        self.lock.r_release()
        self.finished("writer")
        self.lock.w_release()  # another thread's to release, which is allowed
        self.finished("writer", "reader")

    def test_a_writer_that_gives_up_lets_the_readers_in(self) -> None:
        self.lock.r_acquire()

        def give_up() -> None:
            with self.assertRaises(errors.DeadlineExceeded):
                self.lock.w_acquire(0.2)

        self.start(give_up, "writer")
        self.waiting(1)
        self.start(self.lock.r_acquire, "reader")
        wait_until(lambda: len(self.done) == 2, "both done")
        self.assertFalse(self.lock.w_locked())

    def test_readers_and_writers_at_random(self) -> None:
        state = {"value": 0, "twin": 0}
        reading = [0]
        most = [0]
        guard = threading.Lock()
        torn: list[tuple[int, int]] = []
        together = threading.Barrier(4)

        def write() -> None:
            for _ in range(100):
                with self.lock.w_lock():
                    state["value"] += 1
                    state["twin"] += 1

        def read() -> None:
            with self.lock.r_lock():
                together.wait(WAIT_S)  # nobody passes unless four read at once
            for _ in range(100):
                with self.lock.r_lock():
                    with guard:
                        reading[0] += 1
                        most[0] = max(most[0], reading[0])
                    if state["value"] != state["twin"]:
                        torn.append((state["value"], state["twin"]))
                    with guard:
                        reading[0] -= 1

        for number in range(4):
            self.start(read, f"reader {number}")
        wait_until(lambda: together.broken or len(self.done) or together.n_waiting == 0, "they read together")
        for number in range(2):
            self.start(write, f"writer {number}")
        wait_until(lambda: len(self.done) == 6, "all done")
        self.assertEqual((torn, state["value"]), ([], 200))
        self.assertFalse(together.broken)

    def test_no_writer_starves_under_a_stream_of_readers(self) -> None:
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                with self.lock.r_lock():
                    over.wait(0.001)

        for number in range(4):
            self.start(read, f"reader {number}")
        try:
            for _ in range(10):
                with self.lock.w_lock(WAIT_S):
                    pass
        finally:
            over.set()
