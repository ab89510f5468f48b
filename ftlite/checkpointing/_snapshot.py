# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a heal: a state taken apart at publish, and its bytes on demand.

``publish`` runs on the caller's thread, once per step that is offered: it walks the state, lays it out,
copies what must not change (see ``snapshot``), brings device memory to the host once, and sums every chunk.
After that any number of threads may call ``blocks``; a snapshot is never changed.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._errors import LayoutError
from . import _tree
from ._checksum import RowSum, checksum_of
from ._describe import Leaf, describe
from ._device import HostStage
from ._interval import Interval
from ._layout import FlatSpace, Layout, cut, packed_stride
from ._manifest import (
    MAX_MANIFEST_BYTES,
    PACKED,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    Spec,
    with_bits,
)
from ._memory import byte_tensor, collector_paused, copy_elements, offset_bytes, tensor_in, view_at

# Optimizer steps, BatchNorm statistics, counters, RNG states: what a forward or a scheduler changes is small.
SNAPSHOT_BYTES = 32 << 20
SNAPSHOTS = ("small", "all", "none")
# What is sent or summed in one go: large enough that the call is cheap beside it, small enough for the cache.
BLOCK_BYTES = 1 << 20


class _Part(NamedTuple):
    """Host memory that is served: ``nbytes`` at ``address``, from ``start`` of its extent; while ``owner`` lives."""

    start: int
    nbytes: int
    address: int
    owner: torch.Tensor


class Snapshot:
    """A published state: the document about it, and its bytes in the flat space."""

    def __init__(
        self, state: Any, manifest: Manifest, leaves: list[Leaf], parts: list[_Part], copied: set[int]
    ) -> None:
        self.step = manifest.step
        # length, checksum and object of the single stream, once somebody has asked for it; not used here
        self.stream: tuple[int, int, Any] | None = None
        self.flat: FlatSpace = manifest.flat()
        self.ends = manifest.ends
        self._state = state
        self.manifest = manifest
        self._leaves = leaves
        self._copied = copied
        self._parts = parts
        self._small = _joined(parts[self.flat.large :])
        self._small_starts = [part.start for part in self._small]
        manifest.sums = [self._sum(start, end) for start, end in zip([0, *self.ends], self.ends)]
        self.document = manifest.to_bytes()
        self.document_sum = checksum_of(self.document)
        if len(self.document) > MAX_MANIFEST_BYTES:
            raise LayoutError(
                f"the description of {len(leaves)} tensors takes {len(self.document)} bytes, more than the "
                f"{MAX_MANIFEST_BYTES} that a receiver accepts; keep large plain data in tensors, or send less at once"
            )

    def whole(self) -> Any:
        """The state as one object, on the host, with the values of publish where those were copied.

        Raises:
            LayoutError: it has a DTensor on a device, which is on the host as a shard only.
        """
        if any(each.dtensor is not None and each.tensor.device.type != "cpu" for each in self._leaves):
            raise LayoutError(
                "the single stream carries no DTensor of a device; the receiver needs num_chunks=None for it"
            )
        made: dict[int, Any] = {}
        storages: dict[int, torch.UntypedStorage] = {}

        def leaf(tag: str, number: int) -> Any:
            if number not in made:  # or what is tied would arrive apart
                made[number] = self._leaf_of_whole(tag, number, storages)
            return made[number]

        return _tree.build(self.manifest.tree, leaf, self._state)

    def copy_to(self, targets: Sequence[Interval | None]) -> None:
        """Copy every region to its intervals, as a transfer would."""
        for part, interval in zip(self._parts, targets):
            host = torch.frombuffer(view_at(part.address, part.nbytes), dtype=torch.uint8)
            while interval is not None:
                interval.write(interval.start, host, interval.start, interval.end)
                interval = interval.next

    def _leaf_of_whole(self, tag: str, number: int, storages: dict[int, torch.UntypedStorage]) -> Any:
        record, leaf = self.manifest.record(number), self._leaves[number]
        region, spec = record.region, record.spec
        if tag == "p" or record.dtensor is not None or region not in self._copied:
            return leaf.obj
        lead = self.manifest.leads.get(region, 0)
        if region not in storages:
            storages[region] = self._storage_of_whole(region, lead, spec)
        tensor = with_bits(tensor_in(storages[region], spec.dtype, lead + record.offset, spec.shape, spec.stride), spec)
        if spec.flags & PARAMETER:
            return torch.nn.Parameter(tensor, requires_grad=bool(spec.flags & REQUIRES_GRAD))
        return tensor.requires_grad_() if spec.flags & REQUIRES_GRAD else tensor

    def _storage_of_whole(self, region: int, lead: int, spec: Spec) -> torch.UntypedStorage:
        part = self._parts[region]
        storage = part.owner.untyped_storage()
        if region >= self.flat.large or lead:  # in the arena, or by itself where it would not be aligned
            storage = torch.empty(lead + part.nbytes, dtype=torch.uint8).untyped_storage()
            view_at(storage.data_ptr() + lead, part.nbytes)[:] = view_at(part.address, part.nbytes)
        if spec.flags & PACKED:  # whose tensors are all the same view
            gapped = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            copy_elements(gapped, tensor_in(storage, spec.dtype, 0, spec.shape, spec.wire_stride))
            return gapped.untyped_storage()
        return storage

    def blocks(self, start: int, end: int) -> Iterator[tuple[memoryview, bool]]:
        """The flat bytes ``start`` to ``end`` in blocks, each with whether an extent's piece ends with it.

        A block is good until the next one is asked for.
        """
        scratch: memoryview | None = None
        for extent, at, stop in self.flat.pieces(start, end):
            while at < stop:
                n = min(stop - at, BLOCK_BYTES)
                if extent < self.flat.large:
                    view = view_at(self._parts[extent].address + at, n)
                else:
                    if scratch is None:
                        scratch = memoryview(bytearray(min(BLOCK_BYTES, stop - at)))
                    view = self._gather(at, n, scratch)
                at += n
                yield view, at == stop

    def _gather(self, at: int, n: int, scratch: memoryview) -> memoryview:
        number = bisect_right(self._small_starts, at) - 1
        part = self._small[number]
        if at + n <= part.start + part.nbytes:
            return view_at(part.address + at - part.start, n)
        filled = 0
        while filled < n:
            part = self._small[number]
            skipped = at + filled - part.start
            taken = min(part.nbytes - skipped, n - filled)
            scratch[filled : filled + taken] = view_at(part.address + skipped, taken)
            filled += taken
            number += 1
        return scratch[:n]

    def _sum(self, start: int, end: int) -> int:
        sums = RowSum()
        for view, ends in self.blocks(start, end):
            sums.feed(view)
            if ends:
                sums.restart()
        return sums.value()


def publish(
    state: Any, step: int, *, weights_only: bool, snapshot: str, num_chunks: int | None, stage: HostStage
) -> Snapshot:
    """Take ``state`` of ``step`` apart for serving.

    Args:
        weights_only: whether leaves that are neither plain nor tensors must pass torch's safe loader.
        snapshot: which CPU memory is copied now: the smallest regions up to 32 MB ("small"), "all", "none".
        num_chunks: how many chunks to announce; None for as many as serve well.
        stage: brings device memory to the host.

    Raises:
        LayoutError: a leaf that cannot be carried.
    """
    with collector_paused():
        manifest, layout, leaves = describe(state, step, weights_only)
    manifest.ends = cut(sum(manifest.sizes), num_chunks)
    tensors = [leaf.tensor for leaf in leaves]
    owners = _owners(manifest)
    copied = _choose_copied(layout, tensors, owners, snapshot)
    arena = torch.empty(sum(manifest.sizes[i] for i in copied if i >= layout.large), dtype=torch.uint8)
    arena_address = arena.data_ptr()
    parts: list[_Part] = []
    start = 0
    try:
        for number, region in enumerate(layout.regions):
            small = number >= layout.large
            part = _place(tensors[owners[number]], layout, number, start if small else 0)
            if number not in copied:
                # of the storage and not of the tensor, whose .data the trainer may set to other memory
                part = part._replace(owner=byte_tensor(part.owner, 0, 0))
            elif small:
                part = _copied(part, _Part(start, region.nbytes, arena_address, arena), stage)
                arena_address += region.nbytes
            else:
                host = torch.empty(region.nbytes, dtype=torch.uint8)
                part = _copied(part, _Part(0, region.nbytes, host.data_ptr(), host), stage)
            parts.append(part)
            start += region.nbytes if small else 0
        stage.finish()
    except BaseException:
        stage.abandon()
        raise
    return Snapshot(state, manifest, leaves, parts, copied)


def _owners(manifest: Manifest) -> list[int]:
    """For every region one of the tensors that lie in it."""
    owners = [-1] * len(manifest.sizes)
    for index, region in enumerate(manifest.regions):
        if region >= 0 and owners[region] < 0:
            owners[region] = index
    return owners


def _choose_copied(layout: Layout, tensors: list[torch.Tensor], owners: list[int], snapshot: str) -> set[int]:
    """The regions that get a copy on the host: all device memory, and of the host's what ``snapshot`` says."""
    copied = {i for i in range(len(layout.regions)) if tensors[owners[i]].device.type != "cpu"}
    budget = {"small": SNAPSHOT_BYTES, "none": 0}.get(snapshot)
    on_host = [i for i in range(len(layout.regions)) if i not in copied]
    for i in sorted(on_host, key=lambda i: layout.regions[i].nbytes):
        if budget is not None:
            budget -= layout.regions[i].nbytes
            if budget < 0:
                break
        copied.add(i)
    return copied


def _place(tensor: torch.Tensor, layout: Layout, number: int, start: int) -> _Part:
    """Where the bytes of region ``number`` are now, on whichever device."""
    region = layout.regions[number]
    if region.view is None:
        return _Part(start, region.nbytes, tensor.untyped_storage().data_ptr() + region.start, tensor)
    shape, stride = tuple(tensor.shape), tensor.stride()
    raw = tensor_in(tensor.untyped_storage(), tensor.dtype, offset_bytes(tensor), shape, stride)
    packed = torch.empty_strided(shape, packed_stride(shape, stride), dtype=raw.dtype, device=raw.device)
    copy_elements(packed, raw)
    return _Part(start, region.nbytes, packed.data_ptr(), packed)


def _copied(part: _Part, target: _Part, stage: HostStage) -> _Part:
    """Copy ``part`` to ``target``, on the host, and return that; from a device by way of ``stage``."""
    if part.owner.device.type == "cpu":
        ctypes.memmove(target.address, part.address, part.nbytes)
    else:
        source = byte_tensor(part.owner, part.address - part.owner.untyped_storage().data_ptr(), part.nbytes)
        stage.copy(byte_tensor(target.owner, target.address - target.owner.data_ptr(), target.nbytes), source)
    return target


def _joined(parts: list[_Part]) -> list[_Part]:
    """Small parts that lie side by side in memory as in the flat space, joined: all of them, for most states.

    The owners are kept by the parts that were joined.
    """
    out: list[_Part] = []
    run_start = run_bytes = run_address = 0
    for part in parts:
        if out and run_address + run_bytes == part.address:
            run_bytes += part.nbytes
            out[-1] = _Part(run_start, run_bytes, run_address, part.owner)
            continue
        run_start, run_bytes, run_address = part.start, part.nbytes, part.address
        out.append(part)
    return out
