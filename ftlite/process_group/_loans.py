# SPDX-License-Identifier: BSD-3-Clause
"""The memory of ops in flight: from the user's tensors to where the child finds them, and back.

A tensor that lies in the arena goes as it is. Any other gets a slot there: a loan. Ops in flight on the very same
memory share one, and the child runs them one after the other, so that each finds what the one before has left. One
that meets an earlier op's memory in any other way waits until that op is over.

Locks: the session's guards the tables and the loans; nothing is copied and nobody waits under it. One thread lends
at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from .._copy import copy_bytes
from .._deadline import Deadline
from .._errors import DeadlineExceeded, UnsupportedOp
from . import _messages as says
from ._arena import Arena, Slot
from ._inflight import NOTHING, InFlight, Relation
from ._mapping import dtype_code
from ._ops import Direction, Op
from ._staging import alias, pack, plain, require_memory, stageable, unpack

__all__ = ["Borrower", "Ledger", "Lent", "lendable"]


class Loan:
    """A slot, and how many ops in flight use it. ``writers`` are those that write, by ticket.

    The newest of them that ends well brings the result back.
    """

    __slots__ = ("holds_result", "key", "slot", "users", "view", "writers")

    def __init__(self, slot: Slot, key: tuple[int, int], view: torch.Tensor) -> None:
        self.slot = slot
        self.key = key  # the addresses of the user's memory
        self.view = view  # and how the first op that it was lent to saw that
        self.users = 1
        self.writers: list[int] = []
        self.holds_result = False  # which was left there because a newer op was to bring its own

    def is_due(self, ticket: int, is_well: bool) -> bool:
        """Note that the op has ended; whether its memory has to be brought back now."""
        if ticket not in self.writers:
            return False  # a newer one has ended already: a reply was overtaken
        newer = [each for each in self.writers if each > ticket]
        if is_well:
            self.writers = newer
            self.holds_result = True
        else:
            self.writers.remove(ticket)
        is_due = self.holds_result and not newer
        if is_due:
            self.holds_result = False
        return is_due


class Lent(NamedTuple):
    """One tensor of an op. ``loan`` is None where it lies in the arena by itself."""

    view: torch.Tensor
    writes: bool
    is_plain: bool
    segment: int
    offset: int
    loan: Loan | None

    def reference(self) -> tuple[Any, ...]:
        """What the child is told."""
        return "t", self.segment, self.offset, dtype_code(self.view.dtype), tuple(self.view.shape)


class Borrower(Protocol):
    """An op, as the ledger knows it."""

    op_id: int  # -1 until it is sent
    ticket: int
    lent: list[Lent]

    def until_over(self, limit_s: float) -> bool:
        """Wait until it has settled; whether it has, within ``limit_s`` seconds."""


class Ledger:
    """Who uses which memory.

    Args:
        arena: where the slots are.
        lock: the session's.
        keep_reading: None, or, in a thread that everybody's replies depend on, what to do instead of waiting: it
            handles replies for at most so many seconds.
    """

    def __init__(
        self, arena: Arena, lock: threading.RLock, keep_reading: Callable[[], Callable[[float], object] | None]
    ) -> None:
        self._arena = arena
        self._lock = lock
        self._keep_reading = keep_reading
        self._next_ticket = 0
        self._borrowers: dict[int, Borrower] = {}  # by ticket
        self._memory = InFlight()
        self._loans: dict[tuple[int, int], Loan] = {}  # the newest for each range
        self._hostages: list[Loan] = []
        self._told: set[int] = set()  # segments that the child has mapped
        self._idle: list[int] = []  # and of these, those that the arena has given up

    def lend(self, op: Borrower, views: list[tuple[Direction, torch.Tensor]], deadline: Deadline) -> int:
        """Lend ``views`` to ``op``: fills ``op.lent``. Returns the id of the op that it has to follow, or -1.

        Raises:
            DeadlineExceeded: an earlier op kept overlapping memory, or all ops together the arena's, too long.
            StateError: the memory of a view is gone.
            OSError: no memory or no descriptor is left.
        """
        flat = [plain(view) for _, view in views]
        spans = [_span(view, is_plain) for (_, view), is_plain in zip(views, flat)]
        while True:
            loans, after = self._enter(op, views, spans, deadline)
            try:
                for (direction, view), is_plain, key, loan in zip(views, flat, spans, loans):
                    op.lent.append(self._one(direction, view, is_plain, key, loan))
            except BaseException as error:
                shared = [loan for loan in loans[len(op.lent) :] if loan is not None]
                op.lent += [Lent(views[0][1], False, False, -1, -1, loan) for loan in shared]
                self.forget(op, True)
                if not isinstance(error, DeadlineExceeded) or deadline.expired():
                    raise
            else:
                break
            self._await_room(sum(view.nbytes for _, view in views), deadline)
        with self._lock:
            for lent in op.lent:
                if lent.loan is not None and lent.writes:
                    lent.loan.writers.append(op.ticket)
        return after

    def announce(self, op: Borrower | None) -> Iterator[tuple[says.Message, tuple[int, ...]]]:
        """What the child has to hear before ``op``, or at any time, and the descriptors; for whoever lends."""
        self._idle += self._arena.take_gone()
        while self._idle:
            number = self._idle.pop()
            if number in self._told:
                self._told.remove(number)
                yield says.DropSegment(number), ()
        for lent in op.lent if op is not None else ():
            if lent.segment not in self._told:
                segment = self._arena.segment(lent.segment)
                yield says.Segment(segment.number, segment.nbytes), (segment.fd,)
                self._told.add(lent.segment)

    def tidy(self, now_s: float) -> bool:
        """Give idle memory back; whether there is something to announce."""
        self._idle += self._arena.forget_idle(now_s)
        return bool(self._idle)

    def take_back(self, op: Borrower, is_well: bool) -> None:
        """Copy the results of ``op`` to exactly the elements of the user's views.

        Where a later op in flight works on the same memory, the result is that op's; unless it fails (``is_well`` is
        false), when it is that of the op before.

        Raises:
            StateError: the memory of a view is gone.
        """
        for view, writes, is_plain, _, _, loan in op.lent:
            if not writes or loan is None or not loan.slot.nbytes:
                continue
            with self._lock:
                is_due = loan.is_due(op.ticket, is_well)
            if not is_due:
                continue
            if is_plain:
                require_memory(view, "write")
                copy_bytes(view.data_ptr(), loan.slot.pointer, loan.slot.nbytes)
            else:
                unpack(self._arena.tensor(loan.slot, view.dtype, tuple(view.shape)), view)

    def forget(self, op: Borrower, is_free: bool) -> None:
        """``op`` is over. ``is_free``: the child works on its memory no more; else it is kept for ``ransom``."""
        with self._lock:
            self._memory.remove(op.ticket)
            self._borrowers.pop(op.ticket, None)
            for lent in op.lent:
                loan = lent.loan
                if loan is None:
                    continue
                loan.users -= 1
                if loan.users:
                    if op.ticket in loan.writers:
                        loan.writers.remove(op.ticket)
                    continue
                if self._loans.get(loan.key) is loan:
                    del self._loans[loan.key]
                if is_free:
                    self._arena.give(loan.slot)
                else:
                    self._hostages.append(loan)
            op.lent = []

    def ransom(self) -> None:
        """The child is dead: all memory is free."""
        with self._lock:
            for loan in self._hostages:
                self._arena.give(loan.slot)
            self._hostages.clear()

    def end(self) -> None:
        """The session is over: forget ``keep_reading``, and whom it belongs to."""
        self._keep_reading = _no_replies

    def _enter(
        self,
        op: Borrower,
        views: list[tuple[Direction, torch.Tensor]],
        spans: list[tuple[int, int]],
        deadline: Deadline,
    ) -> tuple[list[Loan | None], int]:
        """Note which memory ``op`` uses, once it may; the loans that it shares, and the op that it follows."""
        ranges = [(start, end, direction != "in") for (start, end), (direction, _) in zip(spans, views)]
        while True:
            with self._lock:
                op.ticket = self._next_ticket
                self._next_ticket += 1
                relation = self._memory.add(op.ticket, ranges)
                if relation is NOTHING:
                    self._borrowers[op.ticket] = op
                    return [None] * len(views), -1
                loans = [self._loans.get(key) for key in spans]
                blockers = self._blockers(relation, loans, views)
                if not blockers:
                    self._borrowers[op.ticket] = op
                    for loan in loans:
                        if loan is not None:
                            loan.users += 1
                    return loans, self._borrowers[relation.same[-1]].op_id
                self._memory.remove(op.ticket)
            for blocker in blockers:
                if not blocker.until_over(deadline.remaining_s()):
                    raise deadline.exceeded("waiting for an earlier op on overlapping memory", "wait for it first")

    def _blockers(
        self, relation: Relation, loans: list[Loan | None], views: list[tuple[Direction, torch.Tensor]]
    ) -> list[Borrower]:
        """Which ops have to be over before this one can be lent its memory."""
        fits = not relation.partial and all(
            loan is None or _kind(loan.view) == _kind(view) for loan, (_, view) in zip(loans, views)
        )
        # the child can be told of one op to follow; of several, the older ones are waited for here
        tickets = relation.same[:-1] if fits else (*relation.same, *relation.partial)
        return [self._borrowers[ticket] for ticket in tickets]

    def _one(
        self,
        direction: Direction,
        view: torch.Tensor,
        is_plain: bool,
        key: tuple[int, int],
        loan: Loan | None,
    ) -> Lent:
        writes = direction != "in"
        if loan is not None:
            return Lent(view, writes, is_plain, loan.slot.segment, loan.slot.offset, loan)
        nbytes = view.nbytes
        place = (self._arena.find(view) or self._arena.adopt(view)) if is_plain and nbytes else None
        if place is not None:
            return Lent(view, writes, is_plain, *place, None)
        slot = self._arena.take(nbytes, _NOW)
        try:
            if direction != "out" and nbytes:
                if is_plain:
                    require_memory(view, "read")
                    copy_bytes(slot.pointer, view.data_ptr(), nbytes)
                else:
                    pack(view, self._arena.tensor(slot, view.dtype, tuple(view.shape)))
        except BaseException:
            self._arena.give(slot)
            raise
        loan = Loan(slot, key, view)
        with self._lock:
            self._loans[key] = loan
        return Lent(view, writes, is_plain, slot.segment, slot.offset, loan)

    def _await_room(self, nbytes: int, deadline: Deadline) -> None:
        """Wait until ops in flight have left room for all of an op's tensors.

        Nothing is lent to that op meanwhile: in this thread a callback may issue another on the same memory.
        """
        keep_reading = self._keep_reading()
        while True:
            try:
                self._arena.give(self._arena.take(nbytes, deadline if keep_reading is None else _NOW))
                return
            except DeadlineExceeded:
                if keep_reading is None or deadline.expired():
                    raise
            keep_reading(deadline.remaining_s())  # the room will come from the replies that only this thread can read


def _no_replies() -> None:
    """What there is to do instead of waiting when all is over."""


_NOW = Deadline(0.0)  # to try once


def lendable(
    op: Op, tensors: list[tuple[Direction, torch.Tensor]], backend: str
) -> list[tuple[Direction, torch.Tensor]]:
    """The tensors of ``op``, as ``walk`` gives them, as they are lent.

    Raises:
        UnsupportedOp: one of them cannot be handed over.
    """
    views = []
    for direction, tensor in tensors:
        if not stageable(tensor):
            raise UnsupportedOp(
                f"{op.name}: the {backend} child takes strided CPU tensors, and this one is {tensor.layout} on "
                f"{tensor.device}{' and quantized' if tensor.is_quantized else ''}: convert it first",
                backend=backend,
                op=op.name,
            )
        views.append((direction, alias(tensor)))
    return views


def _span(view: torch.Tensor, is_plain: bool) -> tuple[int, int]:
    """The addresses that ``view`` lies between: first byte, and the one after its last."""
    start = view.data_ptr()
    if is_plain:
        return start, start + view.nbytes
    if not view.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride()))
    return start, start + (last + 1) * view.element_size()


def _kind(view: torch.Tensor) -> tuple[Any, ...]:
    """What two views of the same bytes have to have in common to share a slot."""
    return view.dtype, view.shape, view.stride(), view.is_conj(), view.is_neg()
