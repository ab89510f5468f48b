# SPDX-License-Identifier: BSD-3-Clause
"""Device tensors in a child: the order of streams and events, lives of memory, failures after the queueing.

On a stand-in for the device, whose streams go on in a random order, or not at all; see ``_fake_device``.
"""

from __future__ import annotations

import random
import unittest
import weakref
from typing import Any

import torch
import torch._jit_internal

from tests import load
from tests._support import wait_until
from tests.process_group._fake_child import FakeCase, ThreadChild

errors = load("_errors")
handle = load("process_group._handle")


class Order(FakeCase):
    def test_the_op_comes_after_what_was_queued_and_before_what_is_queued_after_the_wait(self) -> None:
        self.start()
        tensor = self.tensor(1.0, 2.0)
        self.add(tensor, 1)
        work = self.issue("allreduce", tensor)
        self.assertTrue(work.wait())
        self.add(tensor, 10)
        self.assertEqual(self.values(tensor), [1.0, 2.0], "nothing has run yet: nobody waited for the device")
        self.assertFalse(work.is_completed())
        self.assertTrue(self.device.finish())
        self.assertEqual(self.values(tensor), [14.0, 16.0])
        self.assertTrue(work.is_completed() and work.is_success())
        self.assertIs(work.result()[0], tensor)

    def test_any_order_of_the_device(self) -> None:
        for seed in range(25):
            with self.subTest(seed=seed):
                self.start(seed)
                self.one_schedule(random.Random(seed))
                self.session.close()

    def one_schedule(self, choose: random.Random) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        wholes = [self.device.tensor(base) for _ in range(3)]
        expected = [base.clone() for _ in wholes]
        shapes = [base, base.t(), base[:, ::2], base[1:, 1:3], base[1]]
        pending: list[list[Any]] = [[] for _ in wholes]
        for _ in range(40):
            at, shape = choose.randrange(len(wholes)), choose.choice(shapes)
            place = shape.shape, shape.stride(), shape.storage_offset()
            view, wanted = wholes[at].as_strided(*place), expected[at].as_strided(*place)
            action = choose.random()
            if action < 0.4:
                pending[at].append(self.issue("allreduce", view))
                wanted *= 2
            elif action < 0.7:
                for work in choose.sample(pending[at], len(pending[at])):
                    work.wait()
                pending[at].clear()
                self.add(view, at)
                wanted += at
            else:
                for _ in range(choose.randrange(20)):
                    self.device.step()
        for works in pending:
            for work in works:
                work.wait()
        self.assertTrue(self.device.finish())
        self.assertEqual([self.values(whole) for whole in wholes], [each.tolist() for each in expected])

    def test_exactly_the_elements_of_a_view_are_written(self) -> None:
        self.start()
        whole = self.device.tensor(torch.arange(12.0).reshape(3, 4))
        self.issue("allreduce", whole[:, 1:3]).wait()
        self.device.finish()
        wanted = torch.arange(12.0).reshape(3, 4)
        wanted[:, 1:3] *= 2
        self.assertEqual(self.values(whole), wanted.tolist())

    def test_a_receive_that_waits_for_its_peer_holds_up_nobody(self) -> None:
        self.start()
        received, reduced = self.tensor(0.0), self.tensor(3.0)
        first = self.issue("recv", [received], 0, 0)
        second = self.issue("allreduce", reduced)
        second.wait()
        self.device.finish()
        self.assertEqual((self.values(received), self.values(reduced)), ([0.0], [6.0]))
        self.assertTrue(second.is_completed() and not first.is_completed())
        self.group.gate.set()
        self.device.finish()
        self.assertEqual(self.values(received), [7.0])

    def test_a_callback_runs_in_the_order_of_the_stream(self) -> None:
        for early in (True, False):
            with self.subTest(early=early):
                self.start()
                tensor = self.tensor(1.0)
                work = self.issue("allreduce", tensor)
                if not early:
                    work.wait()
                again = work.get_future().then(lambda future: self.add(future.value()[0], 5))
                wait_until(again.done, "the callback")
                self.device.finish()
                self.assertEqual(self.values(tensor), [7.0])

    def test_a_barrier_is_for_the_host(self) -> None:
        self.start()
        work = self.issue("barrier")
        self.assertFalse(work.until_over(0.05))
        self.keep_stepping()
        self.assertTrue(work.wait())

    def test_empty_tensors(self) -> None:
        self.start()
        self.assertTrue(self.issue("allreduce", self.device.tensor(torch.empty(0, 3))).wait())


class Lives(FakeCase):
    def test_tensors_are_kept_until_the_device_is_done_and_then_let_go_of(self) -> None:
        self.start()
        tensor, other = self.tensor(1.0), self.tensor(1.0)
        storage = weakref.ref(tensor.untyped_storage())
        self.issue("allreduce", tensor).wait()
        del tensor
        self.assertIsNotNone(storage())
        self.issue("allreduce", other).wait()
        self.assertIsNotNone(storage())
        self.device.finish()
        self.issue("allreduce", other).wait()
        self.assertIsNone(storage())
        wait_until(lambda: sorted(self.device.counters.values()) == [0, 1], "the child has dropped it")

    def test_without_further_ops_memory_goes_too(self) -> None:
        self.start()
        tensor = self.tensor(1.0)
        self.issue("allreduce", tensor).wait()
        self.device.finish()
        del tensor
        wait_until(lambda: set(self.device.counters.values()) == {0}, "the chores have let go of it")

    def test_events_and_exports_are_used_again(self) -> None:
        self.start()
        tensor = self.tensor(1.0)
        for _ in range(50):
            self.issue("allreduce", tensor).wait()
            self.device.finish()
        self.assertEqual((self.device.log.count("share"), self.device.log.count("open")), (1, 1))
        self.assertLessEqual(len(self.device._events), 4)

    def test_a_later_wait_is_not_for_another_op(self) -> None:
        self.start()
        first, second = self.tensor(1.0), self.tensor(1.0)
        work = self.issue("allreduce", first)
        work.wait()
        self.device.finish()
        self.issue("allreduce", second).wait()  # with the events of the first
        before = len(self.device.current_stream(0).queue)
        work.wait()
        self.assertEqual(len(self.device.current_stream(0).queue), before)

    def test_a_killed_child_leaves_nothing_in_limbo(self) -> None:
        self.start()
        done, open_ = self.tensor(1.0), self.tensor(1.0)
        self.issue("allreduce", done).wait()
        self.device.finish()
        work = self.issue("recv", [open_], 0, 0)
        work.wait()
        self.child.kill()
        self.broken()
        wait_until(lambda: self.session._dead, "the child is buried")
        with self.assertRaises(errors.ChildError):
            work.wait()
        del done, open_, work
        wait_until(lambda: set(self.device.counters.values()) == {0}, "all counters are released")

    def test_the_next_child_is_told_anew(self) -> None:
        self.start()
        tensor = self.tensor(1.0)
        self.issue("allreduce", tensor).wait()
        self.device.finish()
        old, self.session = self.session, self.new_session(ThreadChild(self.device))
        old.supersede()
        self.issue("allreduce", tensor).wait()
        self.device.finish()
        self.assertEqual(self.values(tensor), [4.0])
        self.assertEqual((self.device.log.count("share"), self.device.log.count("open")), (1, 2))

    def test_an_abort_lets_the_device_leave_what_is_queued(self) -> None:
        self.start()
        self.keep_stepping()
        self.child.hesitate(0.05)  # or it might have done so before anybody thinks of killing it
        work = self.issue("recv", [self.tensor(1.0)], 0, 0)
        work.wait()
        self.session.abort("enough")
        wait_until(lambda: self.session._dead, "the child is buried")
        self.assertTrue(self.group.aborted)
        wait_until(self.device.finish, "no stream waits for ever")


class Futures(unittest.TestCase):
    def test_a_failed_future_of_a_device_looks_for_tensors_once(self) -> None:
        """torch does so when it ends, and C++ later to read them, which has to raise."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        seen: list[Any] = []
        future._set_unwrap_func = lambda raises: None  # type: ignore[assignment, method-assign]
        future.set_result = seen.append  # type: ignore[assignment, method-assign]
        handle.fail(future, ValueError("late"), 1)
        extract = torch._jit_internal._extract_tensors
        self.assertEqual(extract(seen[0]), [])
        with self.assertRaisesRegex(ValueError, "late"):
            extract(seen[0])


class Failures(FakeCase):
    def test_an_error_on_the_device_shows_in_errored(self) -> None:
        self.start()
        self.group.fails = RuntimeError("remote process exited")
        self.assertTrue(self.issue("allreduce", self.tensor(1.0)).wait(), "it is queued")
        error = self.broken()
        self.assertIsInstance(error, errors.RemoteFailure)
        for text in ("remote process exited", "allreduce (op 0) on fake"):
            self.assertIn(text, str(error))
        self.assertTrue(self.group.aborted)
        with self.assertRaises(errors.RemoteFailure):
            self.issue("allreduce", self.tensor(1.0))

    def test_an_op_that_the_device_does_not_end_breaks_the_group(self) -> None:
        self.start()
        self.issue("recv", [self.tensor(1.0)], 0, 0, timeout_s=0.3).wait()
        error = self.broken()
        self.assertIn("DeadlineExceeded", str(error))
        self.assertIn("recv (op 0) on fake", str(error))
        self.assertTrue(self.group.aborted)

    def test_a_refusal_of_the_backend_harms_nobody(self) -> None:
        self.start()
        with self.assertRaises(errors.UnsupportedOp):
            self.issue("send", [self.tensor(1.0)], 0, 0).wait()
        tensor = self.tensor(1.0)
        self.issue("allreduce", tensor).wait()
        self.device.finish()
        self.assertEqual(self.values(tensor), [2.0])

    def test_ops_for_host_memory_alone_are_refused_before_they_start(self) -> None:
        self.start()
        tensor = self.tensor(1.0)
        with self.assertRaisesRegex(errors.UnsupportedOp, "fake can scatter tensors on the CPU only"):
            self.issue("scatter", [tensor], [[tensor]]).wait()

    def test_memory_that_cannot_be_exported(self) -> None:
        self.start()
        self.device.refuses = True
        with self.assertRaisesRegex(errors.UnsupportedOp, "expandable_segments"):
            self.issue("allreduce", self.tensor(1.0))
        self.device.refuses = False
        self.assertTrue(self.issue("allreduce", self.tensor(1.0)).wait())

    def test_memory_that_the_child_cannot_open(self) -> None:
        self.start()
        tensor = self.tensor(1.0)
        opens, self.device.open = self.device.open, lambda *args: 1 / 0  # type: ignore[assignment, method-assign]
        for _ in range(2):
            with self.assertRaisesRegex(errors.UnsupportedOp, "cannot open .*expandable_segments"):
                self.issue("allreduce", tensor).wait()
        self.device.open = opens  # type: ignore[method-assign]
        self.assertTrue(self.issue("allreduce", self.tensor(1.0)).wait())

    def test_tensors_on_two_kinds_of_device(self) -> None:
        self.start()
        with self.assertRaisesRegex(errors.UnsupportedOp, "cpu and meta"):
            self.issue("allreduce", [self.tensor(1.0), torch.ones(1)])

    def test_a_view_whose_memory_is_freed_meanwhile(self) -> None:
        self.start()
        whole = self.device.tensor(torch.ones(4, 4))
        gone = whole[:, 1]
        whole.untyped_storage().resize_(0)
        with self.assertRaises(errors.StateError):
            self.issue("allreduce", gone)


if __name__ == "__main__":
    unittest.main()
