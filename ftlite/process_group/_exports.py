# SPDX-License-Identifier: BSD-3-Clause
"""Which device memory of this process others can open: each storage is exported once, for all children of a group.

An export costs a call into the driver and an event of torch's, of which there are a thousand. So it is kept as long
as its storage lives, and found again by the address of torch's storage object and of its memory.

    holders   the children that were told of it and have not said that they have dropped it
    release   of torch's counter, once, when the storage is dead and nobody holds it

While a child may still have the memory open, torch must not give it back to the driver, and a child that was killed
says nothing any more: so the trainer alone releases, and a child's own end never does.

Locks: one, around ``holders``. The death of a storage is told in whichever thread it comes, in the middle of
anything: that takes no lock, and what it meets here is a flag and a queue.
"""

from __future__ import annotations

import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from .._errors import UnsupportedOp
from ._accelerator import Accelerator, accelerator

__all__ = ["AllExports", "Export", "Exports"]

# How many exports are looked at with each op, at 0.5 us each: a model's parameters in some dozens of ops.
_LOOKS = 4


class Export:
    """One exported storage, under a number that no other of the group has."""

    def __init__(self, number: int, accelerator: Accelerator, storage: torch.UntypedStorage) -> None:
        shared = accelerator.share(storage)
        self.number = number
        self.handle = shared.handle
        self.nbytes = shared.nbytes
        self.offset = shared.offset
        self.pointer = accelerator.address(storage)
        self.is_dead = False
        self.holders = 0
        self._accelerator = accelerator
        self._counters = [shared.counter]
        self._owner = os.getpid()
        self._storage = weakref.ref(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is of ``storage`` as it is now: a resized one has other memory."""
        if self._storage() is not storage:
            return False
        return self.pointer == self._accelerator.address(storage) and self.nbytes == storage.nbytes()

    def is_gone(self) -> bool:
        """Whether the storage is dead, or has other memory by now."""
        storage = self._storage()
        return storage is None or not self.is_of(storage)

    def die(self) -> None:
        """The memory is not the storage's any more; from any thread, without a lock."""
        self.is_dead = True
        self.release_if_free()

    def release_if_free(self) -> None:
        """Release the counter if the time has come. Of two threads that come here at once, one does."""
        if not self.is_dead or self.holders or os.getpid() != self._owner:
            return
        try:
            counter = self._counters.pop()
        except IndexError:
            return
        self._accelerator.release(counter)


class Exports:
    """The exports of one group for one kind of device. ``numbers`` are those that nothing of the group has yet."""

    def __init__(self, accelerator: Accelerator, numbers: Iterator[int]) -> None:
        self.accelerator = accelerator
        self.numbers = numbers
        self._lock = threading.RLock()
        self._known: dict[int, Export] = {}  # by the address of torch's storage object
        self._died: collections.deque[tuple[int, Export]] = collections.deque()
        self._listeners: list[weakref.ref[collections.deque[Export]]] = []
        self._rounds: collections.deque[tuple[int, Export]] = (
            collections.deque()
        )  # those known, to be looked at in turn

    def listen(self) -> collections.deque[Export]:
        """A queue that gets every export whose storage dies, for as long as somebody has the queue."""
        queue: collections.deque[Export] = collections.deque()
        with self._lock:
            self._listeners = [each for each in self._listeners if each() is not None]
            self._listeners.append(weakref.ref(queue))
        return queue

    def find(self, storage: torch.UntypedStorage) -> Export:
        """The export of ``storage``, made if need be.

        Raises:
            UnsupportedOp: it cannot be exported; what to change is told.
        """
        key = storage._cdata
        with self._lock:
            export = self._known.get(key)
            if export is not None and export.is_of(storage):
                return export
            if export is not None:
                self._retire(key, export)
            try:
                export = Export(next(self.numbers), self.accelerator, storage)
            except RuntimeError as error:
                raise _refused(self.accelerator.kind, error) from error
            # not by a weak reference of ours: the counter has to be released even when the group is gone before
            weakref.finalize(storage, _storage_died, self._died, key, export).atexit = False
            self._known[key] = export
            self._rounds.append((key, export))
        return export

    def hold(self, export: Export) -> None:
        """One more child is told of it."""
        with self._lock:
            export.holders += 1

    def let_go(self, export: Export) -> None:
        """One child less has it open."""
        with self._lock:
            export.holders -= 1
        export.release_if_free()
        if export.is_dead:
            self.accelerator.collect()

    def sweep(self) -> None:
        """Tell the listeners of storages that have died or were resized."""
        while self._died:
            self._retire(*self._died.popleft())
        with self._lock:
            # a resized storage lives on, and nobody tells: a few are looked at each time
            for _ in range(min(_LOOKS, len(self._rounds))):
                key, export = self._rounds.popleft()
                if self._known.get(key) is not export:
                    continue
                if export.is_gone():
                    self._retire(key, export)
                else:
                    self._rounds.append((key, export))

    def _retire(self, key: int, export: Export) -> None:
        with self._lock:
            if self._known.get(key) is export:
                del self._known[key]
            export.die()
            for each in self._listeners:
                queue = each()
                if queue is not None:
                    queue.append(export)


class AllExports:
    """The exports of one group.

    Args:
        find: the functions for a kind of device.
    """

    def __init__(self, find: Callable[[str], Accelerator] = accelerator) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._kinds: dict[str, Exports] = {}
        self._numbers = itertools.count(1)  # 0 stands for no memory

    def of(self, kind: str) -> Exports:
        """Those of one kind of device.

        Raises:
            UnsupportedOp: this torch cannot hand memory of that kind to another process.
        """
        with self._lock:
            found = self._kinds.get(kind)
            if found is None:
                found = self._kinds[kind] = Exports(self._find(kind), self._numbers)
        return found


def _storage_died(died: collections.deque[tuple[int, Export]], key: int, export: Export) -> None:
    export.die()
    died.append((key, export))


def _refused(kind: str, error: Exception) -> UnsupportedOp:
    reason = (str(error).splitlines() or [""])[0]
    return UnsupportedOp(
        f"the memory of a {kind} tensor cannot be exported to the child process ({reason}): "
        f"PYTORCH_CUDA_ALLOC_CONF is {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')!r}, and neither "
        "expandable_segments:True nor backend:cudaMallocAsync nor an allocator of one's own can be exported; "
        "a tensor that came from another process has to be cloned first"
    )
