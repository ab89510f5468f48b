# SPDX-License-Identifier: BSD-3-Clause
"""NCCL in this process, without the watchdog that ends the trainer.

torch's own answer to an op that does not end is to end the process, since a blocking communicator cannot be left
otherwise. So the communicator is made non-blocking here, torch's watchdog is told through its documented variables
to touch nothing, and a thread of ours looks at the ops instead: one that is not done when its time is over is
noted in ``errored()`` and the communicator aborted, which ends what is queued on the device. This needs an NCCL
that can abort a communicator that hangs (2.25 and later); before that, and for what hangs in the driver, there is
ProcessGroupBabyNCCL.

Threads: ops from any thread; ``_Overseer`` has one of its own per epoch.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from .._deadline import Deadline
from .._errors import UnsupportedOp
from ._in_process import Epoch, InProcessGroup
from ._native import explained, stage
from ._ops import Op, c10d, call, walk

__all__ = ["ProcessGroupNCCL"]

# torch reads these when it makes an NCCL group; whatever the user has set stays. By torch's documentation:
# no handling of errors by ending or cleaning up the process; no thread that ends it when the watchdog is stuck;
# no CUDA error thrown from a thread where nobody catches it; no dump.
_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
# How long torch polls a non-blocking communicator for, in seconds; 30 minutes where it is not set. Read once per
# process, so the timeout of the first group counts.
_NONBLOCKING = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
# How often finished ops are let go of, with their tensors; and how late an op may be noticed. An event query per
# op in flight costs a microsecond.
_SWEEP_S = 0.1
# torch's limit, beyond ours, so that the overseer is the first to act.
_FAR_S = 86_400.0


class _Overseer:
    """Looks at the ops of one epoch and reports the first that is late. ``watch`` from any thread."""

    def __init__(self, late: Callable[[Deadline, str], None]) -> None:
        self._late = late
        self._ops: collections.deque[tuple[Deadline, str, Work]] = collections.deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nccl overseer", daemon=True)
        self._thread.start()

    def watch(self, limit_s: float, what: str, work: Work) -> None:
        self._ops.append((Deadline(limit_s), what, work))

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def active(self) -> int:
        return len(self._ops)

    def _run(self) -> None:
        while not self._stopped.wait(_SWEEP_S):
            left = []
            for _ in range(len(self._ops)):
                entry = self._ops.popleft()
                if not entry[2].is_completed():
                    left.append(entry)
            self._ops.extendleft(reversed(left))
            for deadline, what, _ in left:
                if deadline.expired():
                    self._late(deadline, what)
                    self._ops.clear()
                    return
        self._ops.clear()


class ProcessGroupNCCL(InProcessGroup):
    """NCCL in this process, over and over with new peers.

    ``wait()`` makes the current CUDA stream wait, not the host; an op that is late by the group's timeout ends by
    an abort of the communicator, and shows in ``errored()``. Ask it once a step, after a synchronisation.

    Args:
        timeout: a timedelta or seconds, for ``configure`` and for every op.

    Raises:
        UnsupportedOp: at ``configure``, where this torch has no NCCL.
    """

    backend_name = "nccl"
    devices = ("cuda",)

    def _create(self, store: Store, rank: int, size: int, global_ranks: list[int]) -> Epoch:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise UnsupportedOp(
                f"torch {torch.__version__} here has no NCCL or no CUDA device: use ProcessGroupGloo", backend="nccl"
            )
        options = c10d.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=_FAR_S)
        options.global_ranks_in_group = global_ranks
        device = torch.device("cuda", torch.cuda.current_device())
        native: Any = dist.ProcessGroup(store, rank, size)
        native._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        with _watchdog_off(self._timeout_s):
            backend = c10d.ProcessGroupNCCL(store, rank, size, options)
            backend._set_sequence_number_for_group()
            backend.eager_connect_single_device(device)
        native._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        epoch = Epoch(native, backend, rank, size, self._timeout_s)

        def late(deadline: Deadline, what: str) -> None:
            epoch.fail(deadline.exceeded(what, "the communicator was aborted; configure() the group again"))
            self._break(epoch)

        epoch.overseer = _Overseer(late)
        return epoch

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        epoch = self._ready(op.name)
        tensors = [tensor for _, tensor in walk(op, values)]
        values, _ = stage(op, values, self.backend_name)  # refuses strided tensors, which NCCL does not take either
        try:
            work: Work = call(op, epoch.native, values, options)
        except (RuntimeError, ValueError) as error:
            raise explained(error, op, tensors, options, self.backend_name) from error
        epoch.overseer.watch(self._limit_s(options), f"{op.name} on nccl, rank {epoch.rank} of {epoch.size}", work)
        return work

    def _break(self, epoch: Epoch) -> None:
        epoch.overseer.stop()
        epoch.backend.abort()

    def _is_busy(self, epoch: Epoch) -> bool:
        return True  # an abort is the only way out that waits for nobody

    def num_active_work(self) -> int:
        """How many ops are not finished, as of at most 0.1 s ago."""
        epoch = self._epoch
        return 0 if epoch is None else int(epoch.overseer.active())


@contextlib.contextmanager
def _watchdog_off(timeout_s: float) -> Iterator[None]:
    """Set torch's variables where the user has not, while a group is made."""
    added = {name: value for name, value in _WATCHDOG_OFF.items() if name not in os.environ}
    os.environ.setdefault(_NONBLOCKING, str(max(1, round(timeout_s))))  # stays: torch reads it at the first wait
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
