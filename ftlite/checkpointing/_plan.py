# SPDX-License-Identifier: BSD-3-Clause
"""The receiver's side of a heal: where each byte of the donor's state goes, decided before the first one.

``Plan`` gives every region of the donor's flat space a target:

- *direct*: the receiver's own memory, where its tensors lie as the donor's do;
- *staged*: memory of our own, copied from there into the receiver's tensors at the end, where strides
  differ, views interleave or overlap;
- *fresh*: memory that becomes the result, for what only the donor has.

Host memory of a direct target is written by whoever reads the socket, device memory from a pinned buffer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from .._errors import FtliteError, IntegrityError, LayoutError
from . import _tree
from ._device import settle
from ._interval import Interval
from ._manifest import CONJ, NEG, PACKED, Manifest, Spec, of_its_kind, with_bits
from ._match import Match, Twin, lies_alike
from ._memory import copy_elements, memory_at_hand, tensor_in, view_of
from ._shared import refuse_shared_targets

_KEYS_SHOWN = 8


class Plan:
    """Made once per receive, by the calling thread; ``intervals`` has the first interval of every region."""

    def __init__(
        self,
        manifest: Manifest,
        own: Any,
        *,
        device: torch.device | None = None,
        max_bytes: int | None = None,
        loader: bool = True,
    ) -> None:
        """Match ``manifest`` with the receiver's state ``own`` (``_tree.MISSING``: there is none).

        ``loader`` says whether leaves may come that need torch's loader; ``device`` is where new tensors go.

        Raises:
            LayoutError: what does not fit, by key; or more bytes than ``max_bytes``, or than the memory at hand.
            IntegrityError: a tree that none of ours has made.
        """
        self._manifest = manifest
        self._own = own
        self._device = torch.device("cpu") if device is None else device
        self._match = Match(manifest, own, loader=loader)
        self.only_here = self._match.only_here
        self.in_place = any(local is not None for local in self._match.local)
        self.intervals: list[Interval | None] = [None] * len(manifest.sizes)
        self._buffers: dict[int, torch.Tensor] = {}
        self._aliases: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: dict[int, Any] = {}
        self._gapped: dict[tuple[Any, ...], torch.UntypedStorage] = {}
        staged = self._assign()
        refuse_shared_targets(manifest, self._match)
        self.new_bytes = self._new_bytes(staged)
        self._limit(self.new_bytes, max_bytes)
        for region in staged:
            self._allocate(region)

    @property
    def keys(self) -> tuple[str, ...]:
        """Some of the receiver's tensors that are written to, for an error's attributes."""
        numbers = [n for n, local in enumerate(self._match.local) if local is not None]
        return tuple(_tree.show_path(self._match.path[n]) for n in numbers[:_KEYS_SHOWN])

    def mark(self, error: FtliteError, done: int, total: int) -> None:
        """Say in ``error`` that ``done`` of ``total`` bytes had arrived, and which tensors were written to."""
        dirty = self.in_place and done > 0
        keys = self.keys if dirty else ()
        error.__dict__.update(bytes_done=done, bytes_total=total, destination_dirty=dirty, keys=keys)
        if dirty:
            text = (
                f"{error}; the receiver's own tensors ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}) were "
                "written to and are undefined now: heal again before they are used"
            )
            error.args = (text,)

    def settle(self) -> None:
        """Wait for work on the devices that still uses the memory which is about to be written."""
        for device in {interval.owner.device for interval in self.intervals if interval is not None}:
            settle(device)

    # --- targets ------------------------------------------------------------------------------------------

    def _assign(self) -> list[int]:
        """Point regions at the receiver's own memory where that is possible; returns the others."""
        manifest, local = self._manifest, self._match.local
        alone = [-1] * len(manifest.sizes)  # the only tensor of the region; most have one
        shared: dict[int, list[int]] = {}
        for number, region in enumerate(manifest.regions):
            if region < 0:
                continue
            if region in shared:
                shared[region].append(number)
            elif alone[region] >= 0 or number in self._match.twins:
                shared[region] = [number] if alone[region] < 0 else [alone[region], number]
            alone[region] = number
        staged = []
        for region, number in enumerate(alone):
            if region in shared:
                if not self._share(region, shared[region]):
                    staged.append(region)
                continue
            mine = local[number]
            whole = manifest.specs[number].wire_bytes == manifest.sizes[region]
            if mine is not None and whole and lies_alike(mine, manifest.specs[number]):
                self.intervals[region] = Interval(0, manifest.sizes[region], mine)
            else:
                staged.append(region)
        return staged

    def _share(self, region: int, numbers: list[int]) -> bool:
        """Try to point a region of several tensors at the receiver's own, one behind the other."""
        manifest, match = self._manifest, self._match
        taken: dict[tuple[Any, ...], tuple[int, torch.Tensor]] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        free = []
        for number in numbers:
            spec, own, local = manifest.specs[number], match.own[number], match.local[number]
            kind = (manifest.offsets[number], spec.dtype, spec.shape, spec.wire_stride, spec.flags & (CONJ | NEG))
            if own is None or local is None:
                free.append((number, kind))
                continue
            for twin in [Twin(own, local), *match.twins.get(number, [])]:
                _, first = taken.setdefault(kind, (number, twin.local))
                if not lies_alike(first, spec):
                    return False
                if twin.local.data_ptr() != first.data_ptr():
                    copies.append((twin.local, first))
        if any(kind not in taken for _, kind in free):
            return False
        chain: list[Interval] = []
        at = 0
        for number, local in sorted(taken.values(), key=lambda item: manifest.offsets[item[0]]):
            if manifest.offsets[number] != at:
                return False
            at += manifest.specs[number].wire_bytes
            chain.append(Interval(manifest.offsets[number], at, local))
        if at != manifest.sizes[region]:
            return False
        for before, after in pairwise(chain):
            before.next = after
        self.intervals[region] = chain[0]
        self._copies += copies
        self._aliases.update({number: taken[kind][1] for number, kind in free})
        return True

    def _new_bytes(self, staged: list[int]) -> int:
        """How many bytes have to be allocated."""
        manifest = self._manifest
        needed = sum(manifest.sizes[region] + manifest.leads.get(region, 0) for region in staged)
        for number, spec in enumerate(manifest.specs):  # what is sent without its gaps gets them back
            if spec.flags & PACKED and self._match.own[number] is None:
                needed += spec.fresh_bytes
        return needed

    def _limit(self, needed: int, max_bytes: int | None) -> None:
        total = sum(self._manifest.sizes)
        if max_bytes is not None and max(total, needed) > max_bytes:
            raise LayoutError(
                f"the donor's state has {total} bytes, and {needed} have to be allocated here; max_bytes is "
                f"{max_bytes}: raise it if this is the state you expect",
                bytes_total=total,
            )
        at_hand = memory_at_hand()
        if max_bytes is None and self._device.type == "cpu" and at_hand is not None and needed > at_hand:
            raise LayoutError(
                f"{needed} bytes have to be allocated for the donor's state and {at_hand} are at hand; heal in place "
                "(state_dict=), onto a device (device=), or set max_bytes",
                bytes_total=total,
            )

    def _allocate(self, region: int) -> None:
        size, lead = self._manifest.sizes[region], self._manifest.leads.get(region, 0)
        try:
            buffer = torch.empty(lead + size, dtype=torch.uint8, device=self._device)
        except RuntimeError as e:  # torch says so when a device is full
            raise LayoutError(
                f"{size} bytes for the donor's state cannot be allocated on {self._device} ({e!s:.200}); nothing was "
                "written: free memory, or heal in place (state_dict=)"
            ) from e
        self._buffers[region] = buffer
        self.intervals[region] = Interval(0, size, buffer[lead:] if lead else buffer, is_new=True)

    # --- the result ---------------------------------------------------------------------------------------

    def finish(self, load_blob: Any) -> Any:
        """Copy what was staged, and build the result; call it when every byte has been verified.

        ``load_blob(data: bytes, path)`` makes the object of a leaf that came through a loader.
        """
        with torch.no_grad():
            self._copy_staged()
            for target, source in self._copies:
                copy_elements(target, source)
        try:
            return _tree.build(self._manifest.tree, lambda tag, n: self._result(tag, n, load_blob), self._own)
        except _tree.BUILD_ERRORS as e:
            raise IntegrityError(
                f"the donor's tree cannot be built ({type(e).__name__}: {e!s:.200}); heal from another donor",
                destination_dirty=self.in_place,
                keys=self.keys,
            ) from e

    def _copy_staged(self) -> None:
        if not self._buffers:
            return
        for number, region in enumerate(self._manifest.regions):
            local = self._match.local[number]
            if local is None or region not in self._buffers:
                continue
            source = with_bits(self._staged(number), self._manifest.specs[number])
            for target in [local, *(twin.local for twin in self._match.twins.get(number, []))]:
                copy_elements(target, source)

    def _staged(self, number: int) -> torch.Tensor:
        """The bytes of a tensor in its region's buffer, with the strides of the wire, and no bits set."""
        region, spec = self._manifest.regions[number], self._manifest.specs[number]
        offset = self._manifest.offsets[number] + self._manifest.leads.get(region, 0)
        storage = self._buffers[region].untyped_storage()
        return tensor_in(storage, spec.dtype, offset, spec.shape, spec.wire_stride)

    def _result(self, tag: str, number: int, load_blob: Any) -> Any:
        if tag == "p":
            found = self._manifest.regions[number] >= 0
            data = bytes(view_of(self._staged(number).cpu())) if found else b""
            return load_blob(data, self._match.path[number])
        own = self._match.own[number]
        if own is not None:
            return own
        if number not in self._results:
            self._results[number] = self._fresh(number, self._manifest.specs[number])
        return self._results[number]

    def _unpacked(self, number: int, spec: Spec) -> torch.Tensor:
        """A tensor that was sent without its gaps, with them; those that were tied share one memory again."""
        kind = (self._manifest.regions[number], spec.dtype.itemsize, spec.shape, spec.stride)
        if kind not in self._gapped:
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
            copy_elements(out, self._staged(number))
            self._gapped[kind] = out.untyped_storage()
        return tensor_in(self._gapped[kind], spec.dtype, 0, spec.shape, spec.stride)

    def _fresh(self, number: int, spec: Spec) -> torch.Tensor:
        if number in self._aliases:
            out = self._aliases[number].detach()
        elif self._manifest.regions[number] < 0:
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
        elif spec.flags & PACKED:
            out = self._unpacked(number, spec)
        else:
            out = self._staged(number)
        if number not in self._aliases:
            out = with_bits(out, spec)
        return of_its_kind(out, spec)
