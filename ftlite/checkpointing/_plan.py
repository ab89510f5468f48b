# SPDX-License-Identifier: BSD-3-Clause
"""The receiver's side of a heal: where each byte of the donor's state goes, decided before the first one.

``Plan`` matches the donor's tree with the receiver's own by key path, and gives every region a target:

- *direct*: the receiver's own memory, where its tensors lie as the donor's do;
- *staged*: memory of our own, copied from there into the receiver's tensors at the end, where strides
  differ, views interleave, or a tie has to be given its twins;
- *fresh*: memory that becomes the result, for what only the donor has.

Everything that does not fit is found here, by key, before a byte is written. Host memory of a direct target
is written by whoever reads the socket; device memory is written from a pinned buffer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .._errors import IntegrityError, LayoutError
from . import _dtensor, _tree
from ._device import settle
from ._interval import Interval
from ._manifest import CONJ, NEG, PACKED, PARAMETER, REQUIRES_GRAD, Manifest, Record, Spec, with_bits
from ._memory import memory_at_hand, tensor_in, view_of
from ._snapshot import is_plain


class _Bound(NamedTuple):
    """The receiver's tensor that is healed by record ``number``; ``local`` is its memory (a shard's, for a DTensor)."""

    number: int
    own: torch.Tensor
    local: torch.Tensor
    path: _tree.Path


class Plan:
    """Made once per receive, by the calling thread."""

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

        ``loader`` says whether leaves may come that need torch's loader.

        Raises:
            LayoutError: a tensor that does not fit, by key, with both sides' shape, stride and dtype; or more
                bytes than ``max_bytes``, or than the memory at hand.
        """
        self._manifest = manifest
        self._own = own
        self._device = torch.device("cpu") if device is None else device
        self._loader = loader
        self._paths: dict[int, _tree.Path] = {}
        self._bound: dict[int, list[_Bound]] = {}
        self.only_here: list[str] = []
        self._match(manifest.tree, own, None, 0)
        for bounds in self._bound.values():
            for bound in bounds:
                self._check(bound)
        self._refuse_unbound_dtensors()
        self.intervals: list[list[Interval]] = [[] for _ in manifest.sizes]
        self._buffers: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._aliases: dict[int, torch.Tensor] = {}
        needed = self._assign()
        self._limit(needed, max_bytes)
        self._allocate()
        self._results: dict[int, Any] = {}

    @property
    def in_place(self) -> bool:
        """Whether any memory of the receiver's own is written."""
        return bool(self._bound)

    @property
    def keys(self) -> tuple[str, ...]:
        """Some of the receiver's tensors that are written to, for an error's attributes."""
        firsts = [bounds[0] for bounds in list(self._bound.values())[:8]]
        return tuple(_tree.show_path(bound.path) for bound in firsts)

    # --- matching ---------------------------------------------------------------------------------------

    def _match(self, node: Any, own: Any, path: _tree.Path, depth: int) -> None:
        if depth > _tree.MAX_DEPTH:
            raise _tree.Malformed(f"nesting deeper than {_tree.MAX_DEPTH}")
        if type(node) is list and node and node[0] in ("t", "p"):
            self._match_tensor(node, own, path)
            return
        if type(node) is list:
            _tree.check(node, own, path)
        mine = None if own is _tree.MISSING else _tree.own_children(own)
        if isinstance(own, torch.Tensor):
            raise LayoutError(
                f"{_tree.show_path(path)}: the receiver has {_shown(own)} here, the donor a "
                f"{'container' if type(node) is list else type(node).__name__}; make the two states alike",
                keys=(_tree.show_path(path),),
            )
        seen = set()
        for key, child in _tree.children(node):
            seen.add(key)
            self._match(child, _tree.MISSING if mine is None else mine.get(key, _tree.MISSING), (path, key), depth + 1)
        if mine and len(seen) < len(mine):
            for key in mine.keys() - seen:
                self._note_only_here(mine[key], (path, key), depth + 1)

    def _note_only_here(self, own: Any, path: _tree.Path, depth: int) -> None:
        if isinstance(own, torch.Tensor):
            self.only_here.append(_tree.show_path(path))
        elif depth < _tree.MAX_DEPTH:
            for key, child in (_tree.own_children(own) or {}).items():
                self._note_only_here(child, (path, key), depth + 1)

    def _match_tensor(self, node: Any, own: Any, path: _tree.Path) -> None:
        number = node[1]
        if type(number) is not int or not 0 <= number < len(self._manifest.records):
            raise _tree.Malformed("a tensor that has no record")
        self._paths.setdefault(number, path)
        if node[0] == "p" and not self._loader:
            where = _tree.show_path(path)
            raise LayoutError(
                f"{where}: the donor sends an object for torch's safe loader, which is not safe before torch 2.10 "
                f"(here {torch.__version__}); weights_only=False trusts the donor with code, or leave it out",
                keys=(where,),
            )
        if node[0] == "t" and isinstance(own, torch.Tensor):
            local = _dtensor.local_shard(own) if _dtensor.is_dtensor(own) else own
            self._bound.setdefault(number, []).append(_Bound(number, own, local, path))
        elif own is not _tree.MISSING and node[0] == "t":
            self._note_only_here(own, path, 0)

    def _check(self, bound: _Bound) -> None:
        record, own, local = self._manifest.records[bound.number], bound.own, bound.local
        whole = _dtensor.describe(own) if _dtensor.is_dtensor(own) else None
        if whole != record.dtensor:
            where = _tree.show_path(bound.path)
            raise LayoutError(
                f"{where}: the donor has {record.dtensor or 'a plain tensor'}, the receiver "
                f"{whole or 'a plain tensor'}; a shard is healed by the same shard of an equal mesh",
                keys=(where,),
            )
        overlaps = any(step == 0 and size > 1 for size, step in zip(local.shape, local.stride()))
        if not is_plain(local) or local.device.type == "meta" or (overlaps and not _lies_alike(local, record.spec)):
            where = _tree.show_path(bound.path)
            raise LayoutError(
                f"{where}: the receiver's {type(local).__name__} ({local.layout}, {local.device}) cannot be written in "
                "place; materialize it as a plain strided tensor, or leave it out of state_dict=",
                keys=(where,),
            )
        spec = record.spec
        if local.shape != spec.shape or local.dtype != spec.dtype:
            where = _tree.show_path(bound.path)
            raise LayoutError(
                f"{where}: the donor has shape {spec.shape}, stride {spec.stride}, {spec.dtype}, the receiver "
                f"{_shown(local)}; nothing was written: make both replicas build the same model",
                keys=(where,),
            )

    def _refuse_unbound_dtensors(self) -> None:
        for number, record in enumerate(self._manifest.records):
            if record.dtensor is not None and number not in self._bound and number in self._paths:
                where = _tree.show_path(self._paths[number])
                raise LayoutError(
                    f"{where}: a DTensor is rebuilt on the receiver's own mesh, and the receiver has none here; give "
                    "state_dict= with the same DTensor",
                    keys=(where,),
                )

    # --- targets ----------------------------------------------------------------------------------------

    def _assign(self) -> int:
        """Give every region its target; returns how many bytes have to be allocated."""
        members: dict[int, list[int]] = {}
        for number, record in enumerate(self._manifest.records):
            if record.region >= 0:
                members.setdefault(record.region, []).append(number)
        needed = 0
        for region, size in enumerate(self._manifest.sizes):
            numbers = members.get(region, [])
            if any(n in self._bound for n in numbers) and self._direct(region, size, numbers):
                continue
            self.intervals[region] = []
            needed += size + self._manifest.leads.get(region, 0)
            for number in numbers:
                record = self._manifest.records[number]
                if record.spec.flags & PACKED and number not in self._bound:
                    needed += record.spec.fresh_bytes
        self._refuse_shared_targets()
        return needed

    def _direct(self, region: int, size: int, numbers: list[int]) -> bool:
        """Try to map the region onto the receiver's own memory; false leaves it to a buffer."""
        if len(numbers) == 1 and len(self._bound[numbers[0]]) == 1:  # nearly every region of nearly every state
            local = self._bound[numbers[0]][0].local
            if _lies_alike(local, self._manifest.records[numbers[0]].spec):
                self.intervals[region] = [Interval(0, size, local)]
                return True
            return False
        return self._direct_with_ties(region, size, numbers)

    def _direct_with_ties(self, region: int, size: int, numbers: list[int]) -> bool:
        taken: dict[tuple[Any, ...], _Bound] = {}
        aliases: dict[int, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        free = []
        for number in numbers:
            record = self._manifest.records[number]
            spec = record.spec
            kind = (record.offset, spec.dtype, spec.shape, spec.wire_stride, spec.flags & (CONJ | NEG))
            bounds = self._bound.get(number, [])
            if not bounds:
                free.append((number, kind))
            for bound in bounds:
                first = taken.setdefault(kind, bound)
                if not _lies_alike(first.local, spec):
                    return False
                if bound.local.data_ptr() != first.local.data_ptr():
                    copies.append((bound.local, first.local))
        for number, kind in free:
            if kind not in taken:
                return False
            aliases[number] = taken[kind].local
        at = 0
        intervals = []
        for bound in sorted(taken.values(), key=lambda b: self._manifest.records[b.number].offset):
            record = self._manifest.records[bound.number]
            if record.offset != at:
                return False
            at += record.spec.wire_bytes
            intervals.append(Interval(record.offset, at, bound.local))
        if at != size:
            return False
        self.intervals[region] = intervals
        self._aliases.update(aliases)
        self._copies.extend(copies)
        return True

    def _refuse_shared_targets(self) -> None:
        """Refuse a receiver that has tied what the donor has not: one memory cannot hold two values."""
        written = sorted(
            (i.owner.data_ptr(), i.end - i.start, region)  # addresses of different devices are apart as well
            for region, intervals in enumerate(self.intervals)
            for i in intervals
        )
        for (start, nbytes, region), (next_start, _, other) in pairwise(written):
            if next_start < start + nbytes:
                names = [
                    _tree.show_path(b.path)
                    for n, r in enumerate(self._manifest.records)
                    if r.region in (region, other)
                    for b in self._bound.get(n, [])
                ]
                raise LayoutError(
                    f"{' and '.join(names[:4])} share memory at the receiver and are apart at the donor; tie them on "
                    "both sides or on none",
                    keys=tuple(names),
                )

    def _limit(self, needed: int, max_bytes: int | None) -> None:
        total = sum(self._manifest.sizes)
        if max_bytes is not None and max(total, needed) > max_bytes:
            raise LayoutError(
                f"the donor's state has {total} bytes, of which {needed} have to be allocated here; max_bytes is "
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

    def _allocate(self) -> None:
        for region, size in enumerate(self._manifest.sizes):
            if self.intervals[region] or not size:
                continue
            lead = self._manifest.leads.get(region, 0)
            buffer = torch.empty(lead + size, dtype=torch.uint8, device=self._device)
            self._buffers[region] = buffer
            self.intervals[region] = [Interval(0, size, buffer[lead:] if lead else buffer)]

    def settle(self) -> None:
        """Wait for work on the devices that still uses the memory which is about to be written."""
        devices = {i.owner.device for intervals in self.intervals for i in intervals}
        for device in devices:
            settle(device)

    # --- the result -------------------------------------------------------------------------------------

    def finish(self, load_blob: Any) -> Any:
        """Copy what was staged, and build the result; call it when every byte has been verified.

        ``load_blob(data: bytes, path)`` makes the object of a leaf that came through a loader.
        """
        with torch.no_grad():
            for number, bounds in self._bound.items():
                record = self._manifest.records[number]
                if record.region in self._buffers:
                    for bound in bounds:
                        bound.local.copy_(with_bits(self._staged(record), record.spec))
            for target, source in self._copies:
                target.copy_(source)
        try:
            return _tree.build(self._manifest.tree, lambda tag, n: self._result(tag, n, load_blob), self._own)
        except _tree.BUILD_ERRORS as e:
            if isinstance(e, (LayoutError, IntegrityError)):
                raise
            raise IntegrityError(
                f"the donor's tree cannot be built ({type(e).__name__}: {e!s:.200}); heal from another donor",
                destination_dirty=self.in_place,
                keys=self.keys,
            ) from e

    def _staged(self, record: Record) -> torch.Tensor:
        """The bytes of ``record`` in its buffer, with the strides it has on the wire, bits of conj and neg unset."""
        buffer = self._buffers[record.region]
        offset = record.offset + self._manifest.leads.get(record.region, 0)
        return tensor_in(
            buffer.untyped_storage(), record.spec.dtype, offset, record.spec.shape, record.spec.wire_stride
        )

    def _result(self, tag: str, number: int, load_blob: Any) -> Any:
        record = self._manifest.records[number]
        if tag == "p":
            data = bytes(view_of(self._staged(record).cpu())) if record.region >= 0 else b""
            return load_blob(data, self._paths[number])
        if number not in self._results:
            bounds = self._bound.get(number)
            self._results[number] = bounds[0].own if bounds else self._fresh(number, record)
        return self._results[number]

    def _fresh(self, number: int, record: Record) -> torch.Tensor:
        spec = record.spec
        if number in self._aliases:
            out = self._aliases[number].detach()
        elif record.region < 0:
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
        elif spec.flags & PACKED:
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device)
            gapless = tuple(1 if step == 0 else size for size, step in zip(spec.shape, spec.stride))
            out.as_strided(gapless, spec.stride).copy_(self._staged(record).as_strided(gapless, spec.wire_stride))
        else:
            out = self._staged(record)
        if number not in self._aliases:
            out = with_bits(out, spec)
        if spec.flags & PARAMETER:
            return torch.nn.Parameter(out, requires_grad=bool(spec.flags & REQUIRES_GRAD))
        return out.requires_grad_() if spec.flags & REQUIRES_GRAD else out


def _lies_alike(local: torch.Tensor, spec: Spec) -> bool:
    return (
        local.stride() == spec.wire_stride
        and spec.dense
        and local.is_conj() == bool(spec.flags & CONJ)
        and local.is_neg() == bool(spec.flags & NEG)
    )


def _shown(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, {tensor.dtype} on {tensor.device}"
