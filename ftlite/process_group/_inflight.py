# SPDX-License-Identifier: BSD-3-Clause
"""Which memory the operations in flight use, and which of them a new one has to follow.

Rules of this file: pure, no clock, no lock, no I/O; its owner calls it under one lock. Op ids are the caller's
and ascend. Two ops are related when ranges of theirs meet and one of the two is
written to.

    clusters   disjoint, sorted by address, found by bisect; nearly always a cluster is one range
    spans      the distinct ranges of a cluster; each knows its ops in flight, oldest first

A cluster that has lost half of its spans is cut again, so that neither 10,000 ops on one tensor nor a window that
slides along a buffer costs more per op than a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["NOTHING", "InFlight", "Range", "Relation"]


class Range(NamedTuple):
    """Bytes ``start`` to ``end`` of the address space, written to or read only. A plain tuple will do as well."""

    start: int
    end: int
    writes: bool


class Relation(NamedTuple):
    """The earlier ops that a new one has to follow, oldest first; none is in both.

    ``same``: wherever they meet the new op, the ranges are equal, so both may work in the same slot, in order.
    ``partial``: somewhere the ranges are not equal; they have to be done before the new op's memory is read.

    An op that is only to be followed because a named one, on the equal range, follows it, is not named again.
    """

    same: tuple[int, ...]
    partial: tuple[int, ...]


NOTHING = Relation((), ())


class _Span:
    """A range and its ops in flight: op id -> whether it writes, oldest first. ``writer`` is the newest that does.

    ``broken``: an op went before one that it followed, so those behind it need not follow all that is before it.
    """

    __slots__ = ("broken", "end", "ops", "start", "writer")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.ops: dict[int, bool] = {}
        self.writer: int | None = None
        self.broken = False

    def followed_by(self, writes: bool) -> list[int]:
        """The ops that a further one has to follow: the newest writer, or all that read after it."""
        if self.broken:
            return [op for op, wrote in self.ops.items() if writes or wrote]
        if not writes:
            return [] if self.writer is None else [self.writer]
        found: list[int] = []
        for op in reversed(self.ops):
            if op == self.writer:
                return found or [op]
            found.append(op)
        return found

    def put(self, op_id: int, writes: bool) -> None:
        self.ops[op_id] = writes
        if writes:
            self.writer = op_id

    def drop(self, op_id: int) -> None:
        ops = self.ops
        if self.writer is not None and next(reversed(ops)) != op_id:
            for op, wrote in ops.items():
                if op == op_id:
                    break
                if wrote or ops[op_id]:
                    self.broken = True
                    break
        if ops.pop(op_id) and self.writer == op_id:
            self.writer = next((op for op in reversed(ops) if ops[op]), None)


class _Cluster:
    """Spans that hang together, and the whole that they cover. ``built`` is how many they were when it was cut."""

    __slots__ = ("built", "end", "spans", "start")

    def __init__(self, start: int, end: int, spans: dict[tuple[int, int], _Span]) -> None:
        self.start = start
        self.end = end
        self.spans = spans
        self.built = len(spans)


class InFlight:
    """The memory in use by ops in flight."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._clusters: list[_Cluster] = []
        self._ranges: dict[int, Iterable[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """How many ops are in flight."""
        return len(self._ranges)

    def __contains__(self, op_id: int) -> bool:
        return op_id in self._ranges

    def add(self, op_id: int, ranges: Iterable[tuple[int, int, bool]]) -> Relation:
        """Note that ``op_id`` uses ``ranges``, each (start, end, writes) in bytes; empty ones are no memory.

        Returns:
            What it has to follow; ``NOTHING`` nearly always.

        Raises:
            ValueError: ``op_id`` is in flight already.
        """
        if op_id in self._ranges:
            raise ValueError(f"op {op_id} is in flight already")
        mine: dict[tuple[int, int], bool] = {}
        related: dict[int, bool] = {}
        where = 0, 0
        for start, end, writes in ranges:
            if start < end:
                mine[start, end] = writes or mine.get((start, end), False)
                where = self._meet(start, end, writes, related)
        self._ranges[op_id] = mine
        for (start, end), writes in mine.items():
            # the place of a single one is known by now, which saves a bisect in the most frequent case
            self._put(op_id, start, end, writes, where if len(mine) == 1 else self._met(start, end))
        if not related:
            return NOTHING
        ordered = sorted(related)
        return Relation(
            tuple(op for op in ordered if not related[op]),
            tuple(op for op in ordered if related[op]),
        )

    def remove(self, op_id: int) -> None:
        """Forget ``op_id``: its memory is the user's again. Unknown ids are ignored."""
        for start, end in self._ranges.pop(op_id, ()):
            at = bisect_right(self._starts, start) - 1
            cluster = self._clusters[at]
            span = cluster.spans[start, end]
            span.drop(op_id)
            if span.ops:
                continue
            del cluster.spans[start, end]
            if not cluster.spans:
                del self._starts[at], self._clusters[at]
            elif 2 * len(cluster.spans) <= cluster.built:
                self._replace(at, at + 1, list(cluster.spans.values()))

    def newest(self, start: int, end: int) -> int | None:
        """The newest op in flight with exactly this range, whose slot the next one may share."""
        at = bisect_right(self._starts, start) - 1
        span = self._clusters[at].spans.get((start, end)) if at >= 0 else None
        return next(reversed(span.ops)) if span else None

    def _met(self, start: int, end: int) -> tuple[int, int]:
        """The clusters that the range meets: from the first number to before the second."""
        starts = self._starts
        low = high = bisect_right(starts, start)
        if low and self._clusters[low - 1].end > start:
            low -= 1
        count = len(starts)
        while high < count and starts[high] < end:
            high += 1
        return low, high

    def _meet(self, start: int, end: int, writes: bool, related: dict[int, bool]) -> tuple[int, int]:
        """Complete ``related``: op id -> whether one range is met in an unequal one. Returns what :meth:`_met` does."""
        low, high = self._met(start, end)
        for at in range(low, high):
            for span in self._clusters[at].spans.values():
                if span.start < end and start < span.end:
                    unequal = span.start != start or span.end != end
                    for op in span.followed_by(writes):
                        related[op] = related.get(op, False) or unequal
        return low, high

    def _put(self, op_id: int, start: int, end: int, writes: bool, met: tuple[int, int]) -> None:
        """Note one range, which meets the clusters ``met``."""
        low, high = met
        known = self._clusters[low].spans.get((start, end)) if high == low + 1 else None
        if known is not None:
            known.put(op_id, writes)
            return
        span = _Span(start, end)
        span.put(op_id, writes)
        if low == high:
            self._starts.insert(low, start)
            self._clusters.insert(low, _Cluster(start, end, {(start, end): span}))
            return
        self._merge(low, high, span)

    def _merge(self, low: int, high: int, span: _Span) -> None:
        """Make one cluster of ``span`` and the clusters ``low`` to ``high``, which it meets."""
        first, last = self._clusters[low], self._clusters[high - 1]
        first.start, first.end = min(first.start, span.start), max(last.end, span.end)
        for cluster in self._clusters[low + 1 : high]:
            first.spans.update(cluster.spans)
        first.spans[span.start, span.end] = span
        first.built = max(first.built, len(first.spans))
        self._starts[low] = first.start
        del self._starts[low + 1 : high], self._clusters[low + 1 : high]

    def _replace(self, low: int, high: int, spans: list[_Span]) -> None:
        """Put the clusters that ``spans`` make in the place of those from ``low`` to ``high``."""
        spans.sort(key=lambda span: (span.start, span.end))
        fresh: list[_Cluster] = []
        for span in spans:
            if fresh and span.start < fresh[-1].end:
                fresh[-1].end = max(fresh[-1].end, span.end)
                fresh[-1].spans[span.start, span.end] = span
                fresh[-1].built += 1
            else:
                fresh.append(_Cluster(span.start, span.end, {(span.start, span.end): span}))
        self._clusters[low:high] = fresh
        self._starts[low:high] = [cluster.start for cluster in fresh]
