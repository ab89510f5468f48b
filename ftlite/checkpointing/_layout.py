# SPDX-License-Identifier: BSD-3-Clause
"""Where every byte of a state lies: storage regions, the flat byte space over them, and its chunks.

Pure: no tensor, no socket; integers in, integers out. What holds:

- Every distinct byte of memory is in exactly one region, whatever aliases it, so ties cross once.
- Views that overlap or touch share a region; a view with gaps (a column of a matrix) that is alone in its
  memory gets a *packed* region that holds its elements only, so the bytes between them never leave.
- The flat space is the concatenation of all *extents*: one for each large region, in the order of first
  use, then one for all small regions together, the smallest first (which is the order in which they are
  copied at publish, so that the copies lie side by side).
- Chunks cut the flat space by bytes, so one huge tensor is split and thousands of small ones are gathered.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

# A region up to this size goes through a staging buffer with its neighbours: a copy of 256 KB that is in the
# cache costs about as much as the separate receive and sum that it saves.
SMALL_BYTES = 256 * 1024
# Storage offsets count elements: memory that is laid out anew keeps its place modulo the largest itemsize.
ALIGNMENT = 16
# Below the least size a request costs more than its bytes; above the largest one a chunk that turns out
# wrong, or that one slow stream holds, costs too much to fetch again.
MIN_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 64 << 20
# So many chunks for the whole state at least (while they are not too small), that streams of unequal speed
# finish together.
CHUNKS_WANTED = 32


class View(NamedTuple):
    """A strided view of a storage: ``start`` in bytes, ``shape`` and ``stride`` in elements."""

    storage: Hashable
    start: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Region(NamedTuple):
    """``nbytes`` of memory. ``lead`` bytes go before it where it is laid out anew, to keep alignment.

    ``view`` is the index of the view whose elements a packed region holds, in the order of
    ``packed_stride``; None for plain memory from ``start`` of ``storage``.
    """

    storage: Hashable
    start: int
    nbytes: int
    lead: int
    view: int | None


class Place(NamedTuple):
    """Where a view begins: ``offset`` bytes into region ``region`` (-1: the view has no elements)."""

    region: int
    offset: int


class Layout(NamedTuple):
    """``regions`` in flat order, the first ``large`` of them extents of their own; ``places`` one per view."""

    regions: list[Region]
    large: int
    places: list[Place]


def numel(shape: Sequence[int]) -> int:
    """How many elements a tensor of ``shape`` has."""
    n = 1
    for size in shape:
        n *= size
    return n


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last of a view, both included; 0 for an empty view."""
    last = 0
    for size, step in zip(shape, stride):
        if size == 0:
            return 0
        last += (size - 1) * step
    return last + 1


def packed_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides of a copy without gaps whose dimensions lie in the same order; expanded ones stay 0."""
    order = sorted((d for d in range(len(shape)) if stride[d] != 0 and shape[d] > 1), key=lambda d: (stride[d], -d))
    out = [0 if step == 0 and size > 1 else 1 for size, step in zip(shape, stride)]
    step = 1
    for d in order:
        out[d] = step
        step *= shape[d]
    return tuple(out)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a view touches every element of its span, expanded dimensions counted once."""
    expected = 1
    for size, step in sorted(zip(shape, stride), key=lambda pair: pair[1]):
        if size > 1 and step:
            if step != expected:
                return False
            expected *= size
    return True


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a view may be one in memory, expanded dimensions left out; false is certain."""
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(shape, stride) if size > 1 and step):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def packed_bytes(view: View) -> int:
    """The bytes of the distinct elements of ``view``, as a packed region holds them."""
    return span(view.shape, packed_stride(view.shape, view.stride)) * view.itemsize


def may_share(a: View, b: View) -> bool:
    """Whether two views of one memory, whose spans overlap, may have a byte in common; false is certain.

    A view is taken as runs that begin at multiples of a step, in every way that its dimensions allow: exact for
    columns, blocks of columns, and every n-th row or element of one buffer.
    """
    return all(
        _runs_meet(b.start - a.start, a_run, b_run, math.gcd(a_step, b_step))
        for a_run, a_step in _runs(a)
        for b_run, b_step in _runs(b)
    )


def _runs(view: View) -> Iterator[tuple[int, int]]:
    """Pairs of the bytes that the innermost dimensions span and the common step of the others (0: there are none)."""
    dims = sorted((step * view.itemsize, size) for size, step in zip(view.shape, view.stride) if size > 1 and step)
    run = view.itemsize
    for inner in range(len(dims) + 1):
        yield run, math.gcd(*(step for step, _ in dims[inner:]))
        if inner < len(dims):
            step, size = dims[inner]
            run += (size - 1) * step


def _runs_meet(distance: int, a_run: int, b_run: int, step: int) -> bool:
    if step == 0:
        return -b_run < distance < a_run
    return a_run > distance % step or distance % step + b_run > step


def lay_out(views: Sequence[View]) -> Layout:
    """Find the regions of ``views`` and the place of every view in them."""
    storages: dict[Hashable, int] = {}  # in the order of first use
    spans: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # most views share few shapes
    dense: dict[Any, bool] = {}
    parts: list[tuple[int, int, int, int]] = []
    for index, view in enumerate(views):
        kind = (view.shape, view.stride)
        elements = spans.get(kind)
        if elements is None:
            elements = spans[kind] = span(*kind)
        nbytes = elements * view.itemsize
        if nbytes:
            parts.append((storages.setdefault(view.storage, len(storages)), view.start, view.start + nbytes, index))
    parts.sort()
    found: list[Region] = []
    inside = [-1] * len(views)  # for every view its number in ``found``
    at = 0
    while at < len(parts):
        storage, _, end, _ = parts[at]
        members = []
        while at < len(parts) and parts[at][0] == storage and parts[at][1] <= end:
            end = max(end, parts[at][2])
            members.append(parts[at][3])
            inside[members[-1]] = len(found)
            at += 1
        found.append(_region(views, members, end, dense))
    # stable: the large ones in the order of first use
    order = sorted(range(len(found)), key=lambda i: found[i].nbytes if found[i].nbytes <= SMALL_BYTES else 0)
    number = {old: new for new, old in enumerate(order)}
    places = [
        Place(number[i], 0 if found[i].view is not None else view.start - found[i].start) if i >= 0 else Place(-1, 0)
        for i, view in zip(inside, views)
    ]
    return Layout([found[i] for i in order], sum(region.nbytes > SMALL_BYTES for region in found), places)


def _region(views: Sequence[View], members: list[int], end: int, dense: dict[Any, bool]) -> Region:
    first = views[members[0]]
    start = first.start
    kind = (first.shape, first.stride)
    if kind not in dense:
        dense[kind] = is_dense(*kind)
    if not dense[kind] and all(views[i] == first for i in members):
        nbytes = packed_bytes(first)
        if nbytes < end - start:  # else it overlaps itself (a sliding window), and would grow
            return Region(first.storage, start, nbytes, 0, members[0])
    return Region(first.storage, start, end - start, start % ALIGNMENT, None)


class FlatSpace:
    """The flat byte space over the sizes of all regions, of which the first ``large`` are extents alone."""

    def __init__(self, sizes: Sequence[int], large: int) -> None:
        self.sizes = list(sizes)
        self.large = large
        packed = sum(self.sizes[large:])
        self.extents = self.sizes[:large] + ([packed] if packed else [])
        self.starts = [0, *accumulate(self.extents)]
        self.total = self.starts[-1]
        # offsets of the small regions inside the last extent
        self.small_starts = [0, *accumulate(self.sizes[large:])]

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut flat bytes ``start`` to ``end`` into ``(extent, start, end)``, offsets within the extent."""
        extent = bisect_right(self.starts, start) - 1
        while start < end:
            stop = min(end, self.starts[extent + 1])
            base = self.starts[extent]
            if stop > start:
                yield extent, start - base, stop - base
            start = stop
            extent += 1

    def small_pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut bytes ``start`` to ``end`` of the extent of small regions into ``(region, start, end)``."""
        at = bisect_right(self.small_starts, start) - 1
        while start < end:
            stop = min(end, self.small_starts[at + 1])
            base = self.small_starts[at]
            if stop > start:
                yield self.large + at, start - base, stop - base
            start = stop
            at += 1


def cut(total: int, num_chunks: int | None) -> list[int]:
    """The ends of the chunks of ``total`` bytes: ``num_chunks`` of them, or as many as serve well (None).

    There are fewer where there are fewer bytes than chunks, and none where there is nothing to send.
    """
    if total == 0:
        return []
    if num_chunks is None:
        size = min(max(-(-total // CHUNKS_WANTED), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        num_chunks = -(-total // size)
    num_chunks = min(num_chunks, total)
    return [total * (i + 1) // num_chunks for i in range(num_chunks)]
