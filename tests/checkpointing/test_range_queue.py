# SPDX-License-Identifier: BSD-3-Clause
"""The queue of ranges. What must hold: every range is finished exactly once, however often it comes back, and
``done_bytes`` rises with what arrives and ends at the total."""

from __future__ import annotations

import random
import unittest

from tests import load

queue = load("checkpointing._range_queue")


class Queue(unittest.TestCase):
    def test_nothing_to_fetch(self) -> None:
        empty = queue.RangeQueue([])
        self.assertTrue(empty.finished)
        self.assertEqual((empty.total, empty.done_bytes, empty.take()), (0, 0, None))

    def test_ranges_are_the_chunks_in_order(self) -> None:
        one = queue.RangeQueue([3, 10, 11])
        taken = [one.take(), one.take(), one.take()]
        self.assertEqual(
            [(r.number, r.start, r.at, r.end) for r in taken], [(0, 0, 0, 3), (1, 3, 3, 10), (2, 10, 10, 11)]
        )
        self.assertIsNone(one.take())
        self.assertFalse(one.finished)

    def test_what_comes_back_goes_first_with_what_it_has(self) -> None:
        one = queue.RangeQueue([10, 20])
        first = one.take()
        first.at = 4
        first.sums.feed(memoryview(bytearray(4)))
        one.give_back(first)
        again = one.take()
        self.assertIs(again, first)
        self.assertEqual((again.at, again.sums.nbytes, one.done_bytes), (4, 4, 4))

    def test_random_schedules(self) -> None:
        for seed in range(200):
            with self.subTest(seed=seed):
                self.walk(random.Random(seed))

    def walk(self, rng: random.Random) -> None:
        ends = sorted(rng.sample(range(1, 500), rng.randint(1, 12)))
        one = queue.RangeQueue(ends)
        arrived = [0] * ends[-1]
        finished: list[int] = []
        taken: list[queue.Range] = []
        done = 0
        while not one.finished:
            if taken and rng.random() < 0.7:
                each = rng.choice(taken)
                if each.at == each.end:
                    taken.remove(each)
                    one.finish(each)
                    finished.append(each.number)
                elif rng.random() < 0.2:
                    taken.remove(each)
                    one.give_back(each)
                else:
                    n = rng.randint(1, each.end - each.at)
                    for at in range(each.at, each.at + n):
                        arrived[at] += 1
                    each.at += n
            elif (found := one.take()) is not None:
                self.assertNotIn(found, taken)
                taken.append(found)
            self.assertGreaterEqual(one.done_bytes, done)
            done = one.done_bytes
            self.assertEqual(done, sum(arrived))
        self.assertEqual(sorted(finished), list(range(len(ends))))
        self.assertEqual(arrived, [1] * one.total)
        self.assertEqual((one.done_bytes, one.total), (ends[-1], ends[-1]))
        self.assertIsNone(one.take())

    def test_a_range_that_was_not_taken_cannot_end(self) -> None:
        one = queue.RangeQueue([5])
        taken = one.take()
        one.give_back(taken)
        for call in (one.give_back, one.finish):
            with self.assertRaises(KeyError):
                call(taken)
