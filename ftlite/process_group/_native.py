# SPDX-License-Identifier: BSD-3-Clause
"""Around torch's own Work: staging of strided tensors, a future where torch has none, errors that say what to do.

Three kinds of native Work need this. Ops on strided tensors ran on packed copies, which go back into the views
before anybody is told. Send, recv and Gloo's reduce_scatter have no future; the first two never say completed
either, and a wait of theirs that times out closes the connection for good, so a native wait always gets the whole
timeout of the group and a shorter one ends here alone. And ops that the backend may refuse by dtype or reduction
say no more than "Invalid scalar type".
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from .._deadline import Deadline
from .._errors import UnsupportedOp
from ._handle import OpWork
from ._ops import Op, arrange, walk
from ._staging import alias, pack, plain, stageable, unpack

__all__ = ["NativeWork", "Pairs", "explained", "future_of", "source_of", "stage", "until_ended"]

_logger = logging.getLogger(__name__)

# The words in which Gloo, NCCL and the dispatcher say that an op, a dtype or a reduction is not for them.
_REFUSALS = re.compile(
    r"invalid scalar type|cannot use reduceop|not support|not implemented|can't be cast|unconvertible|no backend type",
    re.IGNORECASE,
)

# What a thread takes to come back from a wait whose connection is closed: milliseconds, if the machine is not busy.
_DRIVER_S = 2.0

# Whoever waits for this much of an op's own limit waits for all of it, by himself: what is left of a deadline that the
# group has as well is a little less, and a thread for each wait takes as long as the op itself.
_NEARLY = 0.98

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (packed, view to write back to)


def explained(error: Exception, op: Op, tensors: Sequence[torch.Tensor], options: Any, backend: str) -> Exception:
    """``error``, or an UnsupportedOp that names the backend, the op, the dtypes and the reduction where it is one."""
    if isinstance(error, UnsupportedOp) or not _REFUSALS.search(str(error)):
        return error
    dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors})) or "no tensors"
    reduction = getattr(getattr(options, "reduceOp", None), "op", None)
    by = f" by {str(reduction).rpartition('.')[2]}" if reduction is not None else ""
    refused = UnsupportedOp(
        f"{backend} of torch {torch.__version__} cannot {op.name} {dtypes}{by} ({str(error).splitlines()[0]}): "
        "convert the tensor to a dtype and choose an op that it can",
        backend=backend,
        op=op.name,
    )
    refused.__cause__ = error
    return refused


def future_of(work: Work) -> torch.futures.Future[Any] | None:
    """The future of the native ``work``, None where torch has none."""
    try:
        return work.get_future()
    except RuntimeError:
        return None


def source_of(op: Op, work: Work) -> int:
    """The rank that the result of ``work``, which has ended, came from; -1 where there is not one, or nobody knows."""
    if op.receives:
        with contextlib.suppress(RuntimeError):  # not every backend's Work says so
            return int(work._source_rank())
    return -1


def stage(op: Op, values: Sequence[Any], backend: str) -> tuple[list[Any], Pairs]:
    """Put a packed copy in the place of every strided tensor; inputs are read now, outputs written by the Work.

    Raises:
        UnsupportedOp: a strided tensor is not in host memory.
    """
    pairs: Pairs = []

    def one(direction: str, tensor: torch.Tensor) -> torch.Tensor:
        if plain(tensor) or tensor.layout is not torch.strided:
            return alias(tensor)
        if not stageable(tensor):
            if tensor.is_contiguous():
                return alias(tensor)
            raise UnsupportedOp(
                f"{backend} cannot {op.name} a {tensor.device} tensor with gaps (strides {tensor.stride()}): "
                "give it .contiguous() and copy the result back",
                backend=backend,
                op=op.name,
            )
        packed = pack(tensor)
        if direction != "in":
            pairs.append((packed, alias(tensor)))
        return packed

    return arrange(op, values, (one(*each) for each in walk(op, values))), pairs


def until_ended(native: Work | None) -> None:
    """Wait for a native Work, however it ends, without the GIL."""
    try:
        if native is not None:
            native.wait()
    except RuntimeError as error:
        _logger.debug("an op ended with its group: %s", error)


class NativeWork(OpWork):
    """A native Work of the host's memory, with what it lacks.

    Args:
        native: torch's Work.
        op: its line of the table.
        values: what it was issued with; they are kept until it ends.
        pairs: what is to be written back before it ends.
        tensors: the value of the future.
        where: the backend's name and the rank, for messages.
        limit_s: the op's own timeout in seconds.
        give_up: called with the error when the op is late by that, though the backend has not noticed: Gloo
            before torch 2.7 knows the timeout that its group was made with and no other.
    """

    def __init__(
        self,
        native: Work,
        op: Op,
        values: Sequence[Any],
        options: Any,
        pairs: Pairs,
        tensors: list[Any],
        backend: str,
        limit_s: float,
        give_up: Callable[[Exception], None],
    ) -> None:
        super().__init__(f"{op.name} on {backend}", limit_s, tensors)
        self._native = native
        self._op = op
        self._values = values
        self._options = options
        self._pairs = pairs
        self._backend = backend
        self._give_up = give_up
        self._driver: threading.Thread | None = None
        future = future_of(native)
        self._claimed = future is not None  # whether somebody sees to its end
        if future is not None:
            future.add_done_callback(self._future_done)

    def source_rank(self) -> int:
        """The rank that a recv_anysource got its tensor from."""
        return int(self._native._source_rank())

    _source_rank = source_rank

    # --- its end ----------------------------------------------------------------------------------------

    def _future_done(self, future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            self._end(error)
        else:
            self._end(None)

    def _await(self, limit_s: float, slack_s: float) -> None:
        if limit_s >= _NEARLY * self._limit_s and self._claim():
            self._drive()
            return
        deadline = Deadline(limit_s)
        self._start()
        if self._wait_over(limit_s + slack_s):
            return
        if limit_s < self._limit_s:
            raise self._late(deadline)
        self._give_up(deadline.exceeded(self._what, "the group is broken; configure() it again"))

    def _start(self) -> None:
        if self._claim():
            self._driver = threading.Thread(target=self._drive, name=f"wait for {self._what}", daemon=True)
            self._driver.start()

    def _claim(self) -> bool:
        with self._lock:
            claimed, self._claimed = self._claimed, True
        return not claimed

    def _drive(self) -> None:
        """Wait for the native op with the whole timeout, and end."""
        deadline = Deadline(self._limit_s)
        try:
            self._native.wait(timedelta(seconds=self._limit_s))
        except Exception as error:
            if deadline.expired():
                late = deadline.exceeded(self._what, "the connection is closed; configure() the group again")
                late.__cause__ = error
                self._end(late)
            else:
                self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        """Write back, then settle; an op that was ended by an abort writes nothing any more."""
        if error is not None:
            tensors = [tensor for _, tensor in walk(self._op, self._values)]
            error = explained(error, self._op, tensors, self._options, self._backend)
        else:
            error = self._write_back()
        self._values = ()
        self.settle(error)

    def _write_back(self) -> Exception | None:
        with self._lock:  # an abort that comes now waits: after it, nothing is written any more
            pairs, self._pairs = self._pairs, []
            if self._settler is not None:
                return None
            try:
                for packed, view in pairs:
                    unpack(packed, view)
            except Exception as error:  # the view's memory is gone
                return error
        return None

    def until_ended(self) -> None:
        """Wait for the native Work, however it ends; for one whose connections are broken."""
        until_ended(self._native)
        driver = self._driver
        # a daemon thread that comes back from C++ when the interpreter is gone ends the process by an abort
        if driver is not None and driver is not threading.current_thread():
            driver.join(_DRIVER_S)
