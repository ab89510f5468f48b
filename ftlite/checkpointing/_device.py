# SPDX-License-Identifier: BSD-3-Clause
"""Device memory to the host and back, through pinned buffers of bounded size.

``HostStage`` belongs to one transport and is used by one thread at a time. Device modules (torch.cuda,
torch.xpu) are asked for by ``torch.get_device_module``, so any accelerator with streams works alike.
"""

from __future__ import annotations

from typing import Any

import torch

# Two of these per device in use: enough that the copy over the bus and the copy on the host overlap, and far
# below what a node has; pinning more costs longer (about 0.3 ms per MB) than it saves.
SLOT_BYTES = 64 << 20


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 buffer on the host, page-locked for ``device`` where its allocator can."""
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Slot:
    """One pinned buffer, the copies under way into it, and where each has to go."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.buffer = pinned(nbytes, device)
        self.used = 0
        # with their sources: the allocator may give memory of which nobody knows any more to the next tensor of the
        # caller's stream, while a copy from it still waits on ours
        self.targets: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.event: Any = None

    def drain(self) -> None:
        """Wait for the copies into the buffer and move them to where they belong."""
        if self.event is not None:
            self.event.synchronize()
        for at, host, _ in self.targets:
            host.copy_(self.buffer[at : at + host.numel()])
        self.clear()

    def clear(self) -> None:
        """Be empty."""
        self.used, self.targets, self.event = 0, [], None


class _Lane:
    """The side stream and the two slots of one device."""

    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        self.slots = [_Slot(device, slot_bytes), _Slot(device, slot_bytes)]
        self.device = device

    def copy(self, host: torch.Tensor, source: torch.Tensor) -> None:
        # the bytes must be those that the caller's stream has produced so far
        self.stream.wait_stream(self.module.current_stream(self.device))
        at = 0
        while at < source.numel():
            slot = self.slots[0]
            n = min(source.numel() - at, slot.buffer.numel() - slot.used)
            with self.module.stream(self.stream):
                slot.buffer[slot.used : slot.used + n].copy_(source[at : at + n], non_blocking=True)
            slot.targets.append((slot.used, host[at : at + n], source))
            slot.used += n
            at += n
            if slot.used == slot.buffer.numel():
                self.turn()

    def turn(self) -> None:
        """Mark the filled slot's end on the stream and go on with the other one, emptied first."""
        self.slots[0].event = self.module.Event()
        self.slots[0].event.record(self.stream)
        self.slots.reverse()
        self.slots[0].drain()


class HostStage:
    """Copies bytes to host memory; the buffers stay for the next publish."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        self._slot_bytes = slot_bytes
        self._lanes: dict[torch.device, _Lane] = {}

    def copy(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` (uint8, 1-D, any device) to ``host``, which is complete after ``finish``."""
        if source.device.type == "cpu":
            host.copy_(source)
            return
        lane = self._lanes.get(source.device)
        if lane is None:
            lane = self._lanes[source.device] = _Lane(source.device, self._slot_bytes)
        lane.copy(host, source)

    def abandon(self) -> None:
        """Forget the copies under way, after a failure, so that nothing keeps their memory."""
        for lane in self._lanes.values():
            try:
                lane.stream.synchronize()
            finally:  # a device that has failed cannot be waited for
                for slot in lane.slots:
                    slot.clear()

    def finish(self) -> None:
        """Wait until every copy is where it belongs; the sources may be changed from here on."""
        for lane in self._lanes.values():
            lane.turn()
            lane.turn()


def settle(device: torch.device) -> None:
    """Wait until the work queued so far on the current stream of ``device`` is done."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()
