# SPDX-License-Identifier: BSD-3-Clause
"""NCCL in this process, without the watchdog that ends the trainer.

torch's own answer to an op that does not end is to end the process, since a blocking communicator cannot be left
otherwise. So the communicator is made non-blocking here, torch's watchdog is told through its documented variables
to touch nothing, and a thread of ours looks at the ops instead: one that is not done when its time is over is
noted in ``errored()`` and the communicator aborted, which ends what is queued on the device. This needs an NCCL
that can abort a communicator that hangs (2.25 and later); before that, and for what hangs in the driver, there is
ProcessGroupBabyNCCL.

Threads: ops from any thread; the overseer has one of its own per epoch.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import Work

from .._deadline import Deadline
from ._arguments import require_sense
from ._backends import new_nccl
from ._epoch import Epoch
from ._in_process import InProcessGroup
from ._native import explained, stage
from ._ops import Op, call, walk
from ._overseer import Overseer

__all__ = ["ProcessGroupNCCL"]


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
        native, backend = new_nccl(store, rank, size, self._timeout_s, global_ranks)
        epoch = Epoch(native, backend, rank, size, self._timeout_s, _abort, always=True)

        def late(deadline: Deadline, what: str) -> None:
            epoch.fail(deadline.exceeded(what, "the communicator was aborted; configure() the group again"))
            epoch.break_off()

        epoch.overseer = Overseer(late)
        return epoch

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        epoch = self._ready(op.name)
        if op.has_numbers:
            require_sense(op, values, epoch.rank, epoch.size)
        tensors = [tensor for _, tensor in walk(op, values)]
        values, _ = stage(op, values, self.backend_name)  # refuses strided tensors, which NCCL does not take either
        try:
            work: Work = call(op, epoch.native, values, options)
        except (RuntimeError, ValueError) as error:
            raise explained(error, op, tensors, options, self.backend_name) from error
        epoch.overseer.watch(self._limit_s(options), f"{op.name} on nccl, rank {epoch.rank} of {epoch.size}", work)
        return work

    def num_active_work(self) -> int:
        """How many ops are not finished, as of at most 0.1 s ago."""
        epoch = self._epoch
        return 0 if epoch is None else int(epoch.overseer.active())


def _abort(epoch: Epoch) -> None:
    epoch.overseer.stop()
    epoch.backend.abort()
