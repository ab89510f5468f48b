# SPDX-License-Identifier: BSD-3-Clause
"""Slots: never two in one place, aligned, hot, and whole again in the end."""

from __future__ import annotations

import random
import time
import unittest
from typing import Any

from tests import load
from tests._support import SCALE, GuardedTestCase

slots = load("process_group._slots")
StateError = load("_errors").StateError

MB = 1 << 20
SMALL = slots.SMALL_BYTES


class Taking(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.slots = slots.Slots()
        self.slots.add(3, MB, address=0x7000_0000)

    def test_a_slot(self) -> None:
        slot = self.slots.take(1000)
        self.assertEqual((slot.segment, slot.offset, slot.nbytes, slot.pointer), (3, 0, 1000, 0x7000_0000))
        self.assertEqual(self.slots.out_bytes, 1024)
        other = self.slots.take(4)
        self.assertEqual((other.offset, other.pointer), (1024, 0x7000_0000 + 1024))
        self.assertIn("segment=3, offset=1024, nbytes=4", repr(other))

    def test_room(self) -> None:
        for nbytes, room in ((0, 64), (1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (SMALL - 1, SMALL),
                             (SMALL, SMALL), (SMALL + 1, SMALL + 64), (100_000, 100_032)):  # fmt: skip
            with self.subTest(nbytes=nbytes):
                self.assertEqual(slots.room_for(nbytes), room)
                slot = self.slots.take(nbytes)
                self.assertEqual(slot.room, room)
                self.assertEqual(self.slots.out_bytes, room)
                self.assertTrue(self.slots.give(slot))
                self.assertEqual(self.slots.out_bytes, 0)

    def test_the_same_memory_again(self) -> None:
        # in steps, several out: what was given back last is taken first, or else the lowest
        for nbytes in (4, 5000, SMALL, SMALL + 1, 200_000):
            with self.subTest(nbytes=nbytes):
                first = {slot.offset for slot in [self.slots.take(nbytes) for _ in range(3)] if self.slots.give(slot)}
                for _ in range(10):
                    taken = [self.slots.take(nbytes) for _ in range(3)]
                    self.assertEqual({slot.offset for slot in taken}, first)
                    for slot in taken:
                        self.slots.give(slot)

    def test_no_room(self) -> None:
        self.assertIsNone(self.slots.take(MB + 1))
        whole = self.slots.take(MB)
        self.assertIsNone(self.slots.take(0))
        self.slots.add(4, MB)
        self.assertEqual(self.slots.take(0).segment, 4)
        self.slots.give(whole)
        self.assertEqual(self.slots.take(MB).segment, 3)

    def test_small_ones_make_way_for_a_large_one(self) -> None:
        small = [self.slots.take(4) for _ in range(MB // 64)]
        self.assertIsNone(self.slots.take(4))
        for slot in small:
            self.slots.give(slot)
        self.assertEqual(self.slots.take(MB).offset, 0)

    def test_given_twice(self) -> None:
        first = self.slots.take(4)
        self.assertTrue(self.slots.give(first))
        second = self.slots.take(4)
        self.assertEqual(second.offset, first.offset)
        # the one who has it now keeps it
        self.assertFalse(self.slots.give(first))
        self.assertNotEqual(self.slots.take(4).offset, second.offset)

    def test_segments(self) -> None:
        for number, nbytes in ((3, MB), (5, 100), (5, 0), (5, -64)):
            with self.subTest(number=number, nbytes=nbytes), self.assertRaisesRegex(ValueError, f"segment {number}"):
                self.slots.add(number, nbytes)
        slot = self.slots.take(4)
        with self.assertRaisesRegex(StateError, "segment 3 has 1 slots out"):
            self.slots.remove(3)
        self.slots.give(slot)
        self.slots.remove(3)
        self.assertEqual(self.slots.areas(), [])
        self.assertIsNone(self.slots.take(4))

    def test_idle(self) -> None:
        self.assertEqual(self.slots.idle(100.0, 10.0), [])
        self.assertEqual(self.slots.idle(109.9, 10.0), [])
        self.assertEqual(self.slots.idle(110.0, 10.0), [3])
        slot = self.slots.take(4)
        self.assertEqual(self.slots.idle(111.0, 10.0), [])
        self.slots.give(slot)
        self.assertEqual(self.slots.idle(200.0, 10.0), [])
        # used between two looks
        self.slots.give(self.slots.take(4))
        self.assertEqual(self.slots.idle(211.0, 10.0), [])
        self.assertEqual(self.slots.idle(221.0, 10.0), [3])


class Schedules(GuardedTestCase):
    """The invariants: slots out never overlap, lie inside and are aligned; all given back makes all free again."""

    def run_schedule(self, seed: int) -> None:
        rng = random.Random(seed)
        real = slots.Slots()
        sizes = {number: rng.choice((4096, 1 << 16, 1 << 18, MB)) for number in range(rng.randint(1, 4))}
        for number, nbytes in sizes.items():
            real.add(number, nbytes, address=number << 32)
        typical = [rng.randint(0, max(sizes.values()) // rng.choice((1, 4, 64))) for _ in range(4)]
        out: list[Any] = []
        for _ in range(150):
            if out and rng.random() < rng.choice((0.3, 0.6)):
                self.assertTrue(real.give(out.pop(rng.choice((0, -1, rng.randrange(len(out)))))))
            else:
                nbytes = rng.choice(typical) if rng.random() < 0.7 else rng.randint(0, 200_000)
                slot = real.take(nbytes)
                if slot is None:
                    self.refused_rightly(real, out, sizes, slots.room_for(nbytes))
                    continue
                self.assertGreaterEqual(slot.room, nbytes)
                self.assertEqual(slot.offset % slots.ALIGN_BYTES, 0)
                self.assertLessEqual(slot.offset + slot.room, sizes[slot.segment])
                self.assertEqual(slot.pointer, (slot.segment << 32) + slot.offset)
                out.append(slot)
            self.apart(out)
            self.assertEqual(real.out_bytes, sum(slot.room for slot in out))
        for slot in rng.sample(out, len(out)):
            real.give(slot)
        self.assertEqual(real.free_ranges(), [(number, 0, nbytes) for number, nbytes in sizes.items()], seed)
        self.assertEqual(real.out_bytes, 0)

    def apart(self, out: list[Any]) -> None:
        ends: dict[int, int] = {}
        for slot in sorted(out, key=lambda slot: (slot.segment, slot.offset)):
            self.assertGreaterEqual(slot.offset, ends.get(slot.segment, 0))
            ends[slot.segment] = slot.offset + slot.room

    def refused_rightly(self, real: Any, out: list[Any], sizes: dict[int, int], room: int) -> None:
        """No gap between the slots that are out would have been large enough."""
        for number, nbytes in sizes.items():
            low = 0
            for slot in sorted((slot for slot in out if slot.segment == number), key=lambda slot: slot.offset):
                self.assertLess(slot.offset - low, room)
                low = slot.offset + slot.room
            self.assertLess(nbytes - low, room)

    def test_schedules(self) -> None:
        for seed in range(400):
            self.run_schedule(seed)


class Many(GuardedTestCase):
    def test_10_000_out_in_linear_time(self) -> None:
        for nbytes in (4, SMALL + 1):
            for order in (1, -1, 0):
                with self.subTest(nbytes=nbytes, order=order):
                    real = slots.Slots()
                    real.add(0, 1 << 30)
                    start_s = time.perf_counter()
                    out = [real.take(nbytes) for _ in range(10_000)]
                    for slot in out[::order] if order else random.Random(1).sample(out, len(out)):
                        real.give(slot)
                    # 0.06 s here; quadratic would be 5
                    self.assertLess(time.perf_counter() - start_s, 2 * SCALE)
                    self.assertEqual(real.free_ranges(), [(0, 0, 1 << 30)])


if __name__ == "__main__":
    unittest.main()
