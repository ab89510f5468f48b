# SPDX-License-Identifier: BSD-3-Clause
"""When the reader rests. What must hold: in a burst, and never while ops that are few or slow are waited for."""

from __future__ import annotations

import unittest

from tests import load

pace = load("process_group._pace")


class PaceTest(unittest.TestCase):
    def setUp(self) -> None:
        self.pace = pace.Pace()
        self.submitted = 0

    def look(self, issued: int, replies: int, in_flight: int) -> bool:
        self.submitted += issued
        for _ in range(replies):
            self.pace.heard()
        rests: bool = self.pace.is_burst(self.submitted, in_flight)
        return rests

    def test_one_after_the_other(self) -> None:
        for in_flight in (0, 1, 7, 8, 1000):  # these others take their time
            self.assertFalse(self.look(1, 1, in_flight))
            self.assertFalse(self.look(1, 0, in_flight))
            self.assertFalse(self.look(0, 1, in_flight))

    def test_a_burst_from_its_begin_to_its_end(self) -> None:
        self.assertTrue(self.look(20, 1, 19))
        self.assertTrue(self.look(15, 2, 32))
        self.assertTrue(self.look(0, 4, 28))
        self.assertFalse(self.look(0, 1, 27), "they have become slow")
        self.assertTrue(self.look(0, 2, 25))
        self.assertFalse(self.look(0, 15, 10), "the rest is over sooner than a rest")

    def test_a_hundred(self) -> None:
        left, rests = 100, 0
        self.look(100, 0, left)
        while left > 0:
            left -= 3
            rests += self.look(0, 3, left)
        self.assertGreater(rests, 20)

    def test_receives_posted_ahead_are_none_of_a_burst(self) -> None:
        for ahead in (8, 40):
            self.setUp()
            self.look(ahead, 0, ahead)
            late = sum(self.look(2, 2, ahead) for _ in range(1000))
            self.assertLessEqual(late, ahead)
            self.assertTrue(self.look(100, 2, ahead + 98), "a burst beside them is one")

    def test_what_has_been_is_over(self) -> None:
        self.assertTrue(self.look(100, 50, 50))
        self.assertFalse(self.look(0, 0, 50))


if __name__ == "__main__":
    unittest.main()
