# SPDX-License-Identifier: BSD-3-Clause
"""A Work in Python: settled once, typed errors in Python and real ones in C++, kept alive where C++ would lose it."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import load
from tests._support import WAIT_S, GuardedTestCase, wait_until

handle = load("process_group._handle")
interface = load("process_group._interface")
errors = load("_errors")


class Settling(GuardedTestCase):
    def make(self, limit_s: float = 20.0) -> Any:
        return handle.OpWork("an op", limit_s, [torch.ones(2)])

    def test_the_first_counts(self) -> None:
        work = self.make()
        self.assertTrue(work.settle())
        self.assertFalse(work.settle(ValueError("late")))
        self.assertTrue(work.wait())
        self.assertIsNone(work.exception())
        self.assertTrue(work.is_success())

    def test_one_of_many_threads_counts(self) -> None:
        for _ in range(50):
            work = self.make()
            future = work.get_future()
            won: list[bool] = []
            threads = [threading.Thread(target=lambda w=work, s=won: s.append(w.settle())) for _ in range(4)]
            for thread in threads:
                thread.start()
            work.wait()
            self.assertTrue(future.done())
            for thread in threads:
                thread.join()
            self.assertEqual(sorted(won), [False, False, False, True])

    def test_a_short_wait_ends_and_the_op_goes_on(self) -> None:
        work = self.make()
        with self.assertRaises(errors.DeadlineExceeded) as caught:
            work.wait(0.01)
        self.assertEqual(caught.exception.limit_s, 0.01)
        work.settle()
        self.assertTrue(work.wait(timedelta(0)))

    def test_a_failure(self) -> None:
        work = self.make()
        future = work.get_future()
        seen: list[Any] = []
        then = future.then(lambda done: seen.append(done) or 1)
        after = future.then(lambda done: done.value())
        work.settle(errors.StateError("out", state="x"))
        for call in (work.wait, future.value, future.wait, work.get_future().wait):
            with self.assertRaises(errors.StateError) as caught:
                call()
            self.assertEqual(caught.exception.state, "x")
        self.assertEqual(then.wait(), 1)
        with self.assertRaisesRegex(RuntimeError, "out"):
            after.wait()

    def test_a_callback_may_wait_for_its_op(self) -> None:
        work = self.make()
        told: list[bool] = []
        work.get_future().add_done_callback(lambda _: told.append(work.wait() and work.is_completed()))
        work.settle()
        self.assertEqual(told, [True])

    def test_listeners_come_first(self) -> None:
        work = self.make()
        order: list[str] = []
        work.get_future().add_done_callback(lambda _: order.append("future"))
        work.on_settled(lambda _: order.append("listener"))
        work.settle()
        work.on_settled(lambda _: order.append("late"))
        self.assertEqual(order, ["listener", "future", "late"])


class Failing(interface.ProcessGroup):
    """Every op has failed, or succeeded, when its call returns."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def _issue(self, op: Any, values: list[Any], options: Any) -> Any:
        if op.name == "allgather":
            for out in values[0][0]:
                out.copy_(values[1][0])
            return handle.finished(op.name, values[0][0])
        return handle.finished(op.name, values[0], self.error if op.name == "allreduce" else None)

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "failing"


class UnderTheReducer(GuardedTestCase):
    """torch's own way to fail a future ends the process there, by a segmentation fault."""

    def test_an_error_is_an_error(self) -> None:
        group = Failing(errors.StateError("the cable is out"))
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        with self.assertRaisesRegex(RuntimeError, "the cable is out"):
            wrapped(torch.ones(1, 2)).sum().backward()

    def test_ops_that_are_done_at_once(self) -> None:
        group = Failing(None)
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        wrapped(torch.ones(1, 2)).sum().backward()
        self.assertEqual(group._kept, {})


class Keeping(GuardedTestCase):
    def test_until_it_has_ended_and_was_looked_at(self) -> None:
        for end_first in (True, False):
            kept: dict[int, Any] = {}
            work = handle.OpWork("an op", 20.0, [])
            work.keep_in(kept)
            alive = weakref.ref(work)
            if end_first:
                work.settle()
                self.assertEqual(len(kept), 1)
                work.get_future()
            else:
                work.get_future()
                self.assertEqual(len(kept), 1)
                work.settle()
            self.assertEqual(kept, {})
            del work
            gc.collect()
            self.assertIsNone(alive())

    def test_it_outlives_its_last_reference(self) -> None:
        kept: dict[int, Any] = {}
        work = handle.OpWork("an op", 20.0, [])
        work.keep_in(kept)
        alive = weakref.ref(work)
        del work
        gc.collect()
        self.assertIsNotNone(alive())

    def test_what_nobody_looks_at_is_bounded(self) -> None:
        kept: dict[int, Any] = {}
        for _ in range(5 * handle._KEPT):
            handle.finished("an op", []).keep_in(kept)
        self.assertLessEqual(len(kept), 2 * handle._KEPT)

    def test_what_runs_is_not_let_go(self) -> None:
        kept: dict[int, Any] = {}
        running = [handle.OpWork("an op", 20.0, []) for _ in range(3 * handle._KEPT)]
        for work in running:
            work.keep_in(kept)
        self.assertEqual(len(kept), len(running))


class Swallowing(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.package = load("process_group")

    def test_errors_are_kept_and_ops_end_well(self) -> None:
        inner = self.package.ProcessGroupDummy()
        fake = self.package.FakeProcessGroupWrapper(inner)
        group = self.package.ErrorSwallowingProcessGroupWrapper(fake)
        self.assertTrue(group.allreduce([torch.ones(1)]).wait())
        self.assertIsNone(group.error())
        fake.report_future_error(ValueError("first"))
        tensor = torch.ones(1)
        self.assertEqual(group.allreduce([tensor]).get_future().wait()[0].data_ptr(), tensor.data_ptr())
        wait_until(lambda: str(group.error()) == "first", "the error is kept")
        self.assertIs(group.errored(), group.error())
        fake.report_future_error(ValueError("second"))
        self.assertTrue(group.allreduce([tensor]).wait())  # it never reaches the group inside
        self.assertEqual(str(group.error()), "first")
        group.configure("127.0.0.1:1/x", "r", 0, 1)
        self.assertIsNone(group.error())
        self.assertEqual(inner.configure_count, 1)

    def test_where_a_receive_is_from(self) -> None:
        parent = Late()
        work = self.package.ErrorSwallowingProcessGroupWrapper(parent).recv_anysource([torch.ones(1)], 0)
        with self.assertRaisesRegex(RuntimeError, "sourceRank"):
            work._source_rank()
        parent.works[0]._source_rank = lambda: 3
        self.assertEqual((work._source_rank(), work.source_rank()), (3, 3))

    def test_a_late_error_does_not_spoil_the_next_epoch(self) -> None:
        group = self.package.ErrorSwallowingProcessGroupWrapper(Late())
        work = group.allreduce([torch.ones(1)])
        future = work.get_future()
        group.parent.works[0].settle(ValueError("late"))
        self.assertIsNotNone(group.error())
        work = group.allreduce([torch.ones(1)])
        group.configure("", "", 0, 1)
        work = group.allreduce([torch.ones(1)])
        group.configure("", "", 0, 1)
        work.get_future()
        group.parent.works[1].settle(ValueError("of an earlier time"))
        self.assertTrue(future.done())
        self.assertTrue(work.wait())
        self.assertIsNone(group.error())

    def test_the_next_op_fails_and_no_other(self) -> None:
        group = self.package.FakeProcessGroupWrapper(self.package.ProcessGroupDummy())
        group.report_future_error(ValueError("planned"))
        work = group.allreduce([torch.ones(1)])
        with self.assertRaisesRegex(ValueError, "planned"):
            work.get_future().wait()
        with self.assertRaisesRegex(ValueError, "planned"):
            work.wait()
        self.assertTrue(group.allreduce([torch.ones(1)]).wait())

    def test_a_manager_is_asked_and_told(self) -> None:
        manager = Manager(self.package.FakeProcessGroupWrapper(self.package.ProcessGroupDummy()))
        group = self.package.ManagedProcessGroup(manager)
        self.assertEqual((group.size(), group.getSize(), group.getBackendName()), (5, 5, "dummy"))
        tensor = torch.ones(2)
        group.allreduce([tensor], dist.ReduceOp.AVG).wait()
        self.assertEqual(manager.asked, [dist.ReduceOp.AVG])
        manager._pg.report_future_error(ValueError("planned"))
        self.assertTrue(group.broadcast([tensor], 0).wait())
        self.assertEqual([str(error) for error in manager.told], ["planned"])
        with self.assertRaises(errors.UnsupportedOp):
            group.allreduce([tensor, tensor])

    def test_the_dummy_is_a_group_of_one(self) -> None:
        group = self.package.ProcessGroupDummy(0, 1)
        tensor, out = torch.full((2,), 3.0), torch.zeros(2)
        group.allreduce([tensor]).wait()
        group.allgather([[out]], [tensor]).wait()
        self.assertEqual((tensor.tolist(), out.tolist(), group.size(), group.rank()), ([3, 3], [3, 3], 1, 0))
        group.send([tensor], 0, 0).wait()
        group.recv([out], 0, 0).wait()
        self.assertEqual(group.barrier().get_future().wait(), [])
        with self.assertRaises(ValueError):
            self.package.ProcessGroupDummy(1, 2)


class Late(interface.ProcessGroup):
    """Ops end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Any] = []

    def configure(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _issue(self, op: Any, values: list[Any], options: Any) -> Any:
        self.works.append(handle.OpWork(op.name, WAIT_S, values[0]))
        return self.works[-1]


class Manager:
    def __init__(self, group: Any) -> None:
        self._pg = group
        self.asked: list[Any] = []
        self.told: list[Exception] = []

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> Any:
        self.asked.append(reduce_op)
        return self._pg.allreduce([tensor])

    def num_participants(self) -> int:
        return 5

    def report_error(self, error: Exception) -> None:
        self.told.append(error)
