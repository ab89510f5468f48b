# SPDX-License-Identifier: BSD-3-Clause
"""A device that is not there: streams that do nothing until they are told to, in an order that a seed decides.

It has the methods of ``Accelerator``. Its tensors are meta tensors, each with CPU memory behind it, since torch lets
nobody look into theirs by mistake. Two processes are two threads here: a handle finds the same memory and event.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests import load
from tests._support import wait_until

accelerator = load("process_group._accelerator")
staging = load("process_group._staging")

KIND = "meta"


class Event:
    """What CUDA knows of an event: the newest record, and how far it has come."""

    def __init__(self) -> None:
        self.recorded = 0
        self.fired = 0


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[Callable[[], bool]] = []  # False: it cannot run yet


class FakeDevice:
    """``seed`` decides which stream goes on next. ``log`` has every call that has to do with order."""

    def __init__(self, seed: int = 0) -> None:
        self.kind = KIND
        self.log: list[str] = []
        self.counters: dict[int, int] = {}
        self.refuses = False  # to export
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._default = self.new_stream(0)
        self._here = threading.local()
        self._events: dict[bytes, Event] = {}
        self._shared: dict[bytes, bytearray] = {}
        self._memory: dict[int, bytearray] = {}
        self._numbers = itertools.count(1)

    # --- for tests --------------------------------------------------------------------------------------

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the device with a copy of ``values``, of the same strides."""
        tensor = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
        storage = tensor.untyped_storage()
        # its address, so that it can die; another may have it then
        self._memory[storage._cdata] = bytearray(max(1, storage.nbytes()))
        self.host(tensor).copy_(values)
        return tensor

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory behind a tensor, now, whatever is queued."""
        if tensor.device.type != KIND:
            return tensor
        storage = _storage(self._memory[tensor.untyped_storage()._cdata])
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def launch(self, what: Callable[[], object], stream: Stream | None = None) -> None:
        """Queue ``what``, as a kernel."""

        def run() -> bool:
            what()
            return True

        with self.lock:
            (stream or self.current_stream(0)).queue.append(run)

    def block(self, stream: Stream, gate: threading.Event) -> None:
        """Queue a kernel that runs until ``gate`` is set."""
        with self.lock:
            stream.queue.append(gate.is_set)

    def step(self) -> bool:
        """Let one stream that can do one thing; whether there was one."""
        with self.lock:
            ready = [stream for stream in self._streams if stream.queue]
            self._random.shuffle(ready)
            for stream in ready:
                if stream.queue[0]():
                    del stream.queue[0]
                    return True
        return False

    def finish(self) -> bool:
        """Go on until nothing can; whether all is done."""
        while self.step():
            pass
        return not any(stream.queue for stream in self._streams)

    # --- Accelerator ------------------------------------------------------------------------------------

    def current_stream(self, index: int) -> Stream:
        return getattr(self._here, "stream", self._default)

    def new_stream(self, index: int) -> Stream:
        stream = Stream(f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(0), stream
        try:
            yield
        finally:
            self._here.stream = before

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def at(self, index: int) -> Any:
        return contextlib.nullcontext()

    def use(self, index: int) -> None:
        self.log.append("use")

    def current_device(self) -> int:
        return 0

    def new_event(self, index: int) -> tuple[Event, bytes]:
        handle = next(self._numbers).to_bytes(64, "little")
        self._events[handle] = Event()
        return self._events[handle], handle

    def mark(self, stream: Stream) -> Event:
        event = Event()
        self.record(event, stream)
        return event

    def open_event(self, index: int, handle: bytes) -> Event:
        return self._events[handle]

    def record(self, event: Event, stream: Stream) -> None:
        with self.lock:
            event.recorded += 1
            number = event.recorded

            def fire() -> bool:
                event.fired = max(event.fired, number)
                return True

            self.log.append("record")
            stream.queue.append(fire)

    def wait(self, event: Event, stream: Stream) -> None:
        with self.lock:
            number = event.recorded
            self.log.append("wait")
            stream.queue.append(lambda: event.fired >= number)

    def query(self, event: Event) -> bool:
        with self.lock:
            return event.fired >= event.recorded

    def address(self, storage: torch.UntypedStorage) -> int:
        return _storage(self._memory[storage._cdata]).data_ptr()

    def share(self, storage: torch.UntypedStorage) -> Any:
        if self.refuses:
            raise RuntimeError("cudaIpcGetMemHandle is not supported for this memory\nand a stack")
        number = next(self._numbers)
        handle = number.to_bytes(64, "little")
        self._shared[handle] = self._memory[storage._cdata]
        self.counters[number] = 1
        self.log.append("share")
        return accelerator.Shared(handle, storage.nbytes(), 0, (b"/counters", number))

    def open(self, index: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        self.log.append("open")
        return _storage(self._shared[handle])

    def release(self, counter: tuple[bytes, int]) -> None:
        self.counters[counter[1]] -= 1

    def collect(self) -> None:
        pass

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        return self.tensor(torch.full(like.shape, 99).to(like.dtype))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, origin = self.host(target), self.host(source)
        self.launch(lambda: staging.overwrite(to, origin))

    def future(self, index: int) -> torch.futures.Future[Any]:
        return Future(self)


def _storage(memory: bytearray) -> torch.UntypedStorage:
    """One more over the same memory, as a process has that opens it."""
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class Future(torch.futures.Future[Any]):
    """As torch's for a device: what ended it is on a stream, and callbacks are on one that waits for that."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._event = Event()

    def set_result(self, result: Any) -> None:
        self._device.record(self._event, self._device.current_stream(0))
        super().set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        def run(future: Any) -> Any:
            stream = self._device.new_stream(0)
            self._device.wait(self._event, stream)
            with self._device.on(stream):
                return callback(future)

        return super().then(run)


class Work:
    """What the backend below returns: as NCCL's, ``wait`` is for the stream."""

    def __init__(self, device: FakeDevice, end: Event) -> None:
        self._device = device
        self._end = end
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.error is not None or self._device.query(self._end)

    def wait(self, timeout: Any = None) -> bool:
        if timeout is not None and self.error is not None:
            raise self.error
        if timeout is not None:
            wait_until(self.is_completed, "the op", timeout.total_seconds())
        self._device.wait(self._end, self._device.current_stream(0))
        return True

    def get_future(self) -> Any:
        raise RuntimeError("no future")


class Group:
    """A backend for the device: allreduce doubles; recv waits for ``gate``, on a stream of its own."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.gate = threading.Event()
        self.fails: Exception | None = None
        self.aborted = False
        self._stream = device.new_stream(0)
        self._receiving = device.new_stream(0)

    def _run(self, stream: Stream, what: Callable[[], object]) -> Work:
        start, end = Event(), Event()
        self.device.record(start, self.device.current_stream(0))
        self.device.wait(start, stream)
        work = Work(self.device, end)
        if self.fails is None:
            self.device.launch(what, stream)
        else:
            self.device.block(stream, self.gate)
            work.error = self.fails
        self.device.record(end, stream)
        return work

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._run(self._stream, lambda: [tensor.mul_(2) for tensor in tensors])

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        raise RuntimeError("this backend does not support send")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        self.device.block(self._receiving, self.gate)
        return self._run(self._receiving, lambda: [tensor.fill_(7) for tensor in tensors])

    def barrier(self, options: Any) -> Work:
        return self._run(self._stream, lambda: None)

    def abort(self) -> None:
        self.aborted = True
        self.gate.set()
