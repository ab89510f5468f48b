# SPDX-License-Identifier: BSD-3-Clause
"""Where the memory of an op is, and who lends it to the child: one ledger for the host, one for each kind of device.

A ledger for a kind of device is made at the first op that has a tensor there. One thread lends at a time; what the
ledgers say of the other calls holds here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .._deadline import Deadline
from .._errors import UnsupportedOp
from . import _messages as says
from ._arena import Arena
from ._backends import BACKENDS
from ._device import DeviceLedger
from ._device_work import DeviceWork
from ._exports import AllExports
from ._loans import Ledger, lendable
from ._ops import Direction, Op, results, seen_by, walk
from ._staging import alias
from ._work import ChildWork

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["Lenders"]

Views = list[tuple[Direction, torch.Tensor]]


class Lenders:
    """The ledgers of one session.

    Args:
        arena: where host memory is lent.
        exports: of the group.
        lock: the session's.
        keep_reading: see :class:`Ledger`.
        backend: its name.
        rank: of this process.
    """

    def __init__(
        self,
        arena: Arena,
        exports: AllExports,
        lock: threading.RLock,
        keep_reading: Callable[[], Callable[[float], object] | None],
        backend: str,
        rank: int,
    ) -> None:
        self._host = Ledger(arena, lock, keep_reading)
        self._exports = exports
        self._lock = lock
        self._backend = backend
        self._rank = rank
        self._home = BACKENDS[backend].devices[0] if backend in BACKENDS else "cpu"
        self._devices: dict[str, DeviceLedger] = {}

    def borrower(
        self, session: Session, op: Op, values: list[Any], options: Any, deadline: Deadline
    ) -> tuple[ChildWork, Views]:
        """The Work of an op, and its tensors as they are lent.

        Raises:
            UnsupportedOp: one of them cannot be handed over.
        """
        what = f"{op.name} on {self._backend}"
        tensors = walk(seen_by(op, options, self._rank), values)
        places = [tensor.is_cpu for _, tensor in tensors] or [self._home == "cpu"]
        if False not in places:
            views = lendable(op, tensors, self._backend)
            return ChildWork(session, what, deadline, results(op, values)), views
        kinds = {tensor.device.type for _, tensor in tensors} or {self._home}
        if len(kinds) > 1:
            raise UnsupportedOp(
                f"{op.name}: the tensors are on {' and '.join(sorted(kinds))}; move them to one device",
                backend=self._backend,
                op=op.name,
            )
        accelerator = self._exports.of(kinds.pop()).accelerator
        views = [(direction, self._view(op, tensor)) for direction, tensor in tensors]
        return DeviceWork(session, what, deadline, results(op, values), accelerator), views

    def lend(self, op: ChildWork, views: Views, deadline: Deadline) -> int:
        """Lend ``views`` to ``op``. Returns the id of the op that it has to follow, or -1."""
        if isinstance(op, DeviceWork):
            ledger = self._devices.get(op.kind)
            if ledger is None:
                made = DeviceLedger(self._exports.of(op.kind), self._lock, self._backend)
                ledger = self._devices[op.kind] = made
            return ledger.lend(op, views, deadline)
        return self._host.lend(op, views, deadline)

    def announce(self, op: ChildWork | None) -> Iterator[tuple[says.Message, tuple[int, ...]]]:
        """What the child has to hear before ``op``, or at any time, and the descriptors."""
        yield from self._host.announce(None if isinstance(op, DeviceWork) else op)
        for kind, ledger in self._devices.items():
            yield from ledger.announce(op if isinstance(op, DeviceWork) and op.kind == kind else None)

    def tidy(self, now_s: float) -> bool:
        """Give idle memory back; whether there is something to announce."""
        news = [self._host.tidy(now_s), *(ledger.tidy(now_s) for ledger in list(self._devices.values()))]
        return any(news)

    def take_back(self, op: ChildWork, is_well: bool) -> None:
        """Bring the results of ``op`` to the user's tensors."""
        if isinstance(op, DeviceWork):
            self._devices[op.kind].take_back(op, is_well)
        else:
            self._host.take_back(op, is_well)

    def forget(self, op: ChildWork, is_free: bool) -> None:
        """``op`` is over."""
        if isinstance(op, DeviceWork):
            self._devices[op.kind].forget(op, is_free)
        else:
            self._host.forget(op, is_free)

    def dropped(self, number: int) -> None:
        """The child has the export ``number`` open no more."""
        for ledger in self._devices.values():
            ledger.dropped(number)

    def is_busy(self) -> bool:
        """Whether a device may be at work for the child: killed now, it may leave streams waiting for ever."""
        return any(ledger.is_busy() for ledger in list(self._devices.values()))

    def ransom(self) -> None:
        """The child is dead: all memory is free."""
        self._host.ransom()
        for ledger in self._devices.values():
            ledger.ransom()

    def end(self) -> None:
        """The session is over."""
        self._host.end()

    def _view(self, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedOp(
                f"{op.name}: the {self._backend} child takes strided tensors, and this one is {tensor.layout}"
                f"{' and quantized' if tensor.is_quantized else ''}: convert it first",
                backend=self._backend,
                op=op.name,
            )
        return alias(tensor)
