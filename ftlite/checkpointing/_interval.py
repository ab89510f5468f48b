# SPDX-License-Identifier: BSD-3-Clause
"""Where a run of bytes of a region goes at the receiver."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._copy import copy_bytes
from ._layout import FlatSpace
from ._memory import byte_tensor, populate, view_at


class Interval:
    """Bytes ``start`` to ``end`` of a region go to the memory of a tensor without gaps, from its begin on.

    ``next`` is the interval that follows in the same region, if any. ``address`` is that of the memory, and ``owner``
    its storage: not the tensor, whose .data somebody may set to other memory meanwhile. ``is_new``: the memory was
    allocated for this, and nobody has written to it.
    """

    __slots__ = ("address", "end", "is_new", "next", "on_host", "owner", "start")

    def __init__(self, start: int, end: int, tensor: torch.Tensor, *, is_new: bool = False) -> None:
        self.start = start
        self.end = end
        self.owner = tensor.untyped_storage()
        self.on_host = tensor.is_cpu
        self.address = tensor.data_ptr()
        self.is_new = is_new
        self.next: Interval | None = None

    def host_view(self, at: int, nbytes: int) -> memoryview:
        """The host memory for ``nbytes`` bytes from ``at`` of the region on, to be written to; as good as long as
        the owner."""
        address = self.address + at - self.start
        if self.is_new:
            populate(address, nbytes)
        return view_at(address, nbytes)

    def memory(self) -> torch.Tensor:
        """All of the memory, as a uint8 tensor."""
        return byte_tensor(self.owner, self.address - self.owner.data_ptr(), self.end - self.start)


def spread(
    intervals: Sequence[Interval | None], flat: FlatSpace, extent: int, at: int, buffer: torch.Tensor, low: int, n: int
) -> None:
    """Copy ``n`` bytes from ``low`` of ``buffer`` (uint8, on the host) to where those from ``at`` of ``extent`` belong.

    ``intervals`` has the first one of every region.
    """
    pieces = [(extent, at, at + n)] if extent < flat.large else flat.small_pieces(at, at + n)
    address = buffer.data_ptr()
    for region, start, end in pieces:
        put(intervals[region], start, end, buffer, address, low)
        low += end - start


def put(target: Interval | None, start: int, end: int, buffer: torch.Tensor, address: int, low: int) -> None:
    """Copy bytes ``start`` to ``end`` of a region, from ``low`` of ``buffer`` (which is at ``address``), to its
    intervals, of which ``target`` is the first.
    """
    while target is not None:
        first = target.start if target.start > start else start
        last = target.end if target.end < end else end
        if first < last:
            source, goal, size = low + first - start, first - target.start, last - first
            if target.on_host:
                copy_bytes(target.address + goal, address + source, size)
            else:
                target.memory()[goal : goal + size].copy_(buffer[source : source + size])
        target = target.next
