# SPDX-License-Identifier: BSD-3-Clause
"""Ties that only the receiver has: one memory cannot hold two values.

Tensors of the receiver may share memory where the donor's do in the same way. Any others are a LayoutError
before a byte is written, whether their bytes would go there directly or be copied at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from .._errors import LayoutError
from . import _tree
from ._layout import View, may_share, span
from ._manifest import CONJ, NEG, Manifest, Spec
from ._match import Match


class _Written(NamedTuple):
    """One of the receiver's tensors, healed by tensor ``number`` of the donor: bytes ``start`` to ``end`` of memory."""

    start: int
    end: int
    number: int
    tensor: torch.Tensor
    path: _tree.Path


def refuse_shared_targets(manifest: Manifest, match: Match) -> None:
    """Look for two tensors of the receiver that share memory and are apart at the donor.

    Raises:
        LayoutError: there are some, by their keys.
    """
    if _all_apart(manifest, match):
        return
    active: list[_Written] = []
    for one in sorted(_written(manifest, match), key=lambda written: written[:3]):
        active = [other for other in active if other.end > one.start]
        for other in active:
            if not _alike(manifest, one, other) and may_share(_view(one), _view(other)):
                names = _tree.show_path(other.path), _tree.show_path(one.path)
                raise LayoutError(
                    f"{' and '.join(names)} share memory at the receiver and are apart at the donor; tie them on both "
                    "sides or on neither",
                    keys=names,
                )
        active.append(one)


def _all_apart(manifest: Manifest, match: Match) -> bool:
    """Whether no spans of memory meet, which is the rule, and found in little time."""
    if any(twin.local is not match.local[number] for number, twins in match.twins.items() for twin in twins):
        return False
    ends: dict[int, int] = {}
    for spec, region, local in zip(manifest.specs, manifest.regions, match.local):
        if local is None or region < 0:
            continue
        start = local.data_ptr()
        if start in ends:
            return False
        ends[start] = start + _nbytes(spec, local.stride())
    return all(ends[start] <= following for start, following in pairwise(sorted(ends)))


def _written(manifest: Manifest, match: Match) -> Iterator[_Written]:
    specs, regions = manifest.specs, manifest.regions
    for number, local in enumerate(match.local):
        if local is None or regions[number] < 0:
            continue
        yield _entry(number, specs[number], local, match.path[number])
        for twin in match.twins.get(number, ()):
            if twin.local is not local:
                yield _entry(number, specs[number], twin.local, twin.path)


def _entry(number: int, spec: Spec, tensor: torch.Tensor, path: _tree.Path) -> _Written:
    start = tensor.data_ptr()
    return _Written(start, start + _nbytes(spec, tensor.stride()), number, tensor, path)


def _nbytes(spec: Spec, stride: tuple[int, ...]) -> int:
    """The bytes from the first to the last element of a tensor of kind ``spec`` that has ``stride``."""
    return spec.wire_bytes if stride == spec.wire_stride else span(spec.shape, stride) * spec.dtype.itemsize


def _alike(manifest: Manifest, one: _Written, other: _Written) -> bool:
    """Whether each byte that both may have is the same byte of the donor for both."""
    if manifest.regions[one.number] != manifest.regions[other.number]:
        return False
    spec, spec_of_other = manifest.specs[one.number], manifest.specs[other.number]
    offset, offset_of_other = manifest.offsets[one.number], manifest.offsets[other.number]
    if _follows(one.tensor, spec) and _follows(other.tensor, spec_of_other):
        return one.start - offset == other.start - offset_of_other
    return (
        offset == offset_of_other
        and one.start == other.start
        and one.tensor.stride() == other.tensor.stride()
        and _kind(spec) == _kind(spec_of_other)
        and one.tensor.is_conj() == other.tensor.is_conj()
        and one.tensor.is_neg() == other.tensor.is_neg()
    )


def _kind(spec: Spec) -> tuple[object, ...]:
    return spec.dtype, spec.shape, spec.wire_stride, spec.flags & (CONJ | NEG)


def _follows(tensor: torch.Tensor, spec: Spec) -> bool:
    """Whether its elements lie in memory as the donor's do."""
    return (
        all(mine == theirs or n == 1 for mine, theirs, n in zip(tensor.stride(), spec.wire_stride, spec.shape))
        and tensor.is_conj() == bool(spec.flags & CONJ)
        and tensor.is_neg() == bool(spec.flags & NEG)
    )


def _view(written: _Written) -> View:
    tensor = written.tensor
    return View(None, written.start, tensor.element_size(), tuple(tensor.shape), tensor.stride())
