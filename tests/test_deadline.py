# SPDX-License-Identifier: BSD-3-Clause
"""What a timeout may be, and what a deadline says as time goes by."""

from __future__ import annotations

import math
import multiprocessing.connection
import select
import socket
import threading
import types
import unittest
from datetime import timedelta
from unittest import mock

from tests import load

deadline = load("_deadline")
errors = load("_errors")


class Seconds(unittest.TestCase):
    def test_numbers_and_timedeltas(self) -> None:
        for given, wanted in (
            (0, 0.0),
            (0.0, 0.0),
            (3, 3.0),
            (2.5, 2.5),
            (timedelta(0), 0.0),
            (timedelta(milliseconds=1500), 1.5),
            (timedelta(days=1, microseconds=1), 86400.000001),
        ):
            with self.subTest(given):
                got = deadline.seconds(given, 99.0)
                self.assertEqual(got, wanted)
                self.assertIs(type(got), float)

    def test_none_is_the_default(self) -> None:
        self.assertEqual(deadline.seconds(None, 7.0), 7.0)

    def test_none_with_a_default_of_zero_is_zero(self) -> None:
        self.assertEqual(deadline.seconds(None, 0.0), 0.0)

    def test_none_without_a_default_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "connect_timeout is None"):
            deadline.seconds(None, name="connect_timeout")

    def test_what_is_no_limit_is_refused(self) -> None:
        for given in (-1, -0.001, math.nan, math.inf, -math.inf, timedelta(microseconds=-1), 10**400, -(10**5000)):
            with (
                self.subTest(type(given).__name__),
                self.assertRaisesRegex(ValueError, "^idle_timeout is .*give a finite number"),
            ):
                deadline.seconds(given, 1.0, name="idle_timeout")

    def test_what_is_no_time_is_refused(self) -> None:
        for given in (True, False, "3", b"3", [3], 3j, object()):
            with self.subTest(repr(given)), self.assertRaisesRegex(TypeError, "^timeout is "):
                deadline.seconds(given, 1.0)

    def test_for_ever_is_cut_to_what_every_wait_can_take(self) -> None:
        for given in (timedelta.max, 1e300, 10**12):
            with self.subTest(given):
                self.assertEqual(deadline.seconds(given), deadline.LONGEST_S)

    def test_every_wait_takes_the_longest(self) -> None:
        longest = deadline.seconds(timedelta.max)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(longest)
            theirs.send(b"x")
            self.assertEqual(ours.recv(1), b"x")
            theirs.send(b"x")
            self.assertTrue(multiprocessing.connection.wait([ours], longest))
            poll = select.poll()
            poll.register(ours, select.POLLIN)
            self.assertTrue(poll.poll(longest * 1000))
        event = threading.Event()
        event.set()
        self.assertTrue(event.wait(longest))
        self.assertTrue(threading.Lock().acquire(timeout=longest))


class Clock:
    """Stands in for the time module of the code under test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Deadlines(unittest.TestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        stand_in = types.SimpleNamespace(monotonic=self.clock.monotonic)
        patch = mock.patch.object(deadline, "time", stand_in)
        patch.start()
        self.addCleanup(patch.stop)

    def test_counts_down_and_stops_at_zero(self) -> None:
        limit = deadline.Deadline(10.0)
        self.assertEqual((limit.elapsed_s(), limit.remaining_s(), limit.expired()), (0.0, 10.0, False))
        self.clock.now_s += 4
        self.assertEqual((limit.elapsed_s(), limit.remaining_s(), limit.expired()), (4.0, 6.0, False))
        self.clock.now_s += 6
        self.assertEqual((limit.elapsed_s(), limit.remaining_s(), limit.expired()), (10.0, 0.0, True))
        self.clock.now_s += 5
        self.assertEqual((limit.elapsed_s(), limit.remaining_s(), limit.expired()), (15.0, 0.0, True))

    def test_of_zero_is_over_at_once(self) -> None:
        self.assertTrue(deadline.Deadline(0.0).expired())

    def test_error_tells_limit_and_time_spent(self) -> None:
        limit = deadline.Deadline(10.0)
        self.clock.now_s += 12.5
        error = limit.exceeded("waiting for readers", hint="they are slow")
        self.assertIsInstance(error, errors.DeadlineExceeded)
        self.assertIsInstance(error, TimeoutError)
        self.assertEqual((error.what, error.limit_s, error.elapsed_s), ("waiting for readers", 10.0, 12.5))
        self.assertEqual(str(error), "waiting for readers: gave up after 12.5 s (limit 10 s); they are slow")

    def test_takes_no_other_attributes(self) -> None:
        with self.assertRaises(AttributeError):
            deadline.Deadline(1.0).extended = True


if __name__ == "__main__":
    unittest.main()
