# SPDX-License-Identifier: BSD-3-Clause
"""The functions of torch that memory and events of a device cross a process border by, in one place.

Rules of this file: whatever is asked of ``torch.cuda`` (or its like) by the modules that deal with device tensors
is a method here, one or two calls each, without state; so that a stand-in can keep a log of them where there is no
device. Nothing here waits for the device. Any thread may call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from .._compat import storage_ipc
from .._errors import UnsupportedOp
from ._staging import overwrite

__all__ = ["Accelerator", "Shared", "accelerator", "current_device"]


class Shared(NamedTuple):
    """An exported storage: what another process opens, and ``counter``, by which torch keeps its memory.

    torch does not reuse the memory while the counter is above zero, and it is unsigned: a release too many keeps
    the memory for ever, as does one too few. So one process releases, once, and that is the one that exported.
    """

    handle: bytes
    nbytes: int
    offset: int
    counter: tuple[bytes, int]


class Accelerator:
    """One kind of device, such as "cuda".

    Raises:
        UnsupportedOp: this torch cannot hand memory of that kind to another process.
    """

    def __init__(self, kind: str) -> None:
        ipc = storage_ipc(kind)
        if ipc is None:
            raise UnsupportedOp(
                f"torch {torch.__version__} cannot hand {kind} tensors to a child process: "
                "use a group in this process, or tensors on the CPU"
            )
        self.kind = kind
        self._share, self._open, self._release = ipc
        self._module: Any = getattr(torch, kind)

    # --- streams and events -----------------------------------------------------------------------------

    def current_stream(self, index: int) -> Any:
        """The calling thread's current stream of the device ``index``."""
        return self._module.current_stream(index)

    def new_stream(self, index: int) -> Any:
        """A stream of the device ``index``; torch hands out 32 in turn."""
        return self._module.Stream(index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current, and its device."""
        manager: AbstractContextManager[Any] = self._module.stream(stream)
        return manager

    def device(self, index: int) -> torch.device:
        """The device ``index``."""
        return torch.device(self.kind, index)

    def at(self, index: int) -> AbstractContextManager[Any]:
        """Make ``index`` the current device."""
        manager: AbstractContextManager[Any] = self._module.device(index)
        return manager

    def use(self, index: int) -> None:
        """Make ``index`` the current device of this process for good."""
        self._module.set_device(index)

    def current_device(self) -> int:
        """The index of the current device."""
        return int(self._module.current_device())

    def is_initialized(self) -> bool:
        """Whether this process has used a device of the kind; asking does not."""
        return bool(self._module.is_initialized())

    def new_event(self, index: int) -> tuple[Any, bytes]:
        """An event of the device ``index``, not recorded yet, and the handle that another process opens it by."""
        event = self._module.Event(interprocess=True)
        with self.at(index):  # torch makes the event when it is asked for the handle, on the current device
            return event, bytes(event.ipc_handle())

    def mark(self, stream: Any) -> Any:
        """An event of this process alone, behind what is queued on ``stream`` by now."""
        return stream.record_event()

    def open_event(self, index: int, handle: bytes) -> Any:
        """Another process's event; either may record it."""
        return self._module.Event.from_ipc_handle(self.device(index), handle)

    def record(self, event: Any, stream: Any) -> None:
        """Have ``event`` fire when all that is queued on ``stream`` by now is done."""
        event.record(stream)

    def wait(self, event: Any, stream: Any) -> None:
        """Have what is queued on ``stream`` from now on wait for ``event`` as it was recorded last."""
        event.wait(stream)

    def query(self, event: Any) -> bool:
        """Whether ``event`` has fired; one that was never recorded has."""
        return bool(event.query())

    # --- memory -----------------------------------------------------------------------------------------

    def address(self, storage: torch.UntypedStorage) -> int:
        """Where its memory begins."""
        return storage.data_ptr()

    def share(self, storage: torch.UntypedStorage) -> Shared:
        """Export ``storage``; its counter is one then.

        Raises:
            RuntimeError: its memory cannot be exported.
        """
        _, handle, nbytes, offset, name, slot, _, _ = self._share(storage)
        return Shared(handle, nbytes, offset, (name, slot))

    def open(self, index: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        """The storage that another process has exported; the end of it here leaves the counter alone.

        Raises:
            RuntimeError: it cannot be opened here.
        """
        # a counter of no name: torch takes one that it cannot find for one whose owner has ended. No event: the
        # op's own is recorded after that of the export
        storage: torch.UntypedStorage = self._open(index, handle, nbytes, offset, b"", 0, b"", False)
        return storage

    def release(self, counter: tuple[bytes, int]) -> None:
        """Nobody else uses the exported memory any more; once for each ``share``."""
        self._release(*counter)

    def collect(self) -> None:
        """Have torch look for exported memory that was released."""
        self._module.ipc_collect()

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of the dtype, shape and device of ``like``, its content undefined."""
        with torch.inference_mode(False):
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream, to exactly the elements of ``target``."""
        overwrite(target, source)

    def future(self, index: int) -> torch.futures.Future[Any]:
        """A future of tensors on the device ``index``: whoever waits for it has its current stream wait."""
        return torch.futures.Future(devices=[self.device(index)])


def current_device(kind: str) -> tuple[str, int] | None:
    """The current device of ``kind``, such as ("cuda", 1); None for the CPU, and where this process has used none."""
    module: Any = getattr(torch, kind)
    if kind == "cpu" or not module.is_initialized():
        return None
    return kind, int(module.current_device())


def accelerator(kind: str) -> Accelerator:
    """The functions for ``kind``.

    Raises:
        UnsupportedOp: this torch cannot hand memory of that kind to another process.
    """
    return Accelerator(kind)
