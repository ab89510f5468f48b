# SPDX-License-Identifier: BSD-3-Clause
"""Where a run of bytes of a region goes at the receiver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ._layout import FlatSpace
from ._memory import byte_tensor, view_at


class Interval:
    """Bytes ``start`` to ``end`` of a region go to the memory of a tensor without gaps, from its begin on.

    ``next`` is the interval that follows in the same region, if any. ``address`` is that of the memory, and ``owner``
    its storage: not the tensor, whose .data somebody may set to other memory meanwhile.
    """

    __slots__ = ("address", "end", "next", "on_host", "owner", "start")

    def __init__(self, start: int, end: int, tensor: torch.Tensor) -> None:
        self.start = start
        self.end = end
        self.owner = tensor.untyped_storage()
        self.on_host = tensor.device.type == "cpu"
        self.address = tensor.data_ptr()
        self.next: Interval | None = None

    def host_view(self, at: int, nbytes: int) -> memoryview:
        """The host memory for ``nbytes`` bytes from ``at`` of the region on; as good as long as the owner."""
        return view_at(self.address + at - self.start, nbytes)

    def memory(self) -> torch.Tensor:
        """All of the memory, as a uint8 tensor."""
        return byte_tensor(self.owner, self.address - self.owner.data_ptr(), self.end - self.start)

    def write(self, at: int, buffer: torch.Tensor, low: int, high: int) -> None:
        """Copy bytes ``low`` to ``high`` of ``buffer`` (uint8, on the host) to byte ``at`` of the region."""
        if self.on_host:
            ctypes.memmove(self.address + at - self.start, buffer.data_ptr() + low, high - low)
        else:
            self.memory()[at - self.start :][: high - low].copy_(buffer[low:high])


def spread(
    intervals: Sequence[Interval | None], flat: FlatSpace, extent: int, at: int, buffer: torch.Tensor, low: int, n: int
) -> None:
    """Copy ``n`` bytes from ``low`` of ``buffer`` (uint8, on the host) to where those from ``at`` of ``extent`` belong.

    ``intervals`` has the first one of every region.
    """
    pieces = [(extent, at, at + n)] if extent < flat.large else flat.small_pieces(at, at + n)
    for region, start, end in pieces:
        target = intervals[region]
        while target is not None:
            first, last = max(start, target.start), min(end, target.end)
            if first < last:
                target.write(first, buffer, low + first - start, low + last - start)
            target = target.next
        low += end - start
