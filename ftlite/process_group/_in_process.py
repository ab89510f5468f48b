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

import collections
import logging
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import Work

from .._deadline import Deadline, Timeout
from .._errors import StateError, UnsupportedOp
from ._handle import OpWork
from ._interface import ProcessGroup
from ._native import NativeWork, Pairs, explained, has_future, stage, until_ended
from ._ops import FIELDS, Op, c10d, call, options_from_fields, options_to_fields, results, walk
from ._staging import plain
from ._store import create_store_client

__all__ = ["Epoch", "InProcessGroup", "ProcessGroupGloo"]

_logger = logging.getLogger(__name__)

# What every torch since 2.6 reduces over Gloo, with every reduction below; whatever else is asked for may be
# refused, and gets a Work that explains it.
_SURE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_SURE_REDUCTIONS = frozenset({c10d.ReduceOp.SUM, c10d.ReduceOp.PRODUCT, c10d.ReduceOp.MIN, c10d.ReduceOp.MAX})
# Nobody sends on this tag: the receive that is to time out (see ProcessGroupGloo._break).
_BREAKING_TAG = 0x7F0B_0057
_AT_ONCE = timedelta(milliseconds=1)


class Epoch:
    """What one ``configure()`` made: the native group, and what is going on in it."""

    def __init__(self, native: Any, backend: Any, rank: int, size: int, timeout_s: float) -> None:
        self.native = native
        self.backend = backend
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s  # as the native group knows it
        self.overseer: Any = None  # who watches over the ops, where the backend lets nobody wait for them
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._works: set[OpWork] = set()
        # native Works: by weak reference, so that no result lives longer than its user wants
        self._natives: collections.deque[weakref.ref[Work]] = collections.deque()

    def note(self, work: Work) -> None:
        """Take note of a native Work that was handed out."""
        self._natives.append(weakref.ref(work))
        while self._natives and self._is_done(self._natives[0]):
            self._natives.popleft()

    def track(self, work: OpWork) -> OpWork:
        """Take note of one of ours; it fails when the epoch ends."""
        with self._lock:
            error = self.error
            if error is None:
                self._works.add(work)
        if error is not None:
            work.settle(error)
        work.on_settled(self._settled)
        return work

    def fail(self, error: Exception) -> list[OpWork]:
        """Note the first failure, and return what was pending then, for the caller to settle."""
        with self._lock:
            self.error = self.error or error
            pending = list(self._works)
            self._works.clear()
        return pending

    def active(self) -> int:
        """How many ops are not finished."""
        with self._lock:
            ours = len(self._works)
        return ours + sum(not self._is_done(each) for each in list(self._natives))

    def look(self) -> Exception | None:
        """The first failure, native Works that were not looked at yet included."""
        for each in list(self._natives):
            self._is_done(each)
        return self.error

    def close(self, pending: Sequence[OpWork]) -> None:
        """Destroy the native group, once what was ``pending`` has ended: it needs the GIL for that.

        The backend last: the destructor of the ProcessGroup around it waits holding the GIL on torch 2.6, and that
        of a backend does not.
        """
        for work in pending:
            if isinstance(work, NativeWork):
                work.until_ended()
        for each in list(self._natives):
            until_ended(each())
        self._natives.clear()
        self.native = None
        self.backend = None

    def _is_done(self, reference: weakref.ref[Work]) -> bool:
        work = reference()
        if work is None:
            return True
        if not work.is_completed():
            return False
        try:
            work.wait()  # it has ended: this says how, and unlike exception() prints no warning
        except RuntimeError as error:
            self.error = self.error or error
        return True

    def _settled(self, work: OpWork) -> None:
        error = work._error
        with self._lock:
            self._works.discard(work)
            # a refusal harms nobody else, whatever else fails has left the ranks apart
            if isinstance(error, Exception) and not isinstance(error, UnsupportedOp):
                self.error = self.error or error


class InProcessGroup(ProcessGroup):
    """The base of the groups in this process. A subclass makes the native group (``_create``) and breaks it."""

    backend_name = ""

    def __init__(self, timeout: Timeout = 60.0) -> None:
        super().__init__(timeout)
        self._turn = threading.RLock()  # for whoever changes the epoch
        self._epoch: Epoch | None = None
        self._aborts = 0

    # --- for a subclass ---------------------------------------------------------------------------------

    def _create(self, store: Store, rank: int, size: int, global_ranks: list[int]) -> Epoch:
        raise NotImplementedError

    def _break(self, epoch: Epoch) -> None:
        """Make everything pending in the native group fail, within milliseconds."""

    def _is_busy(self, epoch: Epoch) -> bool:
        """Whether the native group has to be broken before it is destroyed."""
        return epoch.active() > 0

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
        deadline = Deadline(self._timeout_s)
        with self._turn:
            aborts = self._aborts
            self._end(StateError("the group was configured anew", state="reconfigured", attempted="wait"))
            store = create_store_client(store_addr, deadline.remaining_s())
            try:
                epoch = self._create(store, rank, world_size, global_ranks or [])
            except RuntimeError as error:
                if deadline.remaining_s() < 0.05 * deadline.limit_s or "timed out" in str(error).lower():
                    what = f"configuring {self.backend_name}, rank {rank} of {world_size} at {store_addr}"
                    raise deadline.exceeded(what, "check that every rank got the same address and size") from error
                raise
            self._epoch = epoch
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
        if epoch.native is not None:
            self._break(epoch)

    def shutdown(self) -> None:
        """Leave the peers; what is pending fails."""
        if self._is_unregistering():
            return
        with self._turn:
            self._end(StateError("the group was shut down", state="shut down", attempted="wait"))

    def _end(self, reason: StateError) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        busy = self._is_busy(epoch)
        pending = epoch.fail(reason)
        for work in pending:
            work.settle(reason)
        if busy:
            self._break(epoch)
        epoch.close(pending)

    # --- ops --------------------------------------------------------------------------------------------

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        epoch = self._ready(op.name)
        if self._timeout_s != epoch.timeout_s and options is not None:
            options = self._with_timeout(options)
        tensors = [tensor for _, tensor in walk(op, values)]
        sure = self._is_sure(tensors, options)
        pairs: Pairs = []
        staged = values
        try:
            if not sure:
                staged, pairs = stage(op, values, self.backend_name)
            native: Work = call(op, epoch.native, staged, options)
        except RuntimeError as error:
            raise explained(error, op, tensors, options, self.backend_name) from error
        if sure and has_future(native):
            epoch.note(native)
            return native
        limit_s = self._limit_s(options)
        made = results(op, values)
        return epoch.track(NativeWork(native, op, staged, options, pairs, made, self.backend_name, limit_s))

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
        if not all(tensor.dtype in _SURE_DTYPES and plain(tensor) for tensor in tensors):
            return False
        reduction = getattr(options, "reduceOp", None)
        return reduction is None or reduction.op in _SURE_REDUCTIONS

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


class ProcessGroupGloo(InProcessGroup):
    """Gloo in this process, over and over with new peers.

    A pending op ends when the group is aborted or configured again, but what Gloo itself gets stuck in (a
    connection that is being made) lasts until the timeout; ProcessGroupBabyGloo has no such limits.

    Args:
        timeout: a timedelta or seconds, for ``configure`` and for every op.
    """

    backend_name = "gloo"

    def _create(self, store: Store, rank: int, size: int, global_ranks: list[int]) -> Epoch:
        native: Any = dist.ProcessGroup(store, rank, size)
        native._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        limit = timedelta(seconds=max(self._timeout_s, 0.001))  # Gloo takes whole milliseconds
        backend = c10d.ProcessGroupGloo(store, rank, size, limit)
        backend._set_sequence_number_for_group()
        if global_ranks and hasattr(backend, "options"):
            backend.options.global_ranks_in_group = global_ranks
        for device in self._devices():
            native._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
        return Epoch(native, backend, rank, size, self._timeout_s)

    def _break(self, epoch: Epoch) -> None:
        # Gloo has no abort. A receive that times out closes the connection to its peer, though, and with it ends
        # whatever waits there, here and at the peer. 1 ms each, so for many peers at the same time.
        for peer in range(epoch.size):
            if peer == epoch.rank:
                continue
            try:
                epoch.native.recv([torch.empty(1)], peer, _BREAKING_TAG).wait(_AT_ONCE)
            except RuntimeError as error:
                _logger.debug("the connection to rank %d is closed: %s", peer, error)
