# SPDX-License-Identifier: BSD-3-Clause
"""What is in flight, against a model that compares every pair."""

from __future__ import annotations

import random
import time
import unittest

from tests import load
from tests._support import SCALE, GuardedTestCase

inflight = load("process_group._inflight")
NOTHING = inflight.NOTHING


class Relations(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.inflight = inflight.InFlight()

    def add(self, op_id: int, *ranges: tuple[int, int, bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.inflight.add(op_id, ranges))

    def test_apart(self) -> None:
        self.assertIs(self.inflight.add(1, [(100, 200, True)]), NOTHING)
        self.assertIs(self.inflight.add(2, [(200, 300, True), (0, 100, True)]), NOTHING)
        self.assertEqual(len(self.inflight), 2)
        self.assertIn(2, self.inflight)
        self.inflight.remove(2)
        self.assertNotIn(2, self.inflight)

    def test_equal(self) -> None:
        self.add(1, (100, 200, True))
        self.assertEqual(self.add(2, (100, 200, True)), ((1,), ()))
        # 2 follows 1 already
        self.assertEqual(self.add(3, (100, 200, True)), ((2,), ()))
        self.assertEqual(self.inflight.newest(100, 200), 3)
        self.inflight.remove(3)
        self.assertEqual(self.add(4, (100, 200, False)), ((2,), ()))

    def test_unequal(self) -> None:
        self.add(1, (100, 200, True))
        for op_id, (start, end) in enumerate(((150, 160), (50, 101), (199, 300), (0, 999), (100, 199), (101, 200)), 2):
            with self.subTest(start=start, end=end):
                self.assertEqual(self.add(op_id, (start, end, True)), ((), (1,)))
                self.inflight.remove(op_id)

    def test_equal_here_and_unequal_there_is_unequal(self) -> None:
        self.add(1, (0, 10, True), (100, 200, True))
        self.assertEqual(self.add(2, (0, 10, True), (100, 150, True)), ((), (1,)))

    def test_both_kinds(self) -> None:
        self.add(1, (0, 10, True))
        self.add(2, (100, 200, True))
        self.assertEqual(self.add(3, (100, 150, True), (0, 10, True)), ((1,), (2,)))

    def test_readers_are_not_related(self) -> None:
        self.add(1, (0, 10, False))
        self.assertIs(self.inflight.add(2, [(0, 10, False)]), NOTHING)
        self.assertIs(self.inflight.add(3, [(5, 15, False)]), NOTHING)
        # the writer follows every one of them
        self.assertEqual(self.add(4, (0, 10, True)), ((1, 2), (3,)))
        # and those who follow it, it alone where they meet nobody else
        self.assertEqual(self.add(5, (0, 10, False)), ((4,), ()))
        self.assertEqual(self.add(6, (0, 10, True)), ((5,), (3,)))

    def test_a_reader_follows_the_writer_past_other_readers(self) -> None:
        self.add(1, (0, 10, True))
        self.add(2, (0, 10, False))
        self.assertEqual(self.add(3, (0, 10, False)), ((1,), ()))

    def test_removed_out_of_order(self) -> None:
        for op_id in (1, 2, 3):
            self.add(op_id, (0, 10, True))
        self.inflight.remove(2)
        self.inflight.remove(3)
        self.assertEqual(self.add(4, (0, 10, True)), ((1,), ()))
        self.inflight.remove(1)
        self.inflight.remove(4)
        self.assertIs(self.inflight.add(5, [(0, 10, True)]), NOTHING)

    def test_ranges_of_one_op_are_not_related(self) -> None:
        self.assertIs(self.inflight.add(1, [(0, 10, False), (0, 10, True), (0, 10, False), (5, 15, True)]), NOTHING)
        self.assertEqual(self.add(2, (0, 10, False)), ((), (1,)))
        self.inflight.remove(1)
        self.inflight.remove(2)
        self.assertIs(self.inflight.add(3, [(0, 100, True)]), NOTHING)

    def test_empty_ranges_are_no_memory(self) -> None:
        self.add(1, (0, 10, True))
        self.assertIs(self.inflight.add(2, [(5, 5, True), (0, 0, True)]), NOTHING)

    def test_twice(self) -> None:
        self.add(1, (0, 10, True))
        with self.assertRaisesRegex(ValueError, "op 1 is in flight"):
            self.add(1, (20, 30, True))
        self.inflight.remove(1)
        self.inflight.remove(1)
        self.inflight.remove(7)
        self.assertEqual(len(self.inflight), 0)

    def test_newest(self) -> None:
        self.assertIsNone(self.inflight.newest(0, 10))
        self.add(1, (0, 10, True), (20, 30, False))
        self.assertEqual(self.inflight.newest(20, 30), 1)
        self.assertIsNone(self.inflight.newest(20, 29))
        self.assertIsNone(self.inflight.newest(12, 13))


class Model:
    """The same by comparing every pair: all that an op has to follow, and in which way."""

    def __init__(self) -> None:
        self.ops: dict[int, list[tuple[int, int, bool]]] = {}

    def related(self, ranges: list[tuple[int, int, bool]]) -> dict[int, bool]:
        """op id -> whether some meeting is of unequal ranges."""
        found: dict[int, bool] = {}
        for op_id, theirs in self.ops.items():
            meetings = [
                (start, end) != (low, high)
                for start, end, writes in ranges
                for low, high, wrote in theirs
                if max(start, low) < min(end, high) and (writes or wrote)
            ]
            if meetings:
                found[op_id] = any(meetings)
        return found


class Schedules(GuardedTestCase):
    """Whatever comes and goes: what has to be followed is named, or followed by what is named; nothing else is."""

    def run_schedule(self, seed: int) -> None:
        rng = random.Random(seed)
        model, real = Model(), inflight.InFlight()
        follows: dict[int, set[int]] = {}
        span = rng.choice((8, 40, 300))
        tensors = [sorted(rng.sample(range(span), 2)) for _ in range(rng.choice((2, 6, 20)))]
        for op_id in range(80):
            while model.ops and rng.random() < 0.45:
                done = rng.choice([*model.ops, min(model.ops)])
                del model.ops[done]
                real.remove(done)
            ranges = []
            for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
                start, end = rng.choice(tensors) if rng.random() < 0.8 else sorted(rng.choices(range(span), k=2))
                ranges.append((start, end, rng.random() < 0.6))
            wanted = model.related(ranges)
            same, partial = real.add(op_id, ranges)
            self.assertEqual([*same], sorted(same))
            self.assertEqual([*partial], sorted(partial))
            self.assertFalse(set(same) & set(partial))
            named = {*same, *partial}
            self.assertLessEqual(named, set(wanted), (seed, op_id))
            for op in same:
                # where it is met unequally as well, somebody who follows it there is waited for
                self.assertTrue(partial or not wanted[op], (seed, op_id, op))
            for op in partial:
                self.assertTrue(wanted[op], (seed, op_id, op))
            self.assertLessEqual(set(wanted), self.reached(named, follows, model), (seed, op_id))
            follows[op_id] = named
            model.ops[op_id] = ranges
            self.assertEqual(len(real), len(model.ops))

    def reached(self, named: set[int], follows: dict[int, set[int]], model: Model) -> set[int]:
        """The ops in flight that are followed when ``named`` are."""
        found, todo = set(), list(named)
        while todo:
            op = todo.pop()
            if op in model.ops and op not in found:
                found.add(op)
                todo.extend(follows[op])
        return found

    def test_schedules(self) -> None:
        for seed in range(1500):
            self.run_schedule(seed)

    def test_nothing_stays(self) -> None:
        rng = random.Random(5)
        real = inflight.InFlight()
        for op_id in range(500):
            start = rng.randrange(1000)
            real.add(op_id, [(start, start + rng.randint(1, 60), rng.random() < 0.5)])
        for op_id in rng.sample(range(500), 500):
            real.remove(op_id)
        self.assertIs(real.add(501, [(0, 2000, True)]), NOTHING)
        self.assertIs(real.add(502, [(2000, 3000, True)]), NOTHING)


class Many(GuardedTestCase):
    """10,000 ops in flight cost a few microseconds each; were it quadratic, it would be seconds."""

    def elapsed_s(self, ranges: list[tuple[int, int, bool]], order: list[int]) -> float:
        real = inflight.InFlight()
        start_s = time.perf_counter()
        for op_id, one in enumerate(ranges):
            real.add(op_id, [one])
        for op_id in order:
            real.remove(op_id)
        return time.perf_counter() - start_s

    def test_in_linear_time(self) -> None:
        kinds = {
            "apart": [(i * 64, i * 64 + 4, True) for i in range(10_000)],
            "apart, shuffled": random.Random(1).sample([(i * 64, i * 64 + 4, True) for i in range(10_000)], 10_000),
            "one tensor": [(0, 4, True)] * 10_000,
            "one tensor, read": [(0, 4, False)] * 10_000,
            "one tensor, read and written": [(0, 4, i % 2 == 0) for i in range(10_000)],
        }
        orders = {
            "oldest first": list(range(10_000)),
            "newest first": list(range(9_999, -1, -1)),
            "in any order": random.Random(2).sample(range(10_000), 10_000),
        }
        for kind, ranges in kinds.items():
            for name, order in orders.items():
                with self.subTest(kind=kind, order=name):
                    # 0.05 s here; quadratic would be 5
                    self.assertLess(self.elapsed_s(ranges, order), 2 * SCALE)


if __name__ == "__main__":
    unittest.main()
