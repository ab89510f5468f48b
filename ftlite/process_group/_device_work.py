# SPDX-License-Identifier: BSD-3-Clause
"""What an op on device tensors returns: over once it is queued on the device, its result in the order of streams.

``wait()`` and ``synchronize()`` have the current stream of whoever calls wait; a future does the same for whoever
waits for it, since it was completed on a stream that had waited. Callbacks run there too. The host never waits for
the device. Any thread may call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from .._deadline import Deadline, Timeout
from .._errors import ChildError
from ._accelerator import Accelerator
from ._device import DeviceLent, Pair
from ._handle import fail
from ._work import ChildWork

if TYPE_CHECKING:
    from ._session import Session

__all__ = ["DeviceWork"]


class DeviceWork(ChildWork):
    """An op in the child on tensors of a device."""

    def __init__(
        self, session: Session, what: str, deadline: Deadline, tensors: list[Any], accelerator: Accelerator
    ) -> None:
        super().__init__(session, what, deadline, tensors)
        self.kind = accelerator.kind
        self.loans: list[DeviceLent] = []
        self.pair: Pair | None = None
        self._accelerator = accelerator
        self._index = -1
        self._event: Any = None  # what the result waits for; None before it is queued and after it is there
        self._is_lost = False
        self._looks = 0
        self._ordering = threading.Lock()  # between a use of the event and the moment when it stands for another op

    # --- for the ledger ---------------------------------------------------------------------------------

    def references(self) -> list[tuple[Any, ...]]:
        """What the child is told of its tensors, in their order."""
        return [lent.reference() for lent in self.loans]

    def pair_number(self) -> int:
        """Which events on a device belong to it."""
        return self.pair.number if self.pair is not None else -1

    def enqueued(self, event: Any) -> None:
        """The result is there when ``event`` fires."""
        self._index = self.pair.index if self.pair is not None else -1
        self._event = event

    def fired(self) -> None:
        """It did, and will stand for another op."""
        with self._ordering:
            self._event = None

    def lost(self) -> None:
        """It may never do so."""
        with self._ordering:
            self._is_lost, self._event = self._event is not None, None

    def order(self, stream: Any) -> None:
        """Have ``stream`` wait for the result.

        Raises:
            ChildError: the child ended while the device was at it.
        """
        with self._ordering:
            if self._is_lost:
                raise ChildError(
                    f"{self._what}: the child ended before the device was done with it; call configure() and "
                    "submit the op again"
                )
            if self._event is not None:
                self._accelerator.wait(self._event, stream)

    # --- torch's Work -----------------------------------------------------------------------------------

    def wait(self, timeout: Timeout | None = None) -> bool:
        """As :meth:`OpWork.wait`, until the op is queued; what the current stream does next comes after it."""
        super().wait(timeout)
        self._order_here()
        return True

    def synchronize(self) -> None:
        """Have the current stream wait for the result, once the op is queued."""
        if self.is_over() and self._error is None:
            self._order_here()

    def is_completed(self) -> bool:
        """Whether the result is there, or the op has failed."""
        if not super().is_completed():
            return False
        with self._ordering:
            return self._error is not None or self._event is None or self._accelerator.query(self._event)

    def _order_here(self) -> None:
        if self._index >= 0:
            self.order(self._accelerator.current_stream(self._index))

    def _new_future(self) -> torch.futures.Future[Any]:
        devices = {each.device for each in _flat(self._tensors)}
        if not devices:
            return super()._new_future()
        self._looks = 1  # it looks for the streams to wait for
        return self._accelerator.future(devices.pop().index or 0)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            fail(future, self._error, self._looks)
            return
        stream = self._accelerator.new_stream(self._index)
        try:
            self.order(stream)
        except ChildError as error:
            fail(future, error, self._looks)
            return
        with self._accelerator.on(stream):
            super()._complete(future)


def _flat(tensors: list[Any]) -> list[torch.Tensor]:
    return [each for one in tensors for each in (_flat(one) if isinstance(one, list) else [one])]
