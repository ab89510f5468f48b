# SPDX-License-Identifier: BSD-3-Clause
"""The memory of one op: from the user's tensors to where the child finds them, and back.

Rules of this file: called by whoever issues or ends an op; the session's lock guards ``Loan.users`` and ``writer``.
A tensor that lies in the arena goes as it is. Any other gets a slot there: a loan. Ops in flight on the same memory
share one, and the child runs them one after the other, so that each finds what the one before left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._arena import Arena, Slot
from ._mapping import dtype_code
from ._ops import Direction
from ._staging import copy_bytes, pack, plain, require_memory, unpack

__all__ = ["Lent", "Loan", "span"]


class Loan:
    """A slot, and how many ops in flight use it. ``writer`` is the newest that writes; it brings the result back."""

    __slots__ = ("key", "kind", "slot", "users", "writer")

    def __init__(self, slot: Slot, key: tuple[int, int], kind: tuple[Any, ...]) -> None:
        self.slot = slot
        self.key = key
        self.kind = kind
        self.users = 1
        self.writer = -1


class Lent(NamedTuple):
    """One tensor of an op. ``loan`` is None where it lies in the arena by itself."""

    view: torch.Tensor
    writes: bool
    is_plain: bool
    nbytes: int
    segment: int
    offset: int
    loan: Loan | None

    def reference(self) -> tuple[Any, ...]:
        """What the child is told."""
        return "t", self.segment, self.offset, dtype_code(self.view.dtype), tuple(self.view.shape)

    def bring(self, arena: Arena) -> None:
        """Copy the user's elements into the slot."""
        loan = self.loan
        if loan is None or not self.nbytes:
            return
        if self.is_plain:
            require_memory(self.view, "read")
            copy_bytes(loan.slot.pointer, self.view.data_ptr(), self.nbytes)
        else:
            pack(self.view, arena.tensor(loan.slot, self.view.dtype, tuple(self.view.shape)))

    def take_back(self, arena: Arena) -> None:
        """Copy the result from the slot to exactly the elements of the user's view.

        Raises:
            StateError: the view's memory is gone.
        """
        loan = self.loan
        if loan is None or not self.nbytes:
            return
        if self.is_plain:
            require_memory(self.view, "write")
            copy_bytes(self.view.data_ptr(), loan.slot.pointer, self.nbytes)
        else:
            unpack(arena.tensor(loan.slot, self.view.dtype, tuple(self.view.shape)), self.view)


def span(view: torch.Tensor, is_plain: bool) -> tuple[int, int]:
    """The addresses that ``view`` lies between: first byte, and the one after its last."""
    start = view.data_ptr()
    if is_plain:
        return start, start + view.numel() * view.element_size()
    if not view.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride()))
    return start, start + (last + 1) * view.element_size()


def kind_of(view: torch.Tensor) -> tuple[Any, ...]:
    """What two views of the same bytes have to have in common to share a slot."""
    return view.dtype, view.shape, view.stride(), view.is_conj(), view.is_neg()


def lend(
    arena: Arena, direction: Direction, view: torch.Tensor, loan: Loan | None, key: tuple[int, int], deadline: Any
) -> Lent:
    """Lend ``view`` to the child: as it lies, in the slot of ``loan``, or in one of its own.

    Raises:
        DeadlineExceeded, StateError, OSError: of ``Arena.take``; of the view's memory.
    """
    is_plain = plain(view)
    writes = direction != "in"
    nbytes = view.numel() * view.element_size()
    place = arena.find(view) if is_plain and nbytes else None
    if place is not None:
        return Lent(view, writes, is_plain, nbytes, place[0], place[1], None)
    if loan is not None:
        loan.users += 1
        return Lent(view, writes, is_plain, nbytes, loan.slot.segment, loan.slot.offset, loan)
    slot = arena.take(nbytes, deadline)
    lent = Lent(view, writes, is_plain, nbytes, slot.segment, slot.offset, Loan(slot, key, kind_of(view)))
    if direction != "out":
        try:
            lent.bring(arena)
        except BaseException:
            arena.give(slot)
            raise
    return lent
