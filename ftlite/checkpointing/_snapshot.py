# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side of a heal: a state taken apart at publish, and its bytes on demand.

``publish`` runs on the caller's thread, once per step that is offered: it walks the state, lays it out,
copies what must not change (see ``snapshot``), brings device memory to the host once, and sums every chunk.
After that any number of threads may call ``blocks``; a snapshot is never changed.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._errors import IntegrityError, LayoutError
from . import _tree
from ._checksum import RowSum, checksum_of
from ._describe import Leaf, describe
from ._device import HostStage
from ._interval import Interval, put
from ._layout import FlatSpace, Layout, Region, cut, packed_stride
from ._manifest import (
    MAX_MANIFEST_BYTES,
    PACKED,
    Manifest,
    Spec,
    of_its_kind,
    with_bits,
)
from ._memory import byte_tensor, collector_paused, copy_elements, offset_bytes, tensor_in, view_at

# Optimizer steps, BatchNorm statistics, counters, RNG states: what a forward or a scheduler changes is small.
SNAPSHOT_BYTES = 32 << 20
SNAPSHOTS = ("small", "all", "none")
# What is sent or summed in one go: large enough that the call is cheap beside it, small enough for the cache.
BLOCK_BYTES = 1 << 20
_CHANGED = (
    "the donor has changed the state since it was published; a donor that trains on while it serves needs "
    'snapshot="all", or disallow_checkpoint() and another send_checkpoint()'
)


class _Run(NamedTuple):
    """Small regions that lie side by side: ``nbytes`` at ``address``, from ``start`` of their extent."""

    start: int
    nbytes: int
    address: int


class _Memory(NamedTuple):
    """Where the regions are on the host: by number their address, and the storage that keeps it.

    Columns, as in the manifest. Storages and not tensors, whose .data the trainer may set to other memory. ``copied``
    are the regions that are copies of our own.
    """

    addresses: list[int]
    owners: list[torch.UntypedStorage]
    copied: set[int]


class Snapshot:
    """A published state: the document about it, and its bytes in the flat space."""

    def __init__(
        self, state: Any, manifest: Manifest, leaves: list[Leaf], memory: _Memory, summed: bool = True
    ) -> None:
        self.step = manifest.step
        self.flat: FlatSpace = manifest.flat()
        self.ends = manifest.ends
        self._state = state
        self.manifest = manifest
        self._leaves = leaves
        self._memory = memory
        self._small = _joined(self.flat, memory.addresses)
        self._small_starts = [run.start for run in self._small]
        ranges = zip([0, *self.ends], self.ends)
        manifest.sums = [self.sum_of(start, end) for start, end in ranges] if summed else [0] * len(self.ends)
        self.document = manifest.to_bytes()
        self.document_sum = checksum_of(self.document)
        if len(self.document) > MAX_MANIFEST_BYTES:
            raise LayoutError(
                f"the description of {len(leaves)} tensors takes {len(self.document)} bytes, more than the "
                f"{MAX_MANIFEST_BYTES} that a receiver accepts; keep large plain data in tensors, or send less at once"
            )

    def require_unchanged(self) -> None:
        """Compare every chunk with its sum at publish; for a snapshot that was summed.

        Raises:
            IntegrityError: the donor has changed the memory since, or freed it.
        """
        owners = self._memory.owners
        for owner, address, nbytes in zip(owners, self._memory.addresses, self.flat.sizes):
            start = owner.data_ptr()
            if not start <= address <= address + nbytes <= start + owner.nbytes():
                raise IntegrityError(_CHANGED)
        for number, (leaf, region) in enumerate(zip(self._leaves, self.manifest.regions)):
            # .data may have been set to other memory
            if self._goes_as_it_is(number) and region >= 0 and leaf.tensor.data_ptr() != self._address_of(number):
                raise IntegrityError(_CHANGED)
        for start, end, known in zip([0, *self.ends], self.ends, self.manifest.sums):
            if self.sum_of(start, end) != known:
                raise IntegrityError(_CHANGED)

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
        for address, nbytes, first in zip(self._memory.addresses, self.flat.sizes, targets):
            put(first, 0, nbytes, torch.frombuffer(view_at(address, nbytes), dtype=torch.uint8), address, 0)

    def _goes_as_it_is(self, number: int) -> bool:
        """Whether the donor's own object is a part of the whole; else it is made of what publish has copied."""
        record = self.manifest.record(number)
        return record.region not in self._memory.copied and not record.spec.flags & PACKED

    def _address_of(self, number: int) -> int:
        record = self.manifest.record(number)
        return self._memory.addresses[record.region] + record.offset

    def _leaf_of_whole(self, tag: str, number: int, storages: dict[int, torch.UntypedStorage]) -> Any:
        record, leaf = self.manifest.record(number), self._leaves[number]
        region, spec = record.region, record.spec
        if tag == "p" or record.dtensor is not None or self._goes_as_it_is(number):
            return leaf.obj
        lead = self.manifest.leads.get(region, 0)
        if region not in storages:
            storages[region] = self._storage_of_whole(region, lead, spec)
        tensor = with_bits(tensor_in(storages[region], spec.dtype, lead + record.offset, spec.shape, spec.stride), spec)
        return of_its_kind(tensor, spec)

    def _storage_of_whole(self, region: int, lead: int, spec: Spec) -> torch.UntypedStorage:
        storage, nbytes = self._memory.owners[region], self.flat.sizes[region]
        if region >= self.flat.large or lead:  # in the arena, or by itself where it would not be aligned
            storage = torch.empty(lead + nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
            view_at(storage.data_ptr() + lead, nbytes)[:] = view_at(self._memory.addresses[region], nbytes)
        if spec.flags & PACKED:  # whose tensors are all the same view
            gapped = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
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
                    view = view_at(self._memory.addresses[extent] + at, n)
                else:
                    if scratch is None:
                        scratch = memoryview(bytearray(min(BLOCK_BYTES, stop - at)))
                    view = self._gather(at, n, scratch)
                at += n
                yield view, at == stop

    def memory_of(self, start: int, end: int) -> torch.Tensor | None:
        """The flat bytes ``start`` to ``end`` as a uint8 tensor over their memory; None where that is in pieces."""
        pieces = list(self.flat.pieces(start, end))
        if len(pieces) != 1:
            return None
        extent, at, stop = pieces[0]
        region = extent
        address = self._memory.addresses[extent] + at if extent < self.flat.large else 0
        if extent >= self.flat.large:
            run = self._small[bisect_right(self._small_starts, at) - 1]
            if stop > run.start + run.nbytes:
                return None
            address = run.address + at - run.start
            region = next(self.flat.small_pieces(at, stop))[0]
        owner = self._memory.owners[region]
        offset = address - owner.data_ptr()
        # two storages may lie side by side by chance
        return byte_tensor(owner, offset, stop - at) if offset + stop - at <= owner.nbytes() else None

    def _gather(self, at: int, n: int, scratch: memoryview) -> memoryview:
        number = bisect_right(self._small_starts, at) - 1
        run = self._small[number]
        if at + n <= run.start + run.nbytes:
            return view_at(run.address + at - run.start, n)
        filled = 0
        while filled < n:
            run = self._small[number]
            skipped = at + filled - run.start
            taken = min(run.nbytes - skipped, n - filled)
            scratch[filled : filled + taken] = view_at(run.address + skipped, taken)
            filled += taken
            number += 1
        return scratch[:n]

    def sum_of(self, start: int, end: int) -> int:
        """The checksum of the flat bytes ``start`` to ``end`` as they are now."""
        sums = RowSum()
        for view, ends in self.blocks(start, end):
            sums.feed(view)
            if ends:
                sums.restart()
        return sums.value()


def publish(
    state: Any,
    step: int,
    *,
    weights_only: bool,
    snapshot: str,
    num_chunks: int | None,
    stage: HostStage,
    cut_into: Callable[[FlatSpace], list[int]] | None = None,
) -> Snapshot:
    """Take ``state`` of ``step`` apart for serving.

    Args:
        weights_only: whether leaves that are neither plain nor tensors must pass torch's safe loader.
        snapshot: which CPU memory is copied now: the smallest regions up to 32 MB ("small"), of these only such as
            share an extent ("gathered"), "all", "none".
        num_chunks: how many chunks to announce; None for as many as serve well.
        stage: brings device memory to the host.
        cut_into: gives the ends of the chunks in the place of ``num_chunks``; they are not summed here, and the
            document has zeros for it.

    Raises:
        LayoutError: a leaf that cannot be carried.
    """
    with collector_paused():
        manifest, layout, leaves = describe(state, step, weights_only)
    manifest.ends = cut(sum(manifest.sizes), num_chunks) if cut_into is None else cut_into(manifest.flat())
    try:
        memory = _take(manifest, layout, [leaf.tensor for leaf in leaves], snapshot, stage)
        stage.finish()
    except BaseException:
        stage.abandon()
        raise
    del layout  # several hundred bytes per tensor, before the document is made
    return Snapshot(state, manifest, leaves, memory, summed=cut_into is None)


def _take(manifest: Manifest, layout: Layout, tensors: list[torch.Tensor], snapshot: str, stage: HostStage) -> _Memory:
    """The memory of every region: as it is, or a copy of it, which for the small ones is in one piece."""
    owners = _owners(manifest)
    copied = _choose_copied(layout, tensors, owners, snapshot)
    memory = _Memory([], [], copied)
    # on the host by name: torch.set_default_device() may say otherwise
    arena = torch.empty(
        sum(manifest.sizes[i] for i in copied if i >= layout.large), dtype=torch.uint8, device="cpu"
    ).untyped_storage()
    used = 0
    for number, region in enumerate(layout.regions):
        owner, start = _place(tensors[owners[number]], region)
        if number in copied:
            source, first = owner, start
            if number >= layout.large:
                owner, start = arena, used
                used += region.nbytes
            else:
                owner, start = torch.empty(region.nbytes, dtype=torch.uint8, device="cpu").untyped_storage(), 0
            _copy(owner, start, source, first, region.nbytes, stage)
        memory.addresses.append(owner.data_ptr() + start)
        memory.owners.append(owner)
    return memory


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
    budget = {"small": SNAPSHOT_BYTES, "gathered": SNAPSHOT_BYTES, "none": 0}.get(snapshot)
    first = layout.large if snapshot == "gathered" else 0
    on_host = [i for i in range(first, len(layout.regions)) if i not in copied]
    for i in sorted(on_host, key=lambda i: layout.regions[i].nbytes):
        if budget is not None:
            budget -= layout.regions[i].nbytes
            if budget < 0:
                break
        copied.add(i)
    return copied


def _place(tensor: torch.Tensor, region: Region) -> tuple[torch.UntypedStorage, int]:
    """The storage that has the bytes of ``region`` now, on whichever device, and where they begin in it."""
    if region.view is None:
        return tensor.untyped_storage(), region.start
    shape, stride = tuple(tensor.shape), tensor.stride()
    raw = tensor_in(tensor.untyped_storage(), tensor.dtype, offset_bytes(tensor), shape, stride)
    packed = torch.empty_strided(shape, packed_stride(shape, stride), dtype=raw.dtype, device=raw.device)
    copy_elements(packed, raw)
    return packed.untyped_storage(), 0


def _copy(
    target: torch.UntypedStorage, at: int, source: torch.UntypedStorage, start: int, nbytes: int, stage: HostStage
) -> None:
    """Copy ``nbytes`` bytes to byte ``at`` of ``target``, on the host; from a device by way of ``stage``."""
    if source.device.type == "cpu":
        ctypes.memmove(target.data_ptr() + at, source.data_ptr() + start, nbytes)
    else:
        stage.copy(byte_tensor(target, at, nbytes), byte_tensor(source, start, nbytes))


def _joined(flat: FlatSpace, addresses: list[int]) -> list[_Run]:
    """Small regions that lie side by side in memory as in the flat space, joined: all of them, for most states."""
    out: list[_Run] = []
    run_start = run_bytes = run_address = 0
    for start, nbytes, address in zip(flat.small_starts, flat.sizes[flat.large :], addresses[flat.large :]):
        if out and run_address + run_bytes == address:
            run_bytes += nbytes
            out[-1] = _Run(run_start, run_bytes, run_address)
            continue
        run_start, run_bytes, run_address = start, nbytes, address
        out.append(_Run(start, nbytes, address))
    return out
