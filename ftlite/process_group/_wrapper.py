# SPDX-License-Identifier: BSD-3-Clause
"""Groups around another group: plain, swallowing errors, injecting errors, and under a manager.

Rules of this file: a wrapper owns no communication; what it does not change goes to the group inside; what it
reports about an op is told to the epoch (the time between two ``configure`` calls) in which the op was issued,
so that a late failure cannot spoil the next one. Thread-safe as far as the group inside is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from .._deadline import Timeout
from .._errors import StateError, UnsupportedOp
from ._handle import OpWork, finished
from ._interface import ProcessGroup
from ._ops import Op, call, results

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroupWrapper",
]


class ProcessGroupWrapper(ProcessGroup):
    """A group that hands everything to another one; subclasses override what they change.

    Args:
        timeout: a timedelta or seconds, for what the wrapper itself waits for.
        pg: the group inside, ours or one of torch's own (which cannot be configured).
    """

    def __init__(self, timeout: Timeout = 60.0, pg: dist.ProcessGroup | None = None) -> None:
        super().__init__(timeout)
        self._pg = pg

    @property
    def parent(self) -> dist.ProcessGroup:
        """The group inside.

        Raises:
            StateError: there is none.
        """
        if self._pg is None:
            raise StateError(f"{type(self).__name__} was made without a group: give pg=", state="empty")
        return self._pg

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Configure the group inside, as :meth:`ProcessGroup.configure`.

        Raises:
            UnsupportedOp: it is one of torch's own.
        """
        self._ours("configure").configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        work: Work = call(op, self.parent, values, options)
        return work

    def size(self) -> int:
        """That of the group inside."""
        return int(self.parent.size())

    def rank(self) -> int:
        """That of the group inside."""
        return int(self.parent.rank())

    def getBackendName(self) -> str:
        """That of the group inside."""
        return str(self.parent.name())

    def abort(self, reason: Any = None) -> None:
        """Abort the group inside."""
        group: Any = self._pg
        if isinstance(group, ProcessGroup):
            group.abort(reason)
        elif hasattr(group, "abort"):  # torch's own, after 2.6
            group.abort()

    def shutdown(self) -> None:
        """Shut the group inside down."""
        group: Any = self._pg
        if not self._is_unregistering() and hasattr(group, "shutdown"):
            group.shutdown()

    def errored(self) -> Exception | None:
        """That of the group inside."""
        return self._pg.errored() if isinstance(self._pg, ProcessGroup) else None

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the timeout here and in the group inside."""
        super().set_timeout(timeout)
        if isinstance(self._pg, ProcessGroup):
            self._pg.set_timeout(timeout)

    def num_active_work(self) -> int:
        """That of the group inside."""
        return self._pg.num_active_work() if isinstance(self._pg, ProcessGroup) else 0

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """That of the group inside."""
        if timeout is None:
            timeout = timedelta(seconds=self._timeout_s)
        group: Any = self.parent
        group.monitored_barrier(timeout, wait_all_ranks)

    def _ours(self, attempted: str) -> ProcessGroup:
        group = self.parent
        if not isinstance(group, ProcessGroup):
            raise UnsupportedOp(
                f"{attempted}() reached a {type(group).__name__} of torch, which cannot: wrap one of this package",
                backend=type(group).__name__,
                op=attempted,
            )
        return group

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pg!r})"


class _SwallowingWork(OpWork):
    """Ends well whatever happens to ``inner``, and tells ``report`` of an error first."""

    def __init__(self, inner: Work, tensors: list[Any], report: Callable[[Exception], None]) -> None:
        super().__init__("an op whose errors are swallowed", 0.0, tensors)
        self._inner = inner
        self._report = report
        self._asked = False

    def source_rank(self) -> int:
        """The rank that a receive got its tensor from. Raises as the Work inside does."""
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def _await(self, limit_s: float, slack_s: float) -> None:
        try:
            # zero is how C++ says "no time given": the inner group's timeout
            self._inner.wait(timedelta(seconds=limit_s))
        except Exception as error:
            self._report(error)
        self.settle()

    def _start(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, True
        if not asked:
            self._inner.get_future().add_done_callback(self._inner_done)

    def _inner_done(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            self._report(error)
        self.settle()


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """A group whose ops never fail: the first error is kept, and until ``configure`` every later op does nothing.

    For training code that is not to be changed: what the tensors hold after an error is for whoever looks at
    ``error()`` at the end of the step to throw away.
    """

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._first: Exception | None = None
        self._epoch = 0
        self._guard = threading.Lock()

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Configure the group inside and forget the error."""
        with self._guard:
            self._epoch += 1
            self._first = None
        super().configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )

    def report_error(self, e: Exception) -> None:
        """Have every op until the next ``configure`` do nothing, because of ``e``."""
        self._note(self._epoch, e)

    def error(self) -> Exception | None:
        """The first error since ``configure``, or None."""
        return self._first

    def errored(self) -> Exception | None:
        """As ``error()``, and what the group inside says."""
        return self._first or super().errored()

    def _note(self, epoch: int, error: Exception) -> None:
        with self._guard:
            if epoch == self._epoch and self._first is None:
                self._first = error

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        with self._guard:
            epoch, skip = self._epoch, self._first is not None
        if skip:
            return finished(op.name, results(op, values))
        try:
            inner = super()._issue(op, values, options)
        except Exception as error:
            self._note(epoch, error)
            return finished(op.name, results(op, values))
        return _SwallowingWork(inner, results(op, values), lambda error: self._note(epoch, error))


class _FailingWork(OpWork):
    """Ends with ``error`` when ``inner`` has ended."""

    def __init__(self, inner: Work, tensors: list[Any], error: Exception) -> None:
        super().__init__("an op that is to fail", 0.0, tensors)
        self._inner = inner
        self._planned = error
        inner.get_future().add_done_callback(lambda _: self._fail())

    def _await(self, limit_s: float, slack_s: float) -> None:
        self._inner.wait(timedelta(seconds=limit_s))
        self._fail()

    def _fail(self) -> None:
        self.settle(self._planned)


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """A group for tests, which lets the next op fail."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._next_error: Exception | None = None

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Configure the group inside; an error not yet used is forgotten."""
        self._next_error = None
        super().configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )

    def report_future_error(self, e: Exception) -> None:
        """Let the next op run, and then end with ``e``: its future and its wait."""
        self._next_error = e

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        inner = super()._issue(op, values, options)
        error, self._next_error = self._next_error, None
        if error is None:
            return inner
        return _FailingWork(inner, results(op, values), error)


class ManagedProcessGroup(ProcessGroupWrapper):
    """The group of a manager, as a model sees it: its size is the number of participants, and its ops never fail.

    Args:
        manager: has the group as ``_pg``; its ``allreduce(tensor, reduce_op=)`` averages or sums over the
            participants, ``num_participants()`` counts them, ``report_error(exception)`` takes note of a failure.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        if op.name == "allreduce":
            tensors = values[0]
            if len(tensors) != 1:
                raise UnsupportedOp(
                    f"a managed allreduce takes one tensor and got {len(tensors)}: call it once for each",
                    backend=self.getBackendName(),
                    op=op.name,
                )
            managed: Work = self._manager.allreduce(tensors[0], reduce_op=options.reduceOp)
            return managed
        report = self._manager.report_error
        try:
            inner = super()._issue(op, values, options)
        except Exception as error:
            report(error)
            return finished(op.name, results(op, values))
        return _SwallowingWork(inner, results(op, values), report)

    def size(self) -> int:
        """How many replicas take part in the present step."""
        return int(self._manager.num_participants())
