# SPDX-License-Identifier: BSD-3-Clause
"""The child's half of ops on device tensors: it opens what the trainer has exported, and keeps the order of streams.

    a stream of its own for each op in flight: waits for ``ready`` -> the op -> waits for its end -> ``done``

Of its own, or a receive that waits for its peer would hold up every op after it. What cannot be opened is told at
the first op that needs it, as that op's refusal.

Threads: ``obey``, ``tensor`` and ``entered`` from the one that reads; ``finish`` and ``closed`` from any.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from .._errors import ProtocolError, UnsupportedOp
from . import _messages as says
from ._accelerator import Accelerator, accelerator
from ._mapping import dtype_from_code

__all__ = ["Devices", "Queued"]

# A backend that was aborted leaves its device within milliseconds; the trainer kills after 200.
_LEAVE_S = 0.15
_LOOK_S = 0.002
# The text of an error is asked for from a work that has ended: there is nothing to wait for.
_TEXT_S = 1.0


class _Pair(NamedTuple):
    """Two events of the trainer's, and the stream for the op between them."""

    accelerator: Accelerator
    ready: Any
    done: Any
    stream: Any


class Queued:
    """An op on a device, for whoever looks at it. It has ended when its work says so; how, is told by ``failure``."""

    def __init__(self, work: Any, pair: _Pair) -> None:
        self._work = work
        self._accelerator = pair.accelerator
        # the trainer may use the pair's own for another op as soon as they have fired
        self._event = pair.accelerator.mark(pair.stream)
        self._looks = 0

    def is_completed(self) -> bool:
        """Whether it has ended: well, or by an error that was there at two looks, and not between two events."""
        if not self._work.is_completed():
            return False
        self._looks += 1
        return self._looks > 1 or self._accelerator.query(self._event)

    def failure(self) -> Exception | None:
        """How it has ended."""
        if self._accelerator.query(self._event):
            return None
        try:
            self._work.wait(timedelta(seconds=_TEXT_S))
        except Exception as error:
            return error
        return RuntimeError("the backend has given up an op that the device is not done with; see its log")


class Devices:
    """What is open here, by the trainer's numbers.

    Args:
        find: the functions for a kind of device.
    """

    def __init__(self, find: Callable[[str], Accelerator] = accelerator) -> None:
        self._find = find
        self._accelerators: dict[str, Accelerator] = {}
        self._used: set[tuple[str, int]] = set()
        self._idle: dict[str, Any] = {}  # streams on which nothing ever runs
        self._memory: dict[int, tuple[str, torch.UntypedStorage] | Exception] = {}
        self._pairs: dict[int, _Pair | Exception] = {}
        self._closing: collections.deque[tuple[int, Callable[[], torch.UntypedStorage | None]]] = collections.deque()

    def obey(self, message: says.DeviceMemory | says.DropMemory | says.DeviceEvents) -> None:
        """Open or drop something."""
        if isinstance(message, says.DropMemory):
            self._drop(message.number)
            return
        try:
            one = self._use(message.kind, message.device)
            if isinstance(message, says.DeviceMemory):
                storage = one.open(message.device, message.handle, message.nbytes, message.offset)
                self._memory[message.number] = message.kind, storage
            else:
                ready = one.open_event(message.device, message.ready)
                done = one.open_event(message.device, message.done)
                self._pairs[message.number] = _Pair(one, ready, done, one.new_stream(message.device))
        except Exception as error:
            table: dict[int, Any] = self._memory if isinstance(message, says.DeviceMemory) else self._pairs
            table[message.number] = error

    def closed(self) -> list[int]:
        """The numbers of memory that was dropped and is not open any more: an op that has just ended may hold it."""
        found = []
        for _ in range(len(self._closing)):
            with contextlib.suppress(IndexError):  # another thread looks as well
                number, storage = self._closing.popleft()
                if storage() is None:
                    found.append(number)
                else:
                    self._closing.append((number, storage))
        return found

    def tensor(self, reference: tuple[Any, ...], pair: _Pair) -> torch.Tensor:
        """The tensor that a reference of the trainer's names.

        Raises:
            UnsupportedOp: its memory could not be opened.
            ProtocolError: it was not sent, or the tensor is not in it.
        """
        _, number, offset, code, shape = reference
        dtype = dtype_from_code(code)
        if number == 0:
            return torch.empty(shape, dtype=dtype, device=pair.accelerator.device(offset))
        memory = self._memory.get(number)
        if memory is None:
            raise ProtocolError(f"a tensor lies in device memory {number}, which the trainer has not sent")
        if isinstance(memory, Exception):
            raise _refused(memory) from memory
        storage = memory[1]
        at, rest = divmod(offset, dtype.itemsize)
        count = math.prod(shape)
        if rest or offset + count * dtype.itemsize > storage.nbytes():
            raise ProtocolError(
                f"{dtype} of shape {shape} at byte {offset} is not aligned, or not in device memory {number} of "
                f"{storage.nbytes()} bytes"
            )
        whole: torch.Tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        return whole.narrow(0, at, count).view(shape)

    def pair(self, number: int) -> _Pair:
        """Two events, by their number.

        Raises:
            UnsupportedOp: they could not be opened.
            ProtocolError: they were not sent.
        """
        pair = self._pairs.get(number)
        if pair is None:
            raise ProtocolError(f"an op waits for the events {number}, which the trainer has not sent")
        if isinstance(pair, Exception):
            raise _refused(pair) from pair
        return pair

    @contextlib.contextmanager
    def entered(self, pair: _Pair) -> Iterator[None]:
        """Where to start an op: its stream is the current one, and waits for what the trainer had queued."""
        pair.accelerator.wait(pair.ready, pair.stream)
        with pair.accelerator.on(pair.stream):
            yield

    def finish(self, work: Any, pair: _Pair, timeout_s: float | None) -> None:
        """Queue ``done`` behind ``work``; with a timeout, for a backend that the host has to wait for.

        Raises:
            Exception: what the op failed with.
        """
        with pair.accelerator.on(pair.stream):
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))
        pair.accelerator.record(pair.done, pair.stream)

    def settle(self, limit_s: float = _LEAVE_S) -> bool:
        """Wait until the devices are done with all ops, ``limit_s`` seconds at most: this process is about to end.

        The trainer's streams wait for the events, and may wait for ever for those that do not fire before.
        """
        end_s = time.monotonic() + limit_s
        left = [pair for pair in self._pairs.values() if isinstance(pair, _Pair)]
        while left:
            left = [pair for pair in left if not pair.accelerator.query(pair.done)]
            if time.monotonic() > end_s:
                break
            if left:
                time.sleep(_LOOK_S)
        return not left

    def _drop(self, number: int) -> None:
        memory = self._memory.pop(number, None)
        if isinstance(memory, tuple):
            self._closing.append((number, weakref.ref(memory[1])))
            # torch synchronises the current stream when the storage goes: one that has nothing to do
            with self._accelerators[memory[0]].on(self._idle[memory[0]]):
                del memory
        else:
            self._closing.append((number, _gone))

    def _use(self, kind: str, index: int) -> Accelerator:
        one = self._accelerators.get(kind)
        if one is None:
            one = self._accelerators[kind] = self._find(kind)
        if (kind, index) not in self._used:
            self._used.add((kind, index))
            one.use(index)
            self._idle[kind] = one.new_stream(index)
        return one


def _gone() -> None:
    """A weak reference to what is gone."""


def _refused(error: Exception) -> UnsupportedOp:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UnsupportedOp(
        f"the child process cannot open the trainer's device memory or events ({reason}): let both see "
        "the same devices (CUDA_VISIBLE_DEVICES), and let PYTORCH_CUDA_ALLOC_CONF have no expandable_segments:True"
    )
