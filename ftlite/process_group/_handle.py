# SPDX-License-Identifier: BSD-3-Clause
"""What a collective returns where torch's own Work will not do: a Work in Python, settled once, from any thread.

Invariants: the first settling counts and every later one does nothing; the result is in the tensors before
anybody settles; once ``wait()`` has returned or raised, the future is done. Callbacks of the future run in the
thread that settles, without a lock held, and may wait for this very op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any, NoReturn

import torch
from torch.distributed import Work

from .._deadline import Deadline, Timeout, seconds
from .._errors import DeadlineExceeded
from ._frames import fresh

__all__ = ["OpWork", "fail", "finished"]

# A backend reports its own time-out at the group's limit, and with a better reason than ours. This much longer
# we wait for it: its clock starts when the op does, which on a busy machine is later than the call.
_SLACK_S = 2.0
# How many finished ops that nobody has looked at yet are kept for C++ (see OpWork.keep_in). Functional
# collectives have as many in flight as a model prefetches, some dozens; each may hold a result's tensors.
_KEPT = 1024


class _Failure:
    """What C++ sees as the value of a failed future: it raises where somebody looks for tensors in it.

    torch's ``Future.set_exception`` makes the exception itself the value, which DistributedDataParallel's reducer
    takes for a result without tensors, and reads the first one of none: the trainer ends by a segmentation fault
    (torch 2.6 to 2.13 at least). torch pickles the value to find its tensors, so that is where to raise.
    """

    def __init__(self, error: BaseException, looks: int) -> None:
        self.error = error
        self.looks = looks

    def __reduce__(self) -> Any:
        if self.looks:
            self.looks -= 1
            return int, ()
        raise fresh(self.error)


def _raise(failure: _Failure) -> NoReturn:
    raise fresh(failure.error)


def fail(future: torch.futures.Future[Any], error: BaseException, looks: int = 0) -> None:
    """End ``future`` with ``error``: raised as it is in Python, as a RuntimeError with its text in C++.

    So often is it free to look for tensors: a future that knows devices does so itself, once, when it ends.
    """
    future._set_unwrap_func(_raise)
    future.set_result(_Failure(fresh(error), looks))


class OpWork(Work):
    """One issued op. Any thread may use it; a subclass or a group calls ``settle``.

    Args:
        what: the op for messages, such as "allreduce on gloo, rank 0 of 2".
        limit_s: the group's timeout in seconds, which ``wait()`` without a time means.
        tensors: what the future holds once the op has succeeded.
    """

    def __init__(self, what: str, limit_s: float, tensors: list[Any]) -> None:
        super().__init__()
        self._what = what
        self._limit_s = limit_s
        self._tensors = tensors
        self._lock = threading.Lock()
        self._over = False
        self._awaited: threading.Event | None = None  # made by whoever waits: most ops have ended by then
        self._settler: int | None = None  # the thread that settled it
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._listeners: list[Callable[[OpWork], None]] = []
        self._keeper: MutableMapping[int, OpWork] | None = None
        self._looks_due = 1

    # --- for the group ----------------------------------------------------------------------------------

    def settle(self, error: BaseException | None = None) -> bool:
        """End the op, with ``error`` or well. Returns whether this call did it; later ones do nothing."""
        with self._lock:
            if self._settler is not None:
                return False
            self._error = error
            self._settler = threading.get_ident()
            future = self._future
            listeners, self._listeners = self._listeners, []
        try:
            for listener in listeners:
                listener(self)
            if future is not None and not future.done():
                self._complete(future)
            with self._lock:
                self._over = True
                awaited = self._awaited
            if awaited is not None:
                awaited.set()
        except BaseException:  # Ctrl-C, or no stack or memory is left; it is not settled, and the next call begins anew
            self._listeners[:0] = listeners
            self._over = False
            self._settler = None
            raise
        self._let_go()
        return True

    def on_settled(self, listener: Callable[[OpWork], None]) -> None:
        """Call ``listener(self)`` when the op ends, before anybody who waits is told; now if it has ended."""
        with self._lock:
            if self._settler is None:
                self._listeners.append(listener)
                return
        listener(self)

    def keep_in(self, keeper: MutableMapping[int, OpWork], looks: int = 1) -> None:
        """Have ``keeper`` hold this object until the op has ended and its outcome was asked for ``looks`` times.

        Before torch 2.7, C++ holds the native half of a Work alone: with the last reference in Python the methods
        here are gone, and C++ waits for ever on the native half, which nobody completes.
        """
        with self._lock:
            self._keeper = keeper
            self._looks_due += looks - 1
            keeper[id(self)] = self
        if len(keeper) % _KEPT == 0:  # not at each op, or many ops in flight would be gone through again and again
            for work in [work for work in list(keeper.values()) if work.is_over()][: _KEPT // 2]:
                keeper.pop(id(work), None)
        self._let_go()

    def is_over(self) -> bool:
        """Whether it has ended; unlike ``is_completed`` no sign that anybody cared."""
        return self._over

    # --- torch's Work -----------------------------------------------------------------------------------

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait for the op and return True; its result is in the tensors and the future is done.

        Args:
            timeout: a timedelta or seconds. None and zero mean the group's timeout, since C++ passes zero for none.
                A shorter wait that ends leaves the op as it is.

        Raises:
            DeadlineExceeded: the time ended first.
            Exception: what the op failed with.
        """
        limit_s = 0.0 if timeout is None else seconds(timeout)
        limit_s, slack_s = (limit_s, 0.0) if limit_s else (self._limit_s, _SLACK_S)
        if self._settler != threading.get_ident():  # a callback of this op may wait for it
            self._await(limit_s, slack_s)
        self._look()
        if self._error is not None:
            raise fresh(self._error)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of the op: a list of the tensors it wrote, or its error. One object, however often asked."""
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = self._new_future()
                if self._settler is not None:
                    self._complete(future)
        self._start()
        self._look()
        return future

    def is_completed(self) -> bool:
        """Whether the op has ended, well or not."""
        self._start()
        if not self._over and self._settler != threading.get_ident():
            return False
        self._look()
        return True

    def is_success(self) -> bool:
        """Whether the op has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What the op failed with; None while it runs and when it ended well."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Any]:
        """The tensors that the op wrote."""
        return list(self._tensors)

    def synchronize(self) -> None:
        """Nothing: memory of the host is in order once ``wait`` has returned."""

    def __repr__(self) -> str:
        state = "running" if not self.is_over() else "failed" if self._error is not None else "done"
        return f"<{type(self).__name__} {self._what}: {state}>"

    # --- for subclasses ---------------------------------------------------------------------------------

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _start(self) -> None:
        """Somebody wants to be told of the end without waiting: an op that ends only when waited for starts here."""

    def _await(self, limit_s: float, slack_s: float) -> None:
        deadline = Deadline(limit_s)
        self._start()
        if not self._wait_over(limit_s + slack_s):
            raise self._late(deadline)

    def _wait_over(self, limit_s: float) -> bool:
        """Wait until it has been settled; whether it has, within ``limit_s`` seconds."""
        with self._lock:
            if self._over:
                return True
            awaited = self._awaited
            if awaited is None:
                awaited = self._awaited = threading.Event()
        return awaited.wait(limit_s)

    def _late(self, deadline: Deadline) -> DeadlineExceeded:
        return deadline.exceeded(f"waiting for {self._what}", "the op goes on until the group's timeout")

    # --- inside -----------------------------------------------------------------------------------------

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            fail(future, self._error)
        else:
            future.set_result(self._tensors)

    def _look(self) -> None:
        self._looks_due -= 1
        self._let_go()

    def _let_go(self) -> None:
        if self._keeper is not None and self._looks_due <= 0 and self._over:
            self._keeper.pop(id(self), None)


def finished(what: str, tensors: list[Any], error: BaseException | None = None) -> OpWork:
    """An op that has ended already."""
    work = OpWork(what, 0.0, tensors)
    work.settle(error)
    return work
