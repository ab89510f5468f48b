# SPDX-License-Identifier: BSD-3-Clause
"""One child during one epoch, as the trainer holds it: issues ops, reads replies, settles what was issued.

    issue: lend the tensors -> submit to the link -> send          (one thread at a time, in the order of op ids)
    reader: receive -> link -> bring results back, settle          (one thread, which ends with the child)

What happens next is decided by the pure ``Link`` and performed by ``_perform``, here and nowhere else.

Locks: ``_lock`` guards the link and the tables, and nothing waits under it. ``_issuing`` keeps the order of what is
sent and may be held as long as an op's deadline; ``abort`` does not need it, and cuts the pipe under whoever has it.
The memory of an op that failed with its child is free once the child is known to be dead.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._deadline import Deadline
from .._errors import ProtocolError, UnsupportedOp
from . import _link
from . import _messages as says
from ._arena import Arena
from ._forked_child import ForkedChild
from ._handle import OpWork
from ._inflight import NOTHING, InFlight, Relation
from ._loans import Lent, Loan, kind_of, lend, span
from ._ops import Direction, Op, options_to_fields, replace, results, walk
from ._pipe import Pipe, PipeBroken
from ._staging import alias, plain, stageable
from ._template import Template

__all__ = ["Session"]

_logger = logging.getLogger(__name__)

# After the end of the pipe: so long for the template to report how the child died. It does so within milliseconds.
_REPORT_S = 0.2
# A child that was told to end leaves in milliseconds; a shutdown may take half a second at most.
_LEAVE_S = 0.3
# A killed process is gone at once, unless it waits for a device that does not answer; its memory is then given up.
_DEATH_S = 1.0
# How often the reader looks after idle memory when nothing comes.
_TICK_S = 1.0


@dataclass(slots=True)
class _Issued:
    """An op that was sent and has not settled."""

    work: ChildWork
    ticket: int
    lent: list[Lent]
    deadline: Deadline
    op_id: int = -1


class ChildWork(OpWork):
    """An op in the child."""

    def __init__(self, session: Session, what: str, limit_s: float, tensors: list[Any]) -> None:
        super().__init__(what, limit_s, tensors)
        self._session = session

    def _await(self, limit_s: float, slack_s: float) -> None:
        deadline = Deadline(limit_s)
        if not self.until_over(limit_s + slack_s):
            raise self._late(deadline)

    def until_over(self, limit_s: float) -> bool:
        """Wait until it is over; whether it is, within ``limit_s`` seconds."""
        return self._session.read_until_over(self, limit_s) or self._over.wait(limit_s)


@dataclass
class _Tables:
    """What is in flight; guarded by the session's lock."""

    issued: dict[int, _Issued] = field(default_factory=dict)  # by op id
    tickets: dict[int, _Issued] = field(default_factory=dict)
    memory: InFlight = field(default_factory=InFlight)
    loans: dict[tuple[int, int], Loan] = field(default_factory=dict)
    limits: list[tuple[float, int]] = field(default_factory=list)  # a heap of (monotonic time, op id)
    next_ticket: int = 0


class Session:
    """One child and its link.

    Args:
        arena: where tensors are lent; the group's, which outlives this.
        configure: what the child is told first.
    """

    def __init__(self, arena: Arena, configure: says.Configure) -> None:
        self.epoch = configure.epoch
        self.backend = configure.backend
        self._arena = arena
        self._lock = threading.RLock()
        self._issuing = threading.Lock()
        self._link = _link.Link(configure)
        self._tables = _Tables()
        self._configured = threading.Event()
        self._outcome: Exception | None = None
        self._told: set[int] = set()
        self._forgotten: list[int] = []
        self._hostages: list[Loan] = []
        self._dead = False
        self._child: ForkedChild | None = None
        self._pipe, self._end = Pipe.pair(configure.timeout_s)
        self._reader = threading.Thread(target=self._read, name=f"replies of epoch {self.epoch}", daemon=True)

    # --- its life ---------------------------------------------------------------------------------------

    def start(self, template: Template, device: tuple[str, int] | None, deadline: Deadline) -> None:
        """Fork the child and have it meet its peers.

        Raises:
            ChildStartFailed, DeadlineExceeded, RemoteFailure, ChildError, StateError: it did not come up.
        """
        try:
            child = template.fork(deadline, self._end, device)
        except Exception as error:
            self._broke(error)
            self._pipe.close()
            raise
        with self._lock:
            self._child = child
        self._reader.start()
        if self._link.state in _link.OVER:  # aborted while it was forked
            self._kill()
        if not self._configured.wait(deadline.remaining_s()):
            self._broke(deadline.exceeded("configure", "check that every rank got the same address and world size"))
            self._configured.wait()
        if self._outcome is not None:
            raise self._outcome

    def abort(self, reason: Any = None) -> None:
        """End everything pending with ``reason``, at once, from any thread."""
        self._perform(self._decide(lambda: self._link.abort(reason)))

    def supersede(self) -> None:
        """A later ``configure`` takes over."""
        self._perform(self._decide(self._link.supersede))

    def close(self) -> None:
        """The normal end; returns within half a second, when the child is gone."""
        self._perform(self._decide(self._link.close))
        if threading.current_thread() is self._reader or not self._reader.is_alive():
            return
        self._reader.join(_LEAVE_S)
        if self._reader.is_alive():
            self._kill()
            self._reader.join(_REPORT_S)

    def cut(self) -> None:
        """End it from a destructor, in whichever thread that runs: takes no lock; the reader does the rest."""
        self._pipe.cut()

    @property
    def error(self) -> Exception | None:
        """What broke it."""
        return self._link.error

    @property
    def active(self) -> int:
        """How many ops have not settled."""
        return self._link.active

    # --- ops --------------------------------------------------------------------------------------------

    def issue(self, op: Op, values: list[Any], options: Any, limit_s: float) -> OpWork:
        """Send ``op`` to the child; does not wait for it.

        Raises:
            UnsupportedOp: a tensor cannot be handed over.
            ChildError, StateError, DeadlineExceeded: the session is over.
            DeadlineExceeded: for ``limit_s`` seconds there was no room for the tensors, or no turn.
        """
        deadline = Deadline(limit_s)
        views = [(direction, self._view(op, tensor)) for direction, tensor in walk(op, values)]
        fields = options_to_fields(options)
        work = ChildWork(self, f"{op.name} on {self.backend}", limit_s, results(op, values))
        if not self._issuing.acquire(timeout=limit_s):
            raise deadline.exceeded(f"{op.name}: waiting for other threads to issue", "the child does not keep up")
        try:
            issued, after = self._lend(work, views, deadline)
            self._send(op, values, fields, limit_s, issued, after)
        finally:
            self._issuing.release()
        return work

    def read_until_over(self, work: OpWork, limit_s: float) -> bool:
        """Where a callback waits for another op, in the only thread that reads: read on. Else at once False."""
        if threading.current_thread() is not self._reader:
            return False
        deadline = Deadline(limit_s)
        while not (work.is_over() or deadline.expired() or self._dead):
            self._receive(deadline.remaining_s())
        return work.is_over()

    def _view(self, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        if not stageable(tensor):
            raise UnsupportedOp(
                f"{op.name}: the {self.backend} child takes strided CPU tensors, and this one is {tensor.layout} on "
                f"{tensor.device}{' and quantized' if tensor.is_quantized else ''}: convert it first",
                backend=self.backend,
                op=op.name,
            )
        return alias(tensor)

    def _lend(
        self, work: ChildWork, views: list[tuple[Direction, torch.Tensor]], deadline: Deadline
    ) -> tuple[_Issued, int]:
        """Lend the tensors of an op; which op it has to follow (an id, or -1)."""
        tables = self._tables
        spans = [span(view, plain(view)) for _, view in views]
        ranges = [(start, end, direction != "in") for (start, end), (direction, _) in zip(spans, views)]
        after = -1
        while True:
            with self._lock:
                ticket = tables.next_ticket
                tables.next_ticket += 1
                relation = tables.memory.add(ticket, ranges)
                issued = tables.tickets[ticket] = _Issued(work, ticket, [], deadline)
                if relation is NOTHING:
                    loans: list[Loan | None] = [None] * len(views)
                    break
                blockers, shared = self._related(relation, views, spans)
                if not blockers:
                    loans = shared
                    after = tables.tickets[relation.same[-1]].op_id
                    break
                self._forget(issued)
            for blocker in blockers:
                if not blocker.work.until_over(deadline.remaining_s()):
                    raise deadline.exceeded("waiting for an earlier op on overlapping memory", "wait for it first")
        try:
            for (direction, view), loan, key in zip(views, loans, spans):
                lent = lend(self._arena, direction, view, loan, key, deadline)
                issued.lent.append(lent)
                if lent.loan is not None:
                    with self._lock:
                        tables.loans[key] = lent.loan
                        if lent.writes:
                            lent.loan.writer = ticket
        except BaseException:
            with self._lock:
                self._forget(issued)
            raise
        return issued, after

    def _related(
        self, relation: Relation, views: list[tuple[Direction, torch.Tensor]], spans: list[tuple[int, int]]
    ) -> tuple[list[_Issued], list[Loan | None]]:
        """Which ops have to be over before this one can be lent its memory; else the loans that it shares."""
        tables = self._tables
        loans = [tables.loans.get(key) for key in spans]
        fits = not relation.partial and all(
            loan is None or loan.kind == kind_of(view) for loan, (_, view) in zip(loans, views)
        )
        # the child can be told of one op to follow; of several, the older ones are waited for here
        tickets = relation.same[:-1] if fits else (*relation.same, *relation.partial)
        return [tables.tickets[ticket] for ticket in tickets if ticket in tables.tickets], loans

    def _send(
        self, op: Op, values: list[Any], fields: tuple[Any, ...], limit_s: float, issued: _Issued, after: int
    ) -> None:
        references = iter([lent.reference() for lent in issued.lent])
        args = _tuples(replace(op, values, lambda direction, tensor: next(references)))
        tables = self._tables
        with self._lock:
            try:
                issued.op_id, effects = self._link.submit(op.name, op.number, args, fields, limit_s, after)
            except BaseException:
                self._forget(issued)
                raise
            tables.issued[issued.op_id] = issued
            heapq.heappush(tables.limits, (time.monotonic() + limit_s, issued.op_id))
        try:
            self._tell_segments(issued)
        except PipeBroken as error:
            self._lost(error)
        self._perform(effects)

    def _tell_segments(self, issued: _Issued) -> None:
        """See that the child has mapped what the op needs, and nothing that is idle."""
        while self._forgotten:
            number = self._forgotten.pop()
            if number in self._told:
                self._told.remove(number)
                self._pipe.send(says.encode(says.DropSegment(number)))
        for lent in issued.lent:
            if lent.segment not in self._told:
                segment = self._arena.segment(lent.segment)
                self._pipe.send(says.encode(says.Segment(segment.number, segment.nbytes)), (segment.fd,))
                self._told.add(lent.segment)

    def _forget(self, issued: _Issued) -> None:
        """Take an op out of the tables, under the lock; give back the loans that nobody uses any more."""
        tables = self._tables
        tables.memory.remove(issued.ticket)
        tables.tickets.pop(issued.ticket, None)
        for lent in issued.lent:
            loan = lent.loan
            if loan is None:
                continue
            loan.users -= 1
            if loan.users:
                continue
            if tables.loans.get(loan.key) is loan:
                del tables.loans[loan.key]
            if self._link.state in _link.OVER and not self._dead:
                self._hostages.append(loan)
            else:
                self._arena.give(loan.slot)

    # --- effects ----------------------------------------------------------------------------------------

    def _decide(self, event: Callable[[], list[_link.Effect]]) -> list[_link.Effect]:
        with self._lock:
            return event()

    def _perform(self, effects: list[_link.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, _link.Settle):
                self._settle(effect.op_id, effect.outcome)
            elif isinstance(effect, _link.Send):
                try:
                    self._pipe.send(says.encode(effect.message))
                except (PipeBroken, ProtocolError) as error:
                    self._lost(error)
            elif isinstance(effect, _link.Configured):
                self._outcome = effect.outcome
                self._configured.set()
            else:
                _logger.info("killing the child of epoch %d: %s", self.epoch, effect.reason)
                self._kill()

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            child.kill()
        self._pipe.cut()  # wakes the reader, and whoever is in the middle of a write

    def _settle(self, op_id: int, outcome: Exception | None) -> None:
        with self._lock:
            issued = self._tables.issued.pop(op_id)
        if outcome is None:
            try:
                for lent in issued.lent:
                    loan = lent.loan
                    if lent.writes and loan is not None and loan.writer == issued.ticket:
                        lent.take_back(self._arena)
            except Exception as error:  # the user has freed the memory
                outcome = error
        with self._lock:
            self._forget(issued)
        issued.work.settle(outcome)

    def _broke(self, cause: BaseException, death: str = "", stderr_tail: str = "") -> None:
        self._perform(self._decide(lambda: self._link.broke(cause, death, stderr_tail)))

    def _lost(self, error: BaseException) -> None:
        """The pipe has ended: say how the child died, if it did."""
        child = self._child
        death = child.wait(_REPORT_S) if child is not None else None
        if death is None:
            self._broke(error)
        else:
            self._broke(error, death.text(), death.stderr_tail)

    # --- the reader -------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while not self._dead:
                self._receive(_TICK_S)
        except PipeBroken as error:
            self._lost(error)
        except BaseException as error:
            if not isinstance(error, ProtocolError):
                _logger.exception("the replies of epoch %d cannot be handled", self.epoch)
            self._broke(error)
        finally:
            self._bury()

    def _receive(self, wait_s: float) -> None:
        """Wait for one message, for the next limit of an op, or ``wait_s`` seconds, and do what it asks for."""
        child = self._child
        limits = self._tables.limits
        if limits:
            wait_s = min(wait_s, max(0.0, limits[0][0] - time.monotonic()))
        if self._pipe.poll(wait_s, child.fileno() if child is not None else -1):
            message = says.decode(self._pipe.receive())
            self._perform(self._decide(lambda: self._link.received(message, self.epoch)))
            return
        if child is not None and child.wait(0) is not None:  # whoever has a copy of its socket keeps the pipe open
            raise PipeBroken("the child has ended", ended=True)
        self._look_at_limits()
        if not self._dead:
            self._forgotten += self._arena.forget_idle()

    def _look_at_limits(self) -> None:
        now_s = time.monotonic()
        tables = self._tables
        while True:
            with self._lock:
                if not tables.limits or tables.limits[0][0] > now_s:
                    return
                _, op_id = heapq.heappop(tables.limits)
                issued = tables.issued.get(op_id)
                if issued is None:
                    continue
                deadline = issued.deadline
                effects = self._link.timed_out(op_id, deadline.limit_s, deadline.elapsed_s())
            self._perform(effects)

    def _bury(self) -> None:
        """The end of the reader: the child is dead, or soon will be, and its memory free."""
        child = self._child
        if child is not None:
            child.kill()
            died = child.wait(_DEATH_S) is not None
            child.close()
        else:
            died = True
        self._pipe.close()
        with self._lock:
            self._dead = True
            if died:
                for loan in self._hostages:
                    self._arena.give(loan.slot)
            self._hostages.clear()


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down: what a message holds."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
