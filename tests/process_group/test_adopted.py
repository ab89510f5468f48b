# SPDX-License-Identifier: BSD-3-Clause
"""Storages that torch shares already: they cross to a child as they are, for as long as they live."""

from __future__ import annotations

import gc
import unittest
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import GuardedTestCase, descriptors

arena_module = load("process_group._arena")
mapping = load("process_group._mapping")
errors = load("_errors")

COUNT = 100_000


def shared(value: float = 1.0) -> torch.Tensor:
    return torch.full((COUNT,), value).share_memory_()


class Adopted(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.arena = arena_module.Arena()
        self.addCleanup(self.arena.close)

    def theirs(self, place: tuple[int, int], tensor: torch.Tensor) -> Any:
        """What a child makes of it."""
        segment = self.arena.segment(place[0])
        made = mapping.Mapping(segment.fd, segment.nbytes)
        self.addCleanup(made.close)
        return made.tensor(place[1], tensor.dtype, tuple(tensor.shape))

    def test_a_child_sees_the_same_memory(self) -> None:
        tensor = shared()
        part = tensor[COUNT // 2 :]
        address = tensor.data_ptr()
        theirs = self.theirs(self.arena.adopt(part), part)
        theirs.fill_(5.0)
        self.assertEqual((float(tensor[0]), float(tensor[-1])), (1.0, 5.0))
        self.assertEqual(tensor.data_ptr(), address)

    def test_the_same_storage_is_adopted_once(self) -> None:
        tensor = shared()
        first = self.arena.adopt(tensor)
        before = descriptors()
        self.assertEqual(self.arena.adopt(tensor), first)
        number, offset = self.arena.adopt(tensor.view(2, -1)[1])
        self.assertEqual((number, offset), (first[0], COUNT // 2 * 4))
        self.assertEqual(descriptors(), before)

    def test_what_is_copied_instead(self) -> None:
        self.assertIsNone(self.arena.adopt(torch.ones(COUNT)))
        self.assertIsNone(self.arena.adopt(torch.ones(4).share_memory_()))
        with mock.patch.object(arena_module, "ADOPTED", 3):
            kept = [shared() for _ in range(5)]
            places = [self.arena.adopt(tensor) for tensor in kept]
            self.assertEqual([place is None for place in places], [False] * 3 + [True] * 2)

    def test_a_storage_that_dies_is_given_up(self) -> None:
        before = descriptors()
        number, _ = self.arena.adopt(shared())
        gc.collect()
        self.assertEqual(self.arena.forget_idle(0.0), [number])
        self.assertEqual(self.arena.forget_idle(0.0), [])
        self.assertEqual(descriptors(), before)
        with self.assertRaises(errors.StateError):
            self.arena.segment(number)
        # what comes to lie at its address, shared or not, is not taken for it
        for _ in range(20):
            self.assertNotEqual(self.arena.adopt(shared())[0], number)
            self.assertIsNone(self.arena.adopt(torch.ones(COUNT)))

    def test_by_the_other_sharing_strategy_nothing_is_asked_for(self) -> None:
        tensor = shared()
        # only pretended: a process that shares by file names keeps a helper of torch's for good
        with mock.patch.object(arena_module, "_strategy", return_value="file_system"):
            self.assertIsNone(self.arena.adopt(tensor))

    def test_takes_no_descriptors(self) -> None:
        tensors = [shared() for _ in range(3)]
        before = descriptors()
        for tensor in tensors:
            self.arena.adopt(tensor)
        self.assertEqual(descriptors(), before)
        self.arena.close()
        self.assertEqual(descriptors(), before)
        with self.assertRaises(errors.StateError):
            self.arena.adopt(tensors[0])


if __name__ == "__main__":
    unittest.main()
