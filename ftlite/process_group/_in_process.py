# SPDX-License-Identifier: BSD-3-Clause
"""Groups whose backend runs in this process: the least overhead, and no protection from the backend itself.

Rules of this file: everything that one ``configure()`` made is one ``Epoch``, and a late event of an old one
touches no other. A native group is never destroyed while something runs on it, because torch waits for it then,
on 2.6 holding the GIL; ``Epoch.end`` first makes whatever is pending fail. An op on plain tensors gets torch's own
Work back; see ``_native`` for the others.

Threads: ops may be issued from any thread. ``configure``, ``abort`` and ``shutdown`` take turns, except that
``abort`` does not wait for a ``configure`` that waits for other ranks.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from .._deadline import Deadline, Timeout
from .._errors import StateError
from ._arguments import require_peers, require_sense
from ._backends import new_gloo
from ._epoch import Epoch
from ._interface import ProcessGroup
from ._native import NativeWork, Pairs, explained, future_of, stage
from ._ops import FIELDS, Op, arrange, c10d, call, results, seen_by, walk
from ._options import options_from_fields, options_to_fields
from ._probe import Probe
from ._staging import alias, plain
from ._store import create_store_client

__all__ = ["InProcessGroup", "ProcessGroupGloo"]

_logger = logging.getLogger(__name__)

# What every torch since 2.6 reduces over Gloo, with every reduction below; whatever else is asked for may be
# refused, and gets a Work that explains it.
_SURE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_SURE_REDUCTIONS = frozenset({c10d.ReduceOp.SUM, c10d.ReduceOp.PRODUCT, c10d.ReduceOp.MIN, c10d.ReduceOp.MAX})
# Nobody sends on this tag: the receive that is to time out (see _close_connections).
_BREAKING_TAG = 0x7F0B_0057
_AT_ONCE = timedelta(milliseconds=1)
# One element and one rank: there is nobody to wait for.
_PROBE_S = 10.0


class InProcessGroup(ProcessGroup):
    """The base of the groups in this process. A subclass makes the native group (``_create``)."""

    backend_name = ""

    def __init__(self, timeout: Timeout = 60.0) -> None:
        super().__init__(timeout)
        self._turn = threading.RLock()  # for whoever changes the epoch
        self._epoch: Epoch | None = None
        self._aborts = 0
        self._leaves_at_exit = False
        self._probe: Probe | None = None  # for a backend that says what it takes only once it has been tried

    # --- for a subclass ---------------------------------------------------------------------------------

    def _create(self, store: Store, rank: int, size: int, global_ranks: list[int]) -> Epoch:
        raise NotImplementedError

    # --- the life of a group ----------------------------------------------------------------------------

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
        """Meet new peers, as :meth:`ProcessGroup.configure`; what was pending fails."""
        rank, world_size, ranks = require_peers(store_addr, rank, world_size, global_ranks)
        deadline = Deadline(self._timeout_s)
        with self._turn:
            aborts = self._aborts
            self._end(StateError("the group was configured anew", state="reconfigured", attempted="wait"))
            store = create_store_client(store_addr, deadline.remaining_s())
            try:
                epoch = self._create(store, rank, world_size, list(ranks))
            except RuntimeError as error:
                if deadline.remaining_s() < 0.05 * deadline.limit_s or "timed out" in str(error).lower():
                    what = f"configuring {self.backend_name}, rank {rank} of {world_size} at {store_addr}"
                    raise deadline.exceeded(what, "check that every rank got the same address and size") from error
                raise
            self._epoch = epoch
            if not self._leaves_at_exit:
                self._leaves_at_exit = True
                atexit.register(_leave, weakref.ref(self))
            if self._aborts != aborts:
                reason = StateError("abort() was called meanwhile", state="aborted", attempted="configure")
                self._end(reason)
                raise reason
        _logger.info("%s is rank %d of %d (replica %s, quorum %s)", self, rank, world_size, replica_id, quorum_id)

    def abort(self, reason: Any = None) -> None:
        """End everything pending: our Works with ``reason``, torch's own with what the backend then says.

        Args:
            reason: an exception, or a text for a StateError.
        """
        self._aborts += 1
        epoch = self._epoch
        if epoch is None:
            return
        if not isinstance(reason, Exception):
            text = reason or "abort() was called"
            reason = StateError(f"{self.backend_name} was aborted: {text}", state="aborted", attempted="wait")
        for work in epoch.fail(reason):
            work.settle(reason)
        epoch.break_off()

    def shutdown(self) -> None:
        """Leave the peers; what is pending fails."""
        if self._is_unregistering():
            return
        with self._turn:
            self._end(StateError("the group was shut down", state="shut down", attempted="wait"))

    def _end(self, reason: StateError) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end(reason)

    def __del__(self) -> None:
        epoch = getattr(self, "_epoch", None)
        if epoch is not None:
            epoch.end(StateError("its group is gone", state="gone", attempted="wait"))

    # --- ops --------------------------------------------------------------------------------------------

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        epoch = self._ready(op.name)
        if op.has_numbers:
            require_sense(op, values, epoch.rank, epoch.size)
        if self._timeout_s != epoch.timeout_s and options is not None:
            options = self._with_timeout(options)
        tensors = [tensor for _, tensor in walk(op, values)]
        sure = self._is_sure(tensors, options)
        limit_s = self._limit_s(options)
        pairs: Pairs = []
        try:
            if sure:  # an alias: the user may resize the tensor while the op runs
                staged = arrange(op, values, (alias(tensor) for _, tensor in walk(op, values)))
            else:
                self._require_taken(op, tensors, options)
                staged, pairs = stage(seen_by(op, options, epoch.rank), values, self.backend_name)
            native: Work = call(op, epoch.native, staged, options)
        except RuntimeError as error:
            raise explained(error, op, tensors, options, self.backend_name) from error
        if sure and limit_s == epoch.timeout_s and future_of(native) is not None:
            epoch.note(native)
            return native
        return epoch.track(
            NativeWork(
                native,
                op,
                staged,
                options,
                pairs,
                results(op, values),
                self.backend_name,
                limit_s,
                self._give_up(epoch),
            )
        )

    def _give_up(self, epoch: Epoch) -> Callable[[Exception], None]:
        """What a Work of ``epoch`` calls when the backend lets it wait beyond its time."""

        def give_up(error: Exception) -> None:
            if self._epoch is epoch:
                self.abort(error)

        return give_up

    def _ready(self, attempted: str) -> Epoch:
        epoch = self._epoch
        if epoch is None or epoch.native is None:
            raise StateError(
                f"{attempted} on {self!r}, which has no peers: call configure() first",
                state="unconfigured",
                attempted=attempted,
            )
        if epoch.error is not None:
            raise StateError(
                f"{attempted} on {self!r}, which has failed ({epoch.error}): call configure() again",
                state="failed",
                attempted=attempted,
            ) from epoch.error
        return epoch

    def _is_sure(self, tensors: list[torch.Tensor], options: Any) -> bool:
        """Whether the backend takes the tensors as they are, and reduces them: torch's own Work will do."""
        return all(tensor.dtype in _SURE_DTYPES and plain(tensor) for tensor in tensors) and _reduces(options)

    def _require_taken(self, op: Op, tensors: list[torch.Tensor], options: Any) -> None:
        """Raise what the backend says to a dtype or a reduction that not every backend takes."""
        probe = self._probe
        if probe is None or (_reduces(options) and all(tensor.dtype in _SURE_DTYPES for tensor in tensors)):
            return
        for dtype in {tensor.dtype for tensor in tensors}:
            refusal = probe.refusal(op, dtype, options)
            if refusal is not None:
                raise explained(refusal, op, tensors, options, self.backend_name)

    def _limit_s(self, options: Any) -> float:
        own: timedelta | None = getattr(options, "timeout", None)
        return own.total_seconds() if own is not None and own > timedelta(0) else self._timeout_s

    def _with_timeout(self, options: Any) -> Any:
        """A copy of ``options`` with the group's present timeout, where it has none of its own."""
        if options.timeout > timedelta(0):
            return options
        name = type(options).__name__
        fields = list(options_to_fields(options))
        fields[FIELDS[name].index("timeout")] = max(1, round(self._timeout_s * 1000))
        return options_from_fields(name, fields)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """The backend's own; its limit is ``timeout``, or the group's."""
        limit = timedelta(seconds=self._timeout_s) if timeout is None else timeout
        self._ready("monitored_barrier").native.monitored_barrier(limit, wait_all_ranks)

    # --- what it is -------------------------------------------------------------------------------------

    def size(self) -> int:
        """How many ranks the group has now; 1 before ``configure``."""
        epoch = self._epoch
        return 1 if epoch is None else epoch.size

    def rank(self) -> int:
        """The rank of this process; 0 before ``configure``."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.rank

    def getBackendName(self) -> str:
        """The backend's name, with a prefix that keeps it apart from torch's own."""
        return f"in-process-{self.backend_name}"

    def errored(self) -> Exception | None:
        """The first failure since ``configure``. One of torch's own Works counts if somebody still has it."""
        epoch = self._epoch
        return None if epoch is None else epoch.look()

    def num_active_work(self) -> int:
        """How many ops are not finished; of torch's own Works those that somebody still has."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.active()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank()} of {self.size()})"


def _leave(reference: weakref.ref[InProcessGroup]) -> None:
    """At exit: a thread that comes back from C++ when the interpreter is gone would end the process by an abort."""
    group = reference()
    if group is not None:
        group.shutdown()


def _reduces(options: Any) -> bool:
    """Whether ``options`` ask for no reduction, or for one that every backend has."""
    reduction = getattr(options, "reduceOp", None)
    return reduction is None or reduction.op in _SURE_REDUCTIONS


class ProcessGroupGloo(InProcessGroup):
    """Gloo in this process, over and over with new peers.

    A pending op ends when the group is aborted or configured again, but what Gloo itself gets stuck in (a
    connection that is being made) lasts until the timeout; ProcessGroupBabyGloo has no such limits.

    Args:
        timeout: a timedelta or seconds, for ``configure`` and for every op.
    """

    backend_name = "gloo"

    def __init__(self, timeout: Timeout = 60.0) -> None:
        super().__init__(timeout)
        devices = self._devices()
        self._probe = Probe(lambda: new_gloo(c10d.HashStore(), 0, 1, _PROBE_S, (), devices))

    def _create(self, store: Store, rank: int, size: int, global_ranks: list[int]) -> Epoch:
        native, backend = new_gloo(store, rank, size, self._timeout_s, global_ranks, self._devices())
        return Epoch(native, backend, rank, size, self._timeout_s, _close_connections)


def _close_connections(epoch: Epoch) -> None:
    # Gloo has no abort. A receive that times out closes the connection to its peer, though, and with it ends
    # whatever waits there, here and at the peer. 1 ms each, so one after the other.
    for peer in range(epoch.size):
        if peer == epoch.rank:
            continue
        try:
            epoch.native.recv([torch.empty(1)], peer, _BREAKING_TAG).wait(_AT_ONCE)
        except RuntimeError as error:
            _logger.debug("the connection to rank %d is closed: %s", peer, error)
