# SPDX-License-Identifier: BSD-3-Clause
"""Where bytes of a region go: exactly there, and nowhere else."""

from __future__ import annotations

import random
import unittest

import torch

from tests import load

interval = load("checkpointing._interval")


class Host(unittest.TestCase):
    def setUp(self) -> None:
        self.memory = torch.zeros(100, dtype=torch.uint8)
        # the 40 bytes from byte 20 of the memory on are bytes 500 to 540 of the region
        self.one = interval.Interval(500, 540, self.memory[20:60].view(torch.float32))

    def test_the_memory_of_its_owner(self) -> None:
        self.assertTrue(self.one.on_host)
        self.assertIsNone(self.one.next)
        memory = self.one.memory()
        self.assertEqual((memory.dtype, memory.shape), (torch.uint8, (40,)))
        self.assertEqual(memory.data_ptr(), self.memory.data_ptr() + 20)

    def test_views(self) -> None:
        self.one.host_view(510, 4)[:] = b"abcd"
        self.assertEqual(bytes(self.memory[28:36].tolist()), b"\0\0abcd\0\0")
        self.assertEqual(len(self.one.host_view(540, 0)), 0)

    def test_writes(self) -> None:
        rng = random.Random(1)
        source = torch.arange(1, 101, dtype=torch.uint8)
        for _ in range(200):
            self.memory.zero_()
            low, high = sorted((rng.randint(0, 40), rng.randint(0, 40)))
            skip = rng.randint(0, 60)
            interval.put(self.one, 500 + low, 500 + high, source, source.data_ptr(), skip)
            wanted = [0] * 100
            wanted[20 + low : 20 + high] = range(skip + 1, skip + 1 + high - low)
            self.assertEqual(self.memory.tolist(), wanted)

    def test_what_lies_in_two_intervals(self) -> None:
        self.one.next = interval.Interval(540, 560, self.memory[70:90])
        source = torch.arange(1, 101, dtype=torch.uint8)
        interval.put(self.one, 535, 545, source, source.data_ptr(), 3)
        wanted = [0] * 100
        wanted[55:60], wanted[70:75] = range(4, 9), range(9, 14)
        self.assertEqual(self.memory.tolist(), wanted)

    def test_the_memory_outlives_a_new_data(self) -> None:
        tensor = torch.zeros(64 << 20, dtype=torch.uint8)  # so large that its memory is gone when it is freed
        one = interval.Interval(0, 64 << 20, tensor)
        tensor.data = torch.zeros(4, dtype=torch.uint8)
        ones = torch.ones(4, dtype=torch.uint8)
        interval.put(one, (64 << 20) - 4, 64 << 20, ones, ones.data_ptr(), 0)
        self.assertEqual(tensor.tolist(), [0] * 4)
        self.assertEqual(one.memory()[-5:].tolist(), [0, 1, 1, 1, 1])

    def test_bits_of_the_owner_do_not_matter(self) -> None:
        owner = torch.zeros(4, dtype=torch.complex64)
        one = interval.Interval(0, 32, owner.conj())
        ones = torch.ones(32, dtype=torch.uint8)
        interval.put(one, 0, 32, ones, ones.data_ptr(), 0)
        self.assertEqual(set(owner.view(torch.float32).view(torch.uint8).tolist()), {1})
