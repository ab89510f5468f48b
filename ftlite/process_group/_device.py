# SPDX-License-Identifier: BSD-3-Clause
"""The device memory of ops in flight: lent to the child where it lies, in the order of the device's streams.

    trainer   current stream: [waits for earlier ops on the memory] copies of strided tensors, ``ready``
    child     a stream of its own: waits for ``ready``, the op, ``done``; then it says Done
    trainer   a stream of its own: waits for ``done``, copies back, ``ready`` again; or nothing, without strided ones
    wait()    the current stream waits for the last of these events; the host waits for Done and for nothing else

Both events are the trainer's, whichever process records them, and go in pairs that are used again: when the last of
the two has fired and the child has answered, nobody waits for them any more. Until then the op's tensors are kept.

Locks: the session's guards the tables. One thread lends at a time. Nothing waits for the device.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._deadline import Deadline
from .._errors import UnsupportedOp
from . import _messages as says
from ._accelerator import Accelerator
from ._exports import Export, Exports
from ._inflight import InFlight
from ._mapping import dtype_code
from ._ops import Direction
from ._staging import require_memory

__all__ = ["DeviceBorrower", "DeviceLedger", "DeviceLent", "Pair"]

# How many ops are asked at a time whether the device is done with them, at 1 us each.
_QUERIES = 16


class Pair:
    """Two events of the device ``index``, which the child knows by ``number`` once it was told."""

    __slots__ = ("done", "handles", "index", "number", "ready")

    def __init__(self, accelerator: Accelerator, number: int, index: int) -> None:
        self.number = number
        self.index = index
        self.ready, ready = accelerator.new_event(index)
        self.done, done = accelerator.new_event(index)
        self.handles: tuple[bytes, bytes] | None = (ready, done)  # None once they were told


class DeviceLent(NamedTuple):
    """One tensor of an op: what the child works on is ``shared``, the user's ``view`` itself or a copy of it."""

    view: torch.Tensor
    shared: torch.Tensor
    writes: bool
    export: Export | None  # None: it has no elements
    device: int

    def reference(self) -> tuple[Any, ...]:
        """What the child is told."""
        export, shared = self.export, self.shared
        shape = tuple(shared.shape)
        if export is None:
            return "d", 0, self.device, dtype_code(shared.dtype), shape
        return "d", export.number, shared.storage_offset() * shared.element_size(), dtype_code(shared.dtype), shape


class DeviceBorrower(Protocol):
    """An op, as the ledger knows it."""

    ticket: int
    loans: list[DeviceLent]
    pair: Pair | None

    def until_over(self, limit_s: float) -> bool:
        """Wait until the child has answered; whether it has, within ``limit_s`` seconds."""

    def order(self, stream: Any) -> None:
        """Have ``stream`` wait for its result."""

    def enqueued(self, event: Any) -> None:
        """Its result is there when ``event`` fires."""

    def fired(self) -> None:
        """It did, and will not stand for this op any more."""

    def lost(self) -> None:
        """It may never do so: the child has ended before."""


class _Kept(NamedTuple):
    """An op that the device works on, with its tensors."""

    op: DeviceBorrower
    ticket: int
    event: Any
    pair: Pair
    loans: list[DeviceLent]


class DeviceLedger:
    """Who uses which memory of one kind of device, in one session.

    Args:
        exports: the group's.
        lock: the session's.
        backend: its name, for messages.
    """

    def __init__(self, exports: Exports, lock: threading.RLock, backend: str) -> None:
        self.accelerator = exports.accelerator
        self._exports = exports
        self._lock = lock
        self._backend = backend
        self._next_ticket = 0
        self._memory = InFlight()
        self._borrowers: dict[int, DeviceBorrower] = {}  # by ticket
        self._kept: collections.deque[_Kept] = collections.deque()
        self._pairs: dict[int, list[Pair]] = {}  # the free ones, by device
        self._told: dict[int, Export] = {}  # what the child has open, by number
        self._dead = exports.listen()
        self._is_over = False

    # --- an op ------------------------------------------------------------------------------------------

    def lend(self, op: DeviceBorrower, views: Sequence[tuple[Direction, torch.Tensor]], deadline: Deadline) -> int:
        """Lend ``views`` to ``op``: fills ``op.loans`` and ``op.pair``. Returns -1: the child follows no op.

        Raises:
            UnsupportedOp: the views are on several devices, or their memory cannot be exported.
            DeadlineExceeded: an earlier op on the memory was not answered.
            StateError: the memory of a view is gone.
        """
        index = self._index(views)
        self._look()
        earlier = self._enter(op, views)
        try:
            stream = self.accelerator.current_stream(index)
            for each in earlier:
                if not each.until_over(deadline.remaining_s()):
                    raise deadline.exceeded("waiting for an earlier op on the same memory", "wait for it first")
                each.order(stream)
            with self.accelerator.at(index):
                for direction, view in views:
                    op.loans.append(self._one(direction, view, index))
            op.pair = self._pair(index)
            self.accelerator.record(op.pair.ready, stream)
        except BaseException:
            self.forget(op, True)
            raise
        return -1

    def announce(self, op: DeviceBorrower | None) -> Iterator[tuple[says.Message, tuple[int, ...]]]:
        """What the child has to hear before ``op``, or at any time; for whoever lends."""
        while self._dead:
            number = self._dead.popleft().number
            if number in self._told:  # until the child says that it has dropped it
                yield says.DropMemory(number), ()
        if op is None:
            return
        for lent in op.loans:
            export = lent.export
            if export is not None and export.number not in self._told:
                with self._lock:
                    if self._is_over:  # since a moment, and nobody would let go of it
                        return
                    self._exports.hold(export)
                    self._told[export.number] = export
                kind = self.accelerator.kind
                yield (
                    says.DeviceMemory(export.number, kind, lent.device, export.handle, export.nbytes, export.offset),
                    (),
                )
        pair = op.pair
        if pair is not None and pair.handles is not None:
            ready, done = pair.handles
            pair.handles = None
            yield says.DeviceEvents(pair.number, self.accelerator.kind, pair.index, ready, done), ()

    def take_back(self, op: DeviceBorrower, is_well: bool) -> None:
        """``op`` is queued on the device: queue the copies to exactly the elements of the user's views.

        One that has failed (``is_well`` is false) has no result.

        Raises:
            StateError: the memory of a view is gone.
        """
        pair = op.pair
        if pair is None or not is_well:
            return
        copies = [lent for lent in op.loans if lent.writes and lent.shared is not lent.view]
        event = pair.done
        try:
            if copies:
                stream = self.accelerator.new_stream(pair.index)
                self.accelerator.wait(pair.done, stream)
                try:
                    with self.accelerator.on(stream):
                        for lent in copies:
                            require_memory(lent.view, "write")
                            self.accelerator.copy(lent.view, lent.shared)
                finally:
                    # the child waits for its first record since before it has answered
                    self.accelerator.record(pair.ready, stream)
                    event = pair.ready
        finally:
            with self._lock:
                self._kept.append(_Kept(op, op.ticket, event, pair, op.loans))
            op.enqueued(event)
            op.pair, op.loans = None, []

    def forget(self, op: DeviceBorrower, is_free: bool) -> None:
        """``op`` is over. ``is_free``: the child works on its memory no more; else it is kept for ``ransom``."""
        with self._lock:
            pair, op.pair = op.pair, None
            loans, op.loans = op.loans, []
            if self._borrowers.get(op.ticket) is not op or any(kept.op is op for kept in reversed(self._kept)):
                return  # the device works on it
            if is_free:
                self._leave(op.ticket)
                if pair is not None:
                    self._pairs.setdefault(pair.index, []).append(pair)
            elif pair is not None:
                self._kept.append(_Kept(op, op.ticket, None, pair, loans))

    # --- all of them ------------------------------------------------------------------------------------

    def tidy(self, now_s: float) -> bool:
        """Let go of what the device is done with; whether there is something to announce."""
        self._look()
        return bool(self._dead)

    def dropped(self, number: int) -> None:
        """The child has the export ``number`` open no more."""
        export = self._told.pop(number, None)
        if export is not None:
            self._exports.let_go(export)

    def is_busy(self) -> bool:
        """Whether there are ops that the device is not known to be done with."""
        self._look(len(self._kept))
        return bool(self._borrowers)

    def ransom(self) -> None:
        """The child is dead: all memory is free. What it had queued and is not done may never be."""
        self._look(len(self._kept))
        with self._lock:
            for kept in self._kept:
                kept.op.lost()
            self._kept.clear()
            self._borrowers.clear()
            self._is_over = True
            told, self._told = self._told, {}
        for export in told.values():
            self._exports.let_go(export)

    def end(self) -> None:
        """The session is over."""

    # --- inside -----------------------------------------------------------------------------------------

    def _index(self, views: Sequence[tuple[Direction, torch.Tensor]]) -> int:
        """The one device of an op; the current one where it has no tensors."""
        devices = {view.device for _, view in views}
        if not devices:
            return self.accelerator.current_device()
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UnsupportedOp(
                f"the tensors of one op in the {self._backend} child have to be on one device, and are on {names}",
                backend=self._backend,
            )
        return devices.pop().index or 0

    def _enter(self, op: DeviceBorrower, views: Sequence[tuple[Direction, torch.Tensor]]) -> list[DeviceBorrower]:
        """Note which memory ``op`` uses. Returns the ops that it has to follow."""
        ranges = [(*self._span(view), direction != "in") for direction, view in views]
        with self._lock:
            op.ticket = self._next_ticket
            self._next_ticket += 1
            relation = self._memory.add(op.ticket, ranges)
            self._borrowers[op.ticket] = op
            return [self._borrowers[ticket] for ticket in (*relation.same, *relation.partial)]

    def _span(self, view: torch.Tensor) -> tuple[int, int]:
        """The addresses that ``view`` lies between: first byte, and the one after its last."""
        start = self.accelerator.address(view.untyped_storage()) + int(view.storage_offset()) * view.element_size()
        if not view.numel():
            return start, start
        last = sum((size - 1) * step for size, step in zip(view.shape, view.stride()))
        return start, start + (last + 1) * view.element_size()

    def _leave(self, ticket: int) -> None:
        self._memory.remove(ticket)
        self._borrowers.pop(ticket, None)

    def _one(self, direction: Direction, view: torch.Tensor, index: int) -> DeviceLent:
        writes = direction != "in"
        if not view.numel():
            return DeviceLent(view, view, writes, None, index)
        require_memory(view, "read")
        shared = view
        if not view.is_contiguous() or view.is_conj() or view.is_neg():
            shared = self.accelerator.empty(view)
            if direction != "out":
                self.accelerator.copy(shared, view)
        return DeviceLent(view, shared, writes, self._exports.find(shared.untyped_storage()), index)

    def _pair(self, index: int) -> Pair:
        with self._lock:
            free = self._pairs.get(index)
            if free:
                return free.pop()
        return Pair(self.accelerator, next(self._exports.numbers), index)

    def _look(self, most: int = _QUERIES) -> None:
        """Ask for some ops whether the device is done with them, each in its turn."""
        with self._lock:
            for _ in range(min(most, len(self._kept))):
                kept = self._kept.popleft()
                if kept.event is None or not self.accelerator.query(kept.event):
                    self._kept.append(kept)
                    continue
                kept.op.fired()
                self._leave(kept.ticket)
                self._pairs.setdefault(kept.pair.index, []).append(kept.pair)
        self._exports.sweep()
