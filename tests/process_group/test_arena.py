# SPDX-License-Identifier: BSD-3-Clause
"""The arena: bounded, shared, reused, and gone when it is closed, but never under a tensor."""

from __future__ import annotations

import gc
import os
import random
import threading
import unittest
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import WAIT_S, GuardedTestCase, descriptors, run_python, wait_until

arena_module = load("process_group._arena")
mapping = load("process_group._mapping")
copy = load("_copy")
staging = load("process_group._staging")
errors = load("_errors")
Deadline = load("_deadline").Deadline

MB = 1 << 20


class ArenaCase(GuardedTestCase):
    limit_bytes = 256 * MB

    def setUp(self) -> None:
        super().setUp()
        self.arena = arena_module.Arena(self.limit_bytes)
        self.addCleanup(self.arena.close)

    def take(self, nbytes: int, limit_s: float = WAIT_S) -> Any:
        return self.arena.take(nbytes, Deadline(limit_s))

    def child_mapping(self, number: int) -> Any:
        """What a child makes of a segment."""
        segment = self.arena.segment(number)
        self.assertEqual(segment.number, number)
        made = mapping.Mapping(segment.fd, segment.nbytes)
        self.addCleanup(made.close)
        return made


class Slots(ArenaCase):
    def test_shared_with_a_child(self) -> None:
        source = torch.arange(1000, dtype=torch.int64)
        slot = self.take(8000)
        copy.copy_bytes(slot.pointer, source.data_ptr(), 8000)
        theirs = self.child_mapping(slot.segment).tensor(slot.offset, torch.int64, (1000,))
        self.assertTrue(torch.equal(theirs, source))
        theirs.neg_()
        copy.copy_bytes(source.data_ptr(), slot.pointer, 8000)
        self.assertEqual(int(source[999]), -999)
        self.assertEqual(slot.nbytes, 8000)
        self.arena.give(slot)

    def test_packed_into_a_slot(self) -> None:
        view = torch.arange(20.0).reshape(4, 5).t()[1:4]
        slot = self.take(view.numel() * 4)
        staging.pack(view, self.arena.tensor(slot, view.dtype, tuple(view.shape)))
        theirs = self.child_mapping(slot.segment).tensor(slot.offset, view.dtype, tuple(view.shape))
        self.assertTrue(torch.equal(theirs, view))
        theirs.mul_(2)
        staging.unpack(self.arena.tensor(slot, view.dtype, tuple(view.shape)), view)
        self.assertEqual(view[0].tolist(), [2.0, 12.0, 22.0, 32.0])
        self.arena.give(slot)

    def test_aligned_and_apart(self) -> None:
        out = [self.take(nbytes) for nbytes in (0, 1, 4, 63, 64, 65, 70_000, MB, 100 * MB)]
        spans = sorted((slot.pointer, slot.pointer + slot.nbytes) for slot in out)
        for (_, end), (start, _) in pairwise(spans):
            self.assertLessEqual(end, start)
        for slot in out:
            self.assertEqual(slot.pointer % 64, 0)
            self.assertEqual(slot.offset % 64, 0)
            self.arena.give(slot)
        self.assertEqual(self.arena.out_bytes(), 0)

    def test_the_same_memory_again(self) -> None:
        for nbytes in (4, 25 * MB):
            first = self.take(nbytes)
            self.arena.give(first)
            again = self.take(nbytes)
            self.assertEqual((again.segment, again.offset), (first.segment, first.offset))
            self.arena.give(again)

    def test_few_segments(self) -> None:
        before = len(descriptors())
        for nbytes in range(0, 200 * MB, 3 * MB):
            self.arena.give(self.take(nbytes))
        # 64, 128 and 256 MB; each is a descriptor of its own and one of its mapping
        self.assertEqual(len(descriptors()) - before, 6)

    def test_given_twice(self) -> None:
        first = self.take(4)
        self.arena.give(first)
        second = self.take(4)
        self.arena.give(first)
        third = self.take(4)
        self.assertNotEqual(second.offset, third.offset)
        self.assertEqual(self.arena.out_bytes(), 128)

    def test_no_memory(self) -> None:
        with mock.patch.object(arena_module, "new_segment_file", side_effect=OSError(24, "Too many open files")):
            with self.assertRaises(OSError):
                self.take(4)
            with self.assertRaises(OSError):
                self.arena.empty((3,), torch.float32)
        with (
            mock.patch.object(arena_module, "Mapping", side_effect=OSError(12, "no memory")),
            self.assertRaises(OSError),
        ):
            self.take(4)
        self.assertEqual(self.arena.out_bytes(), 0)
        self.arena.give(self.take(4))

    def test_unknown_segment(self) -> None:
        with self.assertRaisesRegex(errors.StateError, "no segment 7"):
            self.arena.segment(7)


class Bound(ArenaCase):
    limit_bytes = MB

    def test_waits_until_the_deadline(self) -> None:
        held = self.take(MB // 2)
        self.take(MB // 2)
        with self.assertRaisesRegex(
            errors.DeadlineExceeded, rf"waiting for 4 bytes .* in flight hold {MB} of {MB}: .*wait for some of them"
        ) as caught:
            self.take(4, 0.05)
        self.assertEqual(caught.exception.limit_s, 0.05)
        with self.assertRaises(errors.DeadlineExceeded):
            self.take(4, 0)
        self.arena.give(held)
        self.take(4, 0)

    def test_goes_on_when_there_is_room(self) -> None:
        held = self.take(MB // 2), self.take(MB // 2)
        taken: list[Any] = []
        threads = [threading.Thread(target=lambda: taken.append(self.take(MB // 2))) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: self.arena._waiting == 2, "both wait")
        self.arena.give(held[0])
        wait_until(lambda: len(taken) == 1, "one goes on")
        self.assertTrue(any(thread.is_alive() for thread in threads))
        self.arena.give(held[1])
        for thread in threads:
            thread.join()
        self.assertEqual(len(taken), 2)
        self.assertEqual(self.arena.out_bytes(), MB)

    def test_twice_the_largest_op(self) -> None:
        first = self.take(10 * MB)
        second = self.take(10 * MB)
        with self.assertRaises(errors.DeadlineExceeded):
            self.take(4, 0)
        # the bound stays when they are gone
        self.arena.give(first)
        self.arena.give(second)
        small = [self.take(MB) for _ in range(20)]
        with self.assertRaises(errors.DeadlineExceeded):
            self.take(4, 0)
        self.assertEqual(len(small), 20)

    def test_one_op_of_any_size(self) -> None:
        self.take(4)
        with mock.patch.object(arena_module.Arena, "_wait_for_room", side_effect=AssertionError):
            self.take(300 * MB)

    def test_threads(self) -> None:
        """Never two with one piece of memory, whoever takes and gives."""
        failures: list[str] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            mine: list[Any] = []
            for _ in range(300):
                if mine and (len(mine) > 3 or rng.random() < 0.5):
                    slot, tensor = mine.pop(rng.randrange(len(mine)))
                    if not bool((tensor == number).all()):
                        failures.append(f"{slot} was written to by another thread")
                    self.arena.give(slot)
                else:
                    slot = self.take(rng.choice((1, 100, 5000, 90_000)))
                    tensor = self.arena.tensor(slot, torch.uint8, (slot.nbytes,))
                    tensor.fill_(number)
                    mine.append((slot, tensor))
            for slot, _ in mine:
                self.arena.give(slot)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(self.arena.out_bytes(), 0)


class Idle(ArenaCase):
    def test_after_ten_seconds(self) -> None:
        slot = self.take(4)
        self.assertEqual(self.arena.forget_idle(0.0), [])
        self.assertEqual(self.arena.forget_idle(100.0), [])
        self.arena.give(slot)
        self.assertEqual(self.arena.forget_idle(101.0), [])
        self.assertEqual(self.arena.forget_idle(110.9), [])
        self.assertEqual(self.arena.forget_idle(111.0), [slot.segment])
        with self.assertRaisesRegex(errors.StateError, "no segment"):
            self.arena.segment(slot.segment)
        # a number is never used again
        self.assertNotEqual(self.take(4).segment, slot.segment)

    def test_descriptors_go_with_it(self) -> None:
        before = len(descriptors())
        self.arena.give(self.take(4))
        self.assertGreater(len(descriptors()), before)
        self.arena.forget_idle(0.0)
        self.arena.forget_idle(10.0)
        self.assertEqual(len(descriptors()), before)

    def test_not_under_a_tensor(self) -> None:
        slot = self.take(4)
        tensor = self.arena.tensor(slot, torch.float32, (1,))
        self.arena.give(slot)
        self.arena.forget_idle(0.0)
        self.assertEqual(self.arena.forget_idle(50.0), [])
        tensor.fill_(1)
        self.assertEqual(self.arena.find(tensor), (slot.segment, slot.offset))
        del tensor
        self.assertEqual(self.arena.forget_idle(51.0), [slot.segment])

    def test_on_the_clock(self) -> None:
        self.arena.give(self.take(4))
        self.assertEqual(self.arena.forget_idle(), [])


class UserTensors(ArenaCase):
    def test_a_tensor(self) -> None:
        for shape in ((5,), (2, 3), (), (2, 1, 3)):
            for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn):
                with self.subTest(shape=shape, dtype=dtype):
                    tensor = self.arena.empty(shape, dtype)
                    self.assertEqual((tuple(tensor.shape), tensor.dtype), (shape, dtype))
                    self.assertTrue(staging.plain(tensor))
                    self.assertFalse(tensor._is_view())
                    self.assertTrue(tensor.is_leaf)
                    number, offset = self.arena.find(tensor)
                    raw = self.child_mapping(number).tensor(offset, torch.uint8, (tensor.nbytes,))
                    raw.fill_(1)
                    self.assertEqual(set(tensor.reshape(-1).view(torch.uint8).tolist()), {1})

    def test_found(self) -> None:
        tensors = [self.arena.empty((7, 8), torch.float32) for _ in range(3)]
        slot = self.take(MB)
        for tensor in tensors:
            number, offset = self.arena.find(tensor)
            self.assertEqual(self.arena.find(tensor[2:, 3:]), (number, offset + 4 * (2 * 8 + 3)))
        self.assertEqual(self.arena.find(self.arena.tensor(slot, torch.uint8, (3,))), (slot.segment, slot.offset))
        for tensor in (torch.ones(3), torch.empty(0), self.arena.empty((0, 3), torch.float32)):
            self.assertIsNone(self.arena.find(tensor))
        gone = torch.ones(3)[1:]
        gone.untyped_storage().resize_(0)
        self.assertIsNone(self.arena.find(gone))

    def test_given_back_when_the_storage_dies(self) -> None:
        first = self.arena.empty((2, 3), torch.float32)
        place = self.arena.find(first)
        holder: Any = first
        for step in (lambda t: t.t()[1:], lambda t: t.detach(), lambda t: torch.nn.Parameter(t),
                     lambda t: t.untyped_storage(), lambda s: torch.empty(0).set_(s)):  # fmt: skip
            holder = step(holder)
            del first
            gc.collect()
            first = self.arena.empty((2, 3), torch.float32)
            self.assertNotEqual(self.arena.find(first), place)
        del holder, first
        gc.collect()
        places = {self.arena.find(tensor) for tensor in [self.arena.empty((2, 3), torch.float32) for _ in range(7)]}
        self.assertIn(place, places)

    def test_reused(self) -> None:
        before = len(descriptors())
        for _ in range(100):
            self.arena.empty((4 * MB,), torch.uint8)
        self.assertEqual(len(descriptors()) - before, 2)

    def test_not_in_the_bound(self) -> None:
        tensors = [self.arena.empty((100 * MB,), torch.uint8) for _ in range(4)]
        self.assertEqual(self.arena.out_bytes(), 0)
        self.arena.give(self.take(200 * MB, 0))
        self.assertEqual(len(tensors), 4)

    def test_the_storage_cannot_be_moved(self) -> None:
        tensor = self.arena.empty((3,), torch.float32)
        with self.assertRaises(RuntimeError):
            tensor.untyped_storage().resize_(0)
        with self.assertRaises(RuntimeError):
            tensor.resize_(1000)

    def test_idle(self) -> None:
        tensor = self.arena.empty((3,), torch.float32)
        number = self.arena.find(tensor)[0]
        self.assertEqual(self.arena.forget_idle(0.0), [])
        self.assertEqual(self.arena.forget_idle(50.0), [])
        del tensor
        self.assertEqual(self.arena.forget_idle(60.0), [])
        self.assertEqual(self.arena.forget_idle(70.0), [number])

    def test_freed_by_a_destructor_that_holds_the_lock(self) -> None:
        # the collector may run, and free such a tensor, at any point of any thread
        tensor = self.arena.empty((3,), torch.float32)
        with self.arena._changed:
            del tensor
            gc.collect()
        self.arena.give(self.take(4))

    def test_autograd_and_training(self) -> None:
        weight = torch.nn.Parameter(self.arena.empty((3, 2), torch.float32).fill_(1.0))
        weight.grad = self.arena.empty((3, 2), torch.float32).zero_()
        optimizer = torch.optim.SGD([weight], lr=0.5)
        (weight * 2).sum().backward()
        optimizer.step()
        self.assertEqual(set(weight.flatten().tolist()), {0.0})
        self.assertIsNotNone(self.arena.find(weight))
        self.assertIsNotNone(self.arena.find(weight.grad))


class Closing(ArenaCase):
    def test_everything_fails(self) -> None:
        slot = self.take(4)
        self.arena.close()
        self.arena.close()
        for name, call in {
            "take": lambda: self.take(4),
            "empty": lambda: self.arena.empty((3,), torch.float32),
            "segment": lambda: self.arena.segment(slot.segment),
            "tensor": lambda: self.arena.tensor(slot, torch.uint8, (4,)),
            "forget_idle": lambda: self.arena.forget_idle(),
        }.items():
            with self.subTest(name):
                with self.assertRaisesRegex(errors.StateError, f"{name}.. after the arena was closed") as caught:
                    call()
                self.assertEqual((caught.exception.state, caught.exception.attempted), ("closed", name))
        # a release that comes late is no error, and nothing lies in an arena that is closed
        self.arena.give(slot)
        self.assertIsNone(self.arena.find(torch.ones(3)))

    def test_wakes_whoever_waits(self) -> None:
        self.take(128 * MB), self.take(128 * MB)
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                self.take(4)
            except errors.StateError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: self.arena._waiting == 1, "it waits")
        self.arena.close()
        thread.join()
        self.assertEqual(len(caught), 1)

    def test_tensors_of_users_stay(self) -> None:
        tensor = self.arena.empty((1000,), torch.int32)
        self.arena.close()
        tensor.fill_(3)
        self.assertEqual(int(tensor.sum()), 3000)
        self.assertIsNone(self.arena.find(tensor))

    def test_forgotten(self) -> None:
        # the leak guard looks for descriptors
        before = len(descriptors())
        other = arena_module.Arena()
        other.take(4, Deadline(1))
        tensor = other.empty((3,), torch.int32)
        del other
        gc.collect()
        tensor.fill_(3)
        del tensor
        wait_until(lambda: gc.collect() >= 0 and len(descriptors()) == before, "the descriptors are closed")

    def test_rounds(self) -> None:
        before = len(descriptors())
        for _ in range(50):
            one = arena_module.Arena()
            one.take(4, Deadline(1))
            one.empty((3,), torch.int32)
            one.close()
        gc.collect()
        self.assertEqual(len(descriptors()), before)

    def test_at_exit(self) -> None:
        code = """
import torch
from tests import load
arena = load("process_group._arena").Arena()
slot = arena.take(4, load("_deadline").Deadline(1))
kept = arena.tensor(slot, torch.float32, (1,))
tensor = arena.empty((3,), torch.float32).fill_(1)
view = tensor[1:]
"""
        self.assertEqual(run_python("-c", code, check=True).stderr, "")

    def test_nothing_in_dev_shm(self) -> None:
        # P12: neither a name while it is in use, nor one after kill -9
        code = """
import os, signal, torch
from tests import load
arena = load("process_group._arena").Arena()
slot = arena.take(64 << 20, load("_deadline").Deadline(1))
arena.tensor(slot, torch.uint8, (64 << 20,)).fill_(1)
print(os.readlink(f"/proc/self/fd/{arena.segment(slot.segment).fd}"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        before = set(os.listdir("/dev/shm"))
        done = run_python("-c", code)
        self.assertEqual(done.returncode, -9)
        self.assertNotIn("/dev/shm", done.stdout)
        self.assertIn("(deleted)", done.stdout)
        self.assertLessEqual(set(os.listdir("/dev/shm")), before)


if __name__ == "__main__":
    unittest.main()
