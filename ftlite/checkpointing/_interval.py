# SPDX-License-Identifier: BSD-3-Clause
"""Where a run of bytes of a region goes at the receiver."""

from __future__ import annotations

import torch

from ._memory import byte_tensor, offset_bytes, view_at


class Interval:
    """Bytes ``start`` to ``end`` of a region, and where they go: ``host`` memory, or ``device_bytes`` (uint8)."""

    __slots__ = ("device_bytes", "end", "host", "owner", "start")

    def __init__(self, start: int, end: int, owner: torch.Tensor) -> None:
        """``owner`` is a tensor without gaps whose memory begins where the bytes go."""
        self.start = start
        self.end = end
        self.owner = owner
        self.host: memoryview | None = None
        self.device_bytes: torch.Tensor | None = None
        if owner.device.type == "cpu":
            self.host = view_at(owner.data_ptr(), end - start)
        else:
            self.device_bytes = byte_tensor(owner, offset_bytes(owner), end - start)

    def memory(self) -> torch.Tensor:
        """Where the bytes go, as a uint8 tensor."""
        if self.device_bytes is not None:
            return self.device_bytes
        return byte_tensor(self.owner, offset_bytes(self.owner), self.end - self.start)
