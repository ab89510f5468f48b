# SPDX-License-Identifier: BSD-3-Clause
"""The trainer's side of the memory that it shares with its children.

Rules of this file: an arena belongs to a group and outlives its children; segments are numbered and never reused
under the same number. Slots for ops are bounded and taken with a deadline; tensors that a user allocates here are
the user's own, unbounded, in segments of their own. Any thread may call; one lock, under which nothing waits but
the condition. The destructor of a user's tensor only appends to a deque.

    take -> copy in -> (the child works in the slot) -> copy out -> give
    empty -> a tensor in a segment, which find() knows: no copy at all; back when its storage dies
    adopt -> a storage that torch shares already is a segment of its own, for as long as it lives
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef

from .._deadline import Deadline
from .._errors import StateError
from ._mapping import Mapping, new_segment_file
from ._slots import Slot, Slots, room_for

__all__ = ["Arena", "Mapping", "Segment", "Slot"]

# What ops in flight may hold, at least: ten gradient buckets of DDP (25 MB each), for a process that has gigabytes.
LIMIT_BYTES = 256 << 20
# and at least twice the largest op, so that one can be copied while the one before is in the child
_LARGEST_OPS = 2
# Nearly every op fits (two DDP buckets), so children have one segment to map; only the pages that are used are taken.
SEGMENT_BYTES = 64 << 20
# A training step with its pause for evaluation or a checkpoint is shorter; after that, the memory is the machine's.
IDLE_S = 10.0

# As many mappings more in the child, of the 65,530 that a process may have. Storages beyond are copied as any other.
ADOPTED = 1024
# Each costs the child a descriptor, of which it may have 1024, and that is for the backend's connections too.
_SHARE = 8
# Below this a copy is done before it is found out whether the storage is shared (2 us).
ADOPT_BYTES = 1 << 16


class Segment(NamedTuple):
    """What a child has to be told: ``nbytes`` of the file behind ``fd``, which remains the arena's."""

    number: int
    nbytes: int
    fd: int


class _Adopted(NamedTuple):
    """A storage of torch's, and the segment that it is."""

    storage: Any
    segment: Segment


# untyped in torch
_strategy: Callable[[], str] = torch.multiprocessing.get_sharing_strategy
_weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


class _Lease(weakref.ref[memoryview]):
    """The memory of a user's tensor, and the slot that it fills."""

    __slots__ = ("slot",)
    slot: Slot


class Arena:
    """Segments, mapped here and to be mapped by children, and the slots in them.

    Args:
        limit_bytes: how much ops may hold at once; twice the largest op if that is more.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._closed = False
        self._waiting = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ops = Slots()
        self._own = Slots()
        self._segments: dict[int, tuple[Segment, Mapping]] = {}
        self._next = 0
        # replaced as a whole, so that find() needs no lock: first addresses, sorted; and (end, number) of each
        self._places: tuple[list[int], list[tuple[int, int]]] = ([], [])
        self._adopted: dict[int, _Adopted] = {}  # by the storage's address
        self._gone: list[int] = []  # adopted segments whose storage has died
        self._leases: dict[int, _Lease] = {}
        self._dead: deque[weakref.ref[memoryview]] = deque()

    def take(self, nbytes: int, deadline: Deadline) -> Slot:
        """A slot of ``nbytes`` bytes for an op, 64-byte aligned; waits while the bound is reached.

        Raises:
            DeadlineExceeded: other ops held the memory until the end of ``deadline``.
            StateError: the arena is closed, or was closed meanwhile.
            OSError: the machine has no memory, or this process no descriptor left.
        """
        with self._lock:
            ops = self._ops
            if 2 * nbytes > self._limit:
                self._limit = _LARGEST_OPS * room_for(nbytes)
            if self._closed or ops.out_bytes + nbytes > self._limit:
                self._wait_for_room(nbytes, deadline)
            slot = ops.take(nbytes)
            return slot if slot is not None else self._take_more(ops, nbytes)

    def give(self, slot: Slot) -> None:
        """Give ``slot`` back, from any thread. Again, or after :meth:`close`, it does nothing: it is a release."""
        with self._lock:
            if self._ops.give(slot) and self._waiting:
                self._changed.notify_all()

    def tensor(self, slot: Slot, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor over ``slot``, for as long as the slot is held: the target of a packed view.

        Raises:
            StateError: the arena is closed.
            ValueError: it does not fit into the segment.
        """
        return self._known(slot.segment, "tensor")[1].tensor(slot.offset, dtype, shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined content that lives in the arena and crosses to a child without a copy.

        Its memory is given back when its storage dies, views and aliases included; it is not counted in the bound,
        and it stays usable after :meth:`close`. Its storage cannot be resized. A tensor without elements is an
        ordinary one.

        Raises:
            StateError: the arena is closed.
            OSError: the machine has no memory, or this process no descriptor left.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        nbytes = count * dtype.itemsize
        with self._changed:
            if self._closed:
                raise self._closed_error("empty")
            self._collect()
            slot = self._own.take(nbytes) or self._take_more(self._own, nbytes)
            memory = self._segments[slot.segment][1].memory(slot.offset, nbytes)
            lease = _Lease(memory, self._dead.append)
            lease.slot = slot
            # a weak reference hashes as what it refers to, and a writable memoryview refuses that
            self._leases[id(lease)] = lease
        # resize_ and not view: the tensor is nobody's view, as one from torch.empty
        return torch.frombuffer(memory, dtype=dtype).resize_(shape)

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(segment, offset) of the first element of a CPU ``tensor`` whose memory lies in the arena, else None."""
        starts, ends = self._places
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= ends[at][0]:
            return None
        return ends[at][1], address - starts[at]

    def adopt(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(segment, offset) of the first element of a CPU ``tensor`` in memory that torch shares already, else None.

        None as well for small tensors, for storages beyond the bound, and where torch shares by file names.
        """
        if tensor.numel() * tensor.element_size() < ADOPT_BYTES:
            return None
        storage = tensor.untyped_storage()
        # by the other strategy there is no descriptor, and asking for one would move the user's storage
        if not storage.is_shared() or _strategy() != "file_descriptor":
            return None
        address = storage.data_ptr()
        with self._changed:
            if self._closed:
                raise self._closed_error("adopt")
            known = self._adopted.get(address)
            if known is None or known.storage.expired():
                self._let_go()
                if len(self._adopted) >= min(ADOPTED, _descriptors() // _SHARE):
                    return None
                fd, nbytes = storage._share_fd_cpu_()  # its own descriptor, and not a duplicate
                known = _Adopted(_weak(storage), Segment(self._next, nbytes, fd))
                self._next += 1
                self._adopted[address] = known
        return known.segment.number, tensor.data_ptr() - address

    def take_gone(self) -> list[int]:
        """Adopted segments whose storage has died: the child shall forget them before it hears of more."""
        if not self._gone:
            return []
        with self._changed:
            gone, self._gone = self._gone, []
        return gone

    def segment(self, number: int) -> Segment:
        """What to tell a child about segment ``number``.

        Raises:
            StateError: there is no such segment (any more).
        """
        with self._changed:
            for _, segment in self._adopted.values():
                if segment.number == number:
                    return segment
        return self._known(number, "segment")[0]

    def out_bytes(self) -> int:
        """What ops hold at the moment, in bytes."""
        return self._ops.out_bytes

    def forget_idle(self, now_s: float | None = None) -> list[int]:
        """Unmap the segments of which nothing was used for 10 s, and say which: the children shall forget them.

        To be called now and then, every second or so: idle is what was so at two calls. A segment that a tensor
        still looks at is kept. ``now_s`` is on the monotonic clock, None means now.

        Raises:
            StateError: the arena is closed.
        """
        now_s = time.monotonic() if now_s is None else now_s
        forgotten = []
        with self._changed:
            if self._closed:
                raise self._closed_error("forget_idle")
            self._collect()
            self._let_go()
            forgotten, self._gone = self._gone, forgotten
            for pool in (self._ops, self._own):
                for number in pool.idle(now_s, IDLE_S):
                    if self._unmap(number):
                        pool.remove(number)
                        forgotten.append(number)
        return forgotten

    def close(self) -> None:
        """Unmap everything, wake whoever waits, with a StateError. Idempotent.

        Tensors that users allocated here stay usable, and their memory goes with them.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for number in list(self._segments):
                segment, mapping = self._segments.pop(number)
                self._list_places()
                # where a tensor lives, the memory goes when the tensor does
                mapping.close()
                os.close(segment.fd)
            self._adopted.clear()
            self._leases.clear()
            self._changed.notify_all()

    def __del__(self) -> None:
        # whoever forgot close(): the memory goes with the mappings, a bare descriptor would stay
        for segment, _ in self._segments.values():
            os.close(segment.fd)

    def _wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        while not self._closed and self._ops.out_bytes + nbytes > self._limit:
            remaining_s = deadline.remaining_s()
            if remaining_s <= 0.0:
                raise deadline.exceeded(
                    f"waiting for {nbytes} bytes of memory shared with the child, of which operations in flight hold "
                    f"{self._ops.out_bytes} of {self._limit}",
                    "wait for some of them before issuing more",
                )
            self._waiting += 1
            try:
                self._changed.wait(remaining_s)
            finally:
                self._waiting -= 1
        if self._closed:
            raise self._closed_error("take")

    def _take_more(self, pool: Slots, nbytes: int) -> Slot:
        """Make a segment that is large enough, and take a slot of it."""
        # by powers of two, so that ops that grow little by little need few segments
        size = max(SEGMENT_BYTES, 1 << (room_for(nbytes) - 1).bit_length())
        fd = new_segment_file(size)
        try:
            mapping = Mapping(fd, size)
        except BaseException:
            os.close(fd)
            raise
        number = self._next
        self._next += 1
        self._segments[number] = Segment(number, size, fd), mapping
        self._list_places()
        pool.add(number, size, mapping.address)
        slot = pool.take(nbytes)
        if slot is None:
            raise MemoryError(f"no room for {nbytes} bytes in a new segment of {size}")
        return slot

    def _unmap(self, number: int) -> bool:
        segment, mapping = self._segments.pop(number)
        # before the memory goes: its addresses may be those of another tensor at once
        self._list_places()
        if mapping.close():
            os.close(segment.fd)
            return True
        self._segments[number] = segment, mapping
        self._list_places()
        return False

    def _list_places(self) -> None:
        places = sorted((m.address, m.address + m.nbytes, s.number) for s, m in self._segments.values())
        self._places = [start for start, _, _ in places], [(end, number) for _, end, number in places]

    def _collect(self) -> None:
        """Give the slots back whose tensors are gone."""
        with contextlib.suppress(IndexError):
            while True:
                lease = self._leases.pop(id(self._dead.popleft()), None)
                if lease is not None:
                    self._own.give(lease.slot)

    def _let_go(self) -> None:
        """Give up the adopted storages that have died; whatever lies at their addresses now is something else."""
        for address, (storage, segment) in list(self._adopted.items()):
            if storage.expired():
                del self._adopted[address]
                self._gone.append(segment.number)

    def _known(self, number: int, attempted: str) -> tuple[Segment, Mapping]:
        known = self._segments.get(number)
        if known is None:
            if self._closed:
                raise self._closed_error(attempted)
            raise StateError(f"there is no segment {number} (any more)", state="forgotten", attempted=attempted)
        return known

    @staticmethod
    def _closed_error(attempted: str) -> StateError:
        return StateError(
            f"{attempted}() after the arena was closed; make a new process group", state="closed", attempted=attempted
        )


def _descriptors() -> int:
    """How many this process may have, and a child that it starts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
