# SPDX-License-Identifier: BSD-3-Clause
"""Byte slots in segments: who has which, and where the next one goes.

Rules of this file: pure, no clock (time comes in as a number), no lock, no I/O; its owner calls it under one lock.
Slots never overlap, start at a multiple of 64 bytes, and neighbours that were given back become one again.

The same memory is given out again as soon as it can be, since the first touch of a page costs ten times the copy:

    small   by classes, powers of two; given back on a stack of its class, which is one pop for the next take
    large   the smallest free range that holds it, the lowest of those; merged with its neighbours when given back

When no range is large enough, the stacks are emptied into the ranges and it is tried again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from .._errors import StateError

__all__ = ["ALIGN_BYTES", "SMALL_BYTES", "Area", "Slot", "Slots"]

# A cache line, so that two slots never share one; also what vector instructions and every dtype (16 bytes) ask for.
ALIGN_BYTES = 64

# Up to here a slot comes from its class. Finding and merging a range costs 4 us, which is what copying 64 KB in and
# out costs; and rounding up to a power of two wastes little of a small slot.
SMALL_BYTES = 1 << 16

_LOWEST = ALIGN_BYTES.bit_length() - 1
_CLASSES = SMALL_BYTES.bit_length() - _LOWEST


class Area:
    """A segment as the slots know it: ``number``, ``nbytes``, ``address`` of its first byte in this process.

    ``out`` counts its slots that are out. ``idle_since_s`` is when it was last seen to have none, None if not seen.
    """

    __slots__ = ("address", "idle_since_s", "nbytes", "number", "out", "uses", "uses_seen")

    def __init__(self, number: int, nbytes: int, address: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.address = address
        self.out = 0
        self.uses = 0
        self.uses_seen = 0
        self.idle_since_s: float | None = None


class Slot:
    """Bytes ``offset`` to ``offset + nbytes`` of segment ``segment``, at address ``pointer``, for whoever took them.

    ``room`` is how much of the segment is taken for it (bytes), 0 once it is given back.
    """

    __slots__ = ("area", "nbytes", "offset", "pointer", "room", "segment")

    def __init__(self, area: Area, offset: int, nbytes: int, room: int) -> None:
        self.area = area
        self.segment = area.number
        self.offset = offset
        self.pointer = area.address + offset
        self.nbytes = nbytes
        self.room = room

    def __repr__(self) -> str:
        return f"Slot(segment={self.segment}, offset={self.offset}, nbytes={self.nbytes})"


def room_for(nbytes: int) -> int:
    """How many bytes a slot of ``nbytes`` takes up."""
    if nbytes > SMALL_BYTES:
        return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return 1 << max(_LOWEST, (nbytes - 1).bit_length()) if nbytes > 1 else ALIGN_BYTES


class Slots:
    """The slots of some segments. ``out_bytes`` is what is out."""

    def __init__(self) -> None:
        self.out_bytes = 0
        self._areas: dict[int, Area] = {}
        self._stacks: list[list[tuple[Area, int]]] = [[] for _ in range(_CLASSES)]
        # free ranges: sorted by (bytes, segment, offset); and each by its first byte, and by the one after its last
        self._ranges: list[tuple[int, int, int]] = []
        self._by_start: dict[tuple[int, int], int] = {}
        self._by_end: dict[tuple[int, int], int] = {}

    def areas(self) -> list[Area]:
        """The segments."""
        return list(self._areas.values())

    def add(self, number: int, nbytes: int, address: int = 0) -> None:
        """Add segment ``number``, all of it free; ``nbytes`` is a multiple of 64."""
        if number in self._areas or nbytes % ALIGN_BYTES or nbytes <= 0:
            raise ValueError(f"segment {number} of {nbytes} bytes is known, or not a multiple of {ALIGN_BYTES} bytes")
        self._areas[number] = Area(number, nbytes, address)
        self._free(number, 0, nbytes)

    def remove(self, number: int) -> None:
        """Take segment ``number`` away.

        Raises:
            StateError: slots of it are out.
        """
        area = self._areas[number]
        if area.out:
            raise StateError(
                f"segment {number} has {area.out} slots out; give them back first", state="in use", attempted="remove"
            )
        self._empty_stacks()
        self._unlist(area.nbytes, number, 0)
        del self._areas[number]

    def idle(self, now_s: float, after_s: float) -> list[int]:
        """The segments that had no slot out, and none taken, for ``after_s`` seconds, as far as these calls saw."""
        found = []
        for area in self._areas.values():
            if area.out:
                area.idle_since_s = None
            elif area.idle_since_s is None or area.uses != area.uses_seen:
                area.idle_since_s = now_s
            elif now_s - area.idle_since_s >= after_s:
                found.append(area.number)
            area.uses_seen = area.uses
        return found

    def take(self, nbytes: int) -> Slot | None:
        """A slot of ``nbytes`` bytes (0 is fine), None where no segment has the room."""
        if nbytes <= SMALL_BYTES:
            at = (nbytes - 1).bit_length() - _LOWEST if nbytes > ALIGN_BYTES else 0
            stack = self._stacks[at]
            room = ALIGN_BYTES << at
            if stack:
                area, offset = stack.pop()
            else:
                found = self._carve(room)
                if found is None:
                    return None
                area, offset = found
        else:
            room = room_for(nbytes)
            found = self._carve(room)
            if found is None:
                return None
            area, offset = found
        area.out += 1
        area.uses += 1
        self.out_bytes += room
        return Slot(area, offset, nbytes, room)

    def give(self, slot: Slot) -> bool:
        """Take ``slot`` back. False, and nothing done, when it is back already."""
        room = slot.room
        if not room:
            return False
        slot.room = 0
        area = slot.area
        area.out -= 1
        self.out_bytes -= room
        if room <= SMALL_BYTES:
            self._stacks[room.bit_length() - 1 - _LOWEST].append((area, slot.offset))
        else:
            self._free(area.number, slot.offset, room)
        return True

    def free_ranges(self) -> list[tuple[int, int, int]]:
        """What is free, merged: (segment, offset, bytes), sorted."""
        self._empty_stacks()
        return sorted((segment, offset, nbytes) for nbytes, segment, offset in self._ranges)

    def _carve(self, room: int) -> tuple[Area, int] | None:
        """Cut ``room`` bytes from the best range."""
        at = bisect_left(self._ranges, (room, 0, 0))
        if at == len(self._ranges):
            if not self._empty_stacks():
                return None
            at = bisect_left(self._ranges, (room, 0, 0))
            if at == len(self._ranges):
                return None
        nbytes, number, offset = self._ranges.pop(at)
        del self._by_start[number, offset]
        del self._by_end[number, offset + nbytes]
        if nbytes > room:
            self._list(nbytes - room, number, offset + room)
        return self._areas[number], offset

    def _free(self, number: int, offset: int, nbytes: int) -> None:
        """Put a range back, merged with its free neighbours."""
        before = self._by_end.get((number, offset))
        if before is not None:
            self._unlist(before, number, offset - before)
            offset -= before
            nbytes += before
        behind = self._by_start.get((number, offset + nbytes))
        if behind is not None:
            self._unlist(behind, number, offset + nbytes)
            nbytes += behind
        self._list(nbytes, number, offset)

    def _empty_stacks(self) -> bool:
        """Turn the small slots that are waiting into ranges again; whether there were any."""
        found = False
        for at, stack in enumerate(self._stacks):
            for area, offset in stack:
                self._free(area.number, offset, ALIGN_BYTES << at)
                found = True
            stack.clear()
        return found

    def _list(self, nbytes: int, number: int, offset: int) -> None:
        insort(self._ranges, (nbytes, number, offset))
        self._by_start[number, offset] = nbytes
        self._by_end[number, offset + nbytes] = nbytes

    def _unlist(self, nbytes: int, number: int, offset: int) -> None:
        del self._ranges[bisect_left(self._ranges, (nbytes, number, offset))]
        del self._by_start[number, offset]
        del self._by_end[number, offset + nbytes]
