# SPDX-License-Identifier: BSD-3-Clause
"""Every collective with arguments, and what plain tensor arithmetic says it gives.

A ``Slot`` is a tensor inside a larger memory that is filled with a sentinel, so that a check sees what was written
beside the elements of a view. A ``Case`` is one call on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests import load

ops = load("process_group._ops")

SENTINEL = 77
ROOT = 1


def content(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, other ones per rank and index: sums and products of four ranks are exact in any dtype."""
    numbers = torch.arange(_count(shape)).add(2 * rank + index).remainder(3).add(1)
    if dtype is torch.bool:
        numbers = numbers.remainder(2)
    return numbers.reshape(shape).to(dtype)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _filled(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), 1 if dtype is torch.bool else SENTINEL).to(dtype)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    count = _count(shape)
    return _filled(count + 2, dtype), lambda base: base[1 : count + 1].view(shape)


def _slice(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    rows, columns = shape
    base = _filled((rows + 4) * (columns + 5), dtype)
    return base, lambda base: base.view(rows + 4, columns + 5)[2 : rows + 2, 3 : columns + 3]


def _stepped(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    rows, columns = shape
    return _filled(2 * rows * columns, dtype), lambda base: base.view(2 * rows, columns)[::2]


def _transposed(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    rows, columns = shape
    return _filled(rows * columns, dtype), lambda base: base.view(columns, rows).t()


KINDS = {"contiguous": _contiguous, "slice": _slice, "stepped": _stepped, "transposed": _transposed}


class Slot:
    """A tensor (``view``) that holds ``value``, within a memory of sentinels."""

    def __init__(self, kind: str, value: torch.Tensor) -> None:
        self._base, self._where = KINDS[kind](tuple(value.shape), value.dtype)
        self.view = self._where(self._base)
        self.view.copy_(value)

    def differs(self, expected: torch.Tensor) -> str:
        """ "" where the view holds ``expected`` and nothing beside it was touched, else what is wrong."""
        wanted = _filled(self._base.numel(), self._base.dtype)
        self._where(wanted).copy_(expected)
        if _same(self._base, wanted):
            return ""
        if _same(self.view, expected):
            return f"memory beside the view was written: {self._base.tolist()}"
        return f"holds {self.view.tolist()} and should hold {expected.tolist()}"


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype.itemsize == 1:  # some dtypes of one byte can be compared only as bytes
        left, right = left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    return torch.equal(left, right)


@dataclass
class Case:
    """One call: ``op`` by its canonical name, its arguments, and what its slots hold afterwards."""

    name: str
    op: str
    args: list[Any]
    after: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)

    def problems(self) -> list[str]:
        found = [slot.differs(expected) for slot, expected in self.after]
        return [f"{self.name}: {text}" for text in found if text]


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stack: stack.sum(0),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
}


def reduced(tensors: list[torch.Tensor], reduction: str = "SUM") -> torch.Tensor:
    """The reduction of whole numbers, done wide and converted."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return REDUCTIONS[reduction](torch.stack([tensor.to(wide) for tensor in tensors])).to(dtype)


def options(name: str, **values: Any) -> Any:
    made = getattr(ops.c10d, name)()
    for key, value in values.items():
        setattr(made, key, value)
    return made


class Cases:
    """The cases of one rank; every rank makes the same ones in the same order."""

    def __init__(self, rank: int, size: int, kind: str, dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> None:
        self.rank, self.size, self.kind, self.dtype, self.shape = rank, size, kind, dtype, shape

    def all(self) -> Iterator[Case]:
        yield from self.reductions()
        yield from self.gatherings()
        yield from self.scatterings()
        yield from self.exchanges()
        yield Case("barrier", "barrier", [])

    # --- pieces -----------------------------------------------------------------------------------------

    def _of(self, rank: int, index: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return content(rank, index, self.shape if shape is None else shape, self.dtype)

    def _everyone(self, index: int = 0) -> list[torch.Tensor]:
        return [self._of(rank, index) for rank in range(self.size)]

    def _mine(self, index: int = 0, shape: tuple[int, ...] | None = None) -> Slot:
        return Slot(self.kind, self._of(self.rank, index, shape))

    def _blank(self, shape: tuple[int, ...] | None = None) -> Slot:
        return Slot(self.kind, torch.zeros(self.shape if shape is None else shape).to(self.dtype))

    def _long(self) -> tuple[int, ...]:
        return (self.shape[0] * self.size, *self.shape[1:])

    # --- the ops ----------------------------------------------------------------------------------------

    def reductions(self) -> Iterator[Case]:
        for name in ("SUM", "PRODUCT") if self.dtype.is_complex else REDUCTIONS:
            by = getattr(dist.ReduceOp, name)
            slot = self._mine()
            opts = options("AllreduceOptions", reduceOp=by)
            yield Case(f"allreduce {name}", "allreduce", [[slot.view], opts], [(slot, reduced(self._everyone(), name))])
        slots = [self._mine(0), self._mine(1)]
        after = [(slot, reduced(self._everyone(index))) for index, slot in enumerate(slots)]
        yield Case("allreduce_coalesced", "allreduce_coalesced", [[slot.view for slot in slots]], after)
        slot = self._mine()
        # what the others hold afterwards is the backend's business
        after = [(slot, reduced(self._everyone()))] if self.rank == ROOT else []
        yield Case("reduce", "reduce", [[slot.view], options("ReduceOptions", rootRank=ROOT)], after)
        slot = self._mine()
        opts = options("BroadcastOptions", rootRank=ROOT)
        yield Case("broadcast", "broadcast", [[slot.view], opts], [(slot, self._of(ROOT))])

    def gatherings(self) -> Iterator[Case]:
        for name in ("allgather", "allgather_coalesced"):
            outs, mine = [self._blank() for _ in range(self.size)], self._mine()
            args = [[[out.view for out in outs]], [mine.view]]
            if name == "allgather_coalesced":  # one list per rank, each with a tensor per input
                args[0] = [[out.view] for out in outs]
            yield Case(name, name, args, [*zip(outs, self._everyone()), (mine, self._of(self.rank))])
        if self.shape:
            out, mine = self._blank(self._long()), self._mine()
            after = [(out, torch.cat([t.cpu() for t in self._everyone()])), (mine, self._of(self.rank))]
            yield Case("_allgather_base", "_allgather_base", [out.view, mine.view], after)
            outs, ours = [self._blank(self._long()) for _ in range(2)], [self._mine(0), self._mine(1)]
            after = [(out, torch.cat(self._everyone(index))) for index, out in enumerate(outs)]
            args = [[out.view for out in outs], [mine.view for mine in ours]]
            yield Case("allgather_into_tensor_coalesced", "allgather_into_tensor_coalesced", args, after)
        outs, mine = [self._blank() for _ in range(self.size)], self._mine()
        at_root = self.rank == ROOT
        args = [[[out.view for out in outs]] if at_root else [], [mine.view], options("GatherOptions", rootRank=ROOT)]
        yield Case("gather", "gather", args, list(zip(outs, self._everyone())) if at_root else [])

    def scatterings(self) -> Iterator[Case]:
        out, parts = self._blank(), [self._mine(index) for index in range(self.size)]
        args = [[out.view], [[part.view for part in parts]] if self.rank == ROOT else []]
        after = [(out, self._of(ROOT, self.rank))]
        yield Case("scatter", "scatter", [*args, options("ScatterOptions", rootRank=ROOT)], after)
        out, parts = self._blank(), [self._mine(index) for index in range(self.size)]
        after = [(out, reduced(self._everyone(self.rank)))]
        yield Case("reduce_scatter", "reduce_scatter", [[out.view], [[part.view for part in parts]]], after)
        if self.shape:
            whole = reduced([self._of(rank, 0, self._long()) for rank in range(self.size)])
            share = whole.narrow(0, self.rank * self.shape[0], self.shape[0])
            out, mine = self._blank(), self._mine(0, self._long())
            yield Case("_reduce_scatter_base", "_reduce_scatter_base", [out.view, mine.view], [(out, share)])
            out, mine = self._blank(), self._mine(0, self._long())
            name = "reduce_scatter_tensor_coalesced"
            yield Case(name, name, [[out.view], [mine.view]], [(out, share)])

    def exchanges(self) -> Iterator[Case]:
        outs, mine = [self._blank() for _ in range(self.size)], [self._mine(index) for index in range(self.size)]
        after = [(out, self._of(rank, self.rank)) for rank, out in enumerate(outs)]
        yield Case("alltoall", "alltoall", [[out.view for out in outs], [each.view for each in mine]], after)
        if self.shape:
            rows = self.shape[0]
            out, one = self._blank(self._long()), self._mine(0, self._long())
            all_of = [self._of(rank, 0, self._long()) for rank in range(self.size)]
            share = torch.cat([each.narrow(0, self.rank * rows, rows) for each in all_of])
            yield Case("alltoall_base", "alltoall_base", [out.view, one.view, [], []], [(out, share)])
            # rank r gets r rows more than the others, of everybody
            sends = [rows + to for to in range(self.size)]
            long = (sum(sends), *self.shape[1:])
            start = sum(sends[: self.rank])
            share = torch.cat([self._of(r, 0, long).narrow(0, start, rows + self.rank) for r in range(self.size)])
            out, one = self._blank(tuple(share.shape)), self._mine(0, long)
            gets = [rows + self.rank] * self.size
            yield Case("alltoall_base by splits", "alltoall_base", [out.view, one.view, gets, sends], [(out, share)])
