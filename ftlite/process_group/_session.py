# SPDX-License-Identifier: BSD-3-Clause
"""One child during one epoch, as the trainer holds it: issues ops, reads replies, settles what was issued.

    issue:   lend the tensors -> submit to the link -> send        (one thread at a time, in the order of op ids)
    replies: receive -> link -> take results back, settle          (the reader's thread, see ``_replies``)

What happens next is decided by the pure ``Link`` and performed by ``_perform``, here and nowhere else.

Locks: ``_lock`` guards the link and the tables, and nothing waits under it. ``_issuing`` keeps the order of what is
sent and may be held as long as an op's deadline; ``abort`` does not need it, and cuts the pipe under whoever has it.
The memory of an op that failed with its child is free once the child is known to be dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from .._deadline import Deadline
from .._errors import ChildStartFailed, ProtocolError
from . import _link
from . import _messages as says
from ._arena import Arena
from ._exports import AllExports
from ._forked_child import ForkedChild
from ._frames import frameless, fresh
from ._lenders import Lenders
from ._limits import Limits
from ._nesting import require_shallow
from ._ops import Op, arrange
from ._options import options_to_fields, timeout_in
from ._owner import Owner
from ._pace import REST_S, Pace
from ._pending import Pending
from ._pipe import Pipe, PipeBroken
from ._replies import Replies
from ._template import Template
from ._turns import Turns
from ._work import ChildWork

__all__ = ["Session"]

_logger = logging.getLogger(__name__)

# After the end of the pipe: for the child to leave its device, and the template to tell how it died; milliseconds each.
_REPORT_S = 0.2
# A child that was told to end leaves in milliseconds. A shutdown may take half a second, the wait above included.
_LEAVE_S = 0.25
# A killed process is gone at once, unless it waits for a device that does not answer; its memory is then given up.
_DEATH_S = 1.0
# Idle memory is given back after ten times as long; a look takes 10 us.
_CHORES_S = 1.0


class Session:
    """One child and its link.

    Args:
        template: what forks the child.
        arena: where host memory is lent; the group's, which outlives this.
        exports: what has been exported of the devices' memory; likewise.
        configure: what the child is told first.
    """

    def __init__(self, template: Template, arena: Arena, exports: AllExports, configure: says.Configure) -> None:
        self.epoch, self.backend = configure.epoch, configure.backend
        self.rank, self.size = configure.rank, configure.world_size
        self.owner = Owner()
        self.replies = Replies(self._receive)
        self._lock = threading.RLock()
        self._issuing = Turns()
        self._link = _link.Link(configure)
        self._ledger = Lenders(arena, exports, self._lock, self._keep_reading, self.backend, self.rank)
        self.pending = Pending(self._lock, self._ledger, self.replies, lambda: not self._is_over() or self._dead)
        self._limits = Limits(self.pending.works)
        self._chores_s = 0.0  # when to look for them next
        self._configured = threading.Event()
        self._outcome: Exception | None = None
        self._ended: BaseException | None = None  # why there are no more replies
        self._dead = False
        self._pace = Pace()
        self._child: ForkedChild | None = None
        self._pipe, self._end = Pipe.pair(configure.timeout_s, is_greedy=True)
        self._reader: threading.Thread | None = None
        self._template = template

    # --- its life ---------------------------------------------------------------------------------------

    def start(self, device: tuple[str, int] | None, deadline: Deadline) -> None:
        """Fork the child and have it meet its peers; an abort ends the wait for either.

        Raises:
            ChildStartFailed, DeadlineExceeded, RemoteFailure, ChildError, StateError: it did not come up.
        """
        name = f"replies of epoch {self.epoch}"
        self._reader = threading.Thread(target=self._read, args=(device, deadline), name=name, daemon=True)
        try:
            self._reader.start()
            if not self._configured.wait(deadline.remaining_s()) and self._child is None:
                self._configured.wait(_REPORT_S)  # the template's own error says more
            if not self._configured.is_set():
                self._broke(deadline.exceeded("configure", "check that every rank got the same address and world size"))
        except BaseException as error:  # Ctrl-C, or no thread is left
            self._broke(frameless(fresh(error)))
            if not self._reader.is_alive():  # nobody else will
                self._end.close()
                self._bury()
            if not isinstance(error, Exception):
                raise
        outcome, self._outcome = self._outcome, None
        try:
            if outcome is not None:
                raise outcome
        finally:
            del outcome  # its traceback holds this frame
        self._require_living("configure")

    def _fork(self, device: tuple[str, int] | None, deadline: Deadline) -> ForkedChild:
        was_up = self._template.is_up()
        try:
            return self._template.fork(deadline, self._end, device)
        except ChildStartFailed:
            if not was_up:
                raise
        # it had been killed, and nobody knew. Another pipe, for a child of the dead one may have said something by now.
        pipe, end = Pipe.pair(self._pipe.write_limit_s, is_greedy=True)
        with self._lock:
            if not self._is_over():
                self._pipe, pipe = pipe, self._pipe
        pipe.close()
        return self._template.fork(deadline, end, device)

    def abort(self, reason: Any = None) -> None:
        """End everything pending with ``reason``, at once, from any thread."""
        self._finish(lambda: self._link.abort(reason))

    def supersede(self) -> None:
        """A later ``configure`` takes over."""
        self._finish(self._link.supersede)

    def close(self) -> None:
        """The normal end; returns within half a second, when the child is gone."""
        self._finish(self._link.close)
        reader = self._reader
        if reader is not None and reader.is_alive() and not self.replies.is_mine():  # in a callback it is this thread
            reader.join(_LEAVE_S)
            if reader.is_alive():
                self._kill()
                reader.join(_REPORT_S)

    def _finish(self, event: Callable[[], list[_link.Effect]]) -> None:
        """End it; afterwards nothing is written to the user's tensors any more."""
        self._decide(event)
        self.pending.quiesce()

    def until_dead(self) -> None:
        """Wait, for a second at most, until the child is, and writes to no shared memory any more."""
        if self._child is not None:
            self._child.wait(_DEATH_S)

    def cut(self) -> None:
        """End it from a destructor, in whichever thread that runs: waits for no lock; the reader does the rest."""
        self._pipe.cut()

    def child_pid(self) -> int | None:
        """The child's process id, while it lives as far as is known."""
        child = self._child
        return child.pid if child is not None and not self._dead else None

    @property
    def error(self) -> Exception | None:
        """What broke it."""
        return self._link.error

    @property
    def active(self) -> int:
        """How many ops have not settled."""
        return self._link.active

    # --- ops --------------------------------------------------------------------------------------------

    def issue(self, op: Op, values: list[Any], options: Any, limit_s: float) -> ChildWork:
        """Send ``op`` to the child; does not wait for it. ``limit_s`` is for an op whose options have no timeout.

        Raises:
            UnsupportedOp: a tensor cannot be handed over.
            ChildError, StateError, DeadlineExceeded: the session is over.
            DeadlineExceeded: for as long there was no room for the tensors, or no turn.
        """
        fields = options_to_fields(options)
        deadline = Deadline(timeout_in(op, fields) or limit_s)
        self._require_living(op.name)  # at once: who issues now may wait for what this thread is to settle
        work, views = self._ledger.borrower(self, op, values, options, deadline)
        self._issuing.acquire(op.name, deadline, self._keep_reading(), self._pipe.has_room)
        try:
            after = self._ledger.lend(work, views, deadline)
            self._send(op, values, fields, work, after)
        except BaseException as error:
            # nobody knows what the child was told; or Ctrl-C came in the middle of a change to a table
            if work.op_id >= 0 or not isinstance(error, Exception) or isinstance(error, LookupError):
                self._broke(frameless(fresh(error)))
            raise
        finally:
            self._issuing.release()
        return work

    def _require_living(self, attempted: str) -> None:
        """Raise what ended the session, if it is over."""
        if self._is_over():  # for good
            with self._lock:
                self._link.submit(attempted, 0, (), (), 0.0)

    def _keep_reading(self) -> Callable[[float], object] | None:
        """In a callback, what to do instead of waiting; None in other threads."""
        return self._read_on if self.replies.is_mine() else None

    def _read_on(self, wait_s: float) -> None:
        require_shallow("an op")
        if not self._receive(wait_s):
            self._require_living("an op")

    def _send(self, op: Op, values: list[Any], fields: tuple[Any, ...], work: ChildWork, after: int) -> None:
        args = tuple(arrange(op, values, iter(work.references()), tuple))
        limit_s = work.deadline.limit_s
        try:
            with self._lock:
                pair = work.pair_number()
                work.op_id, effects = self._link.submit(op.name, op.number, args, fields, limit_s, after, pair)
                self.pending.works[work.op_id] = work
                self._limits.add(time.monotonic() + limit_s, work.op_id)
        except BaseException:
            self._ledger.forget(work, True)  # the child has not heard of it
            raise
        try:
            self._announce(work)
            self._perform(effects)
        except PipeBroken as error:
            self._lost(error)

    def _announce(self, work: ChildWork | None) -> None:
        for message, fds in self._ledger.announce(work):
            self._pipe.send(says.encode(message), fds)

    # --- effects ----------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._link.state in _link.OVER

    def _decide(self, event: Callable[[], list[_link.Effect]]) -> None:
        with self._lock:
            effects = event()
        self._perform(effects)

    def _perform(self, effects: list[_link.Effect]) -> None:
        ended = [effect for effect in effects if isinstance(effect, _link.Settle)]
        try:
            for effect in effects:
                if isinstance(effect, _link.Send):
                    try:
                        self._pipe.send(says.encode(effect.message))
                    except (PipeBroken, ProtocolError) as error:
                        self._lost(error)
                elif isinstance(effect, _link.Released):
                    self._ledger.dropped(effect.number)
                elif isinstance(effect, _link.Configured):
                    self._outcome = effect.outcome
                    self._configured.set()
                elif isinstance(effect, _link.Kill):
                    _logger.info("killing the child of epoch %d: %s", self.epoch, effect.reason)
                    self._kill()
        finally:  # whatever comes: the link will not say it again
            self.pending.settle(ended)

    def _kill(self) -> None:
        child = self._child
        # a child with a device at work gets until the reader's end, to have it leave what is queued
        if child is not None and not self._ledger.is_busy():
            child.kill()
        self._pipe.cut()  # wakes whoever reads, and whoever is in the middle of a write

    def _broke(self, cause: BaseException, death: str = "", stderr_tail: str = "") -> None:
        self._template.let_exit()
        self._decide(lambda: self._link.broke(cause, death, stderr_tail))

    def _lost(self, error: BaseException) -> None:
        """The pipe has ended: say how the child died, if it did."""
        child = self._child
        death = child.wait(_REPORT_S) if child is not None else None
        self._broke(frameless(error), *((death.text(), death.stderr_tail) if death is not None else ()))

    # --- replies ----------------------------------------------------------------------------------------

    def _read(self, device: tuple[str, int] | None, deadline: Deadline) -> None:
        try:
            self._child = self._fork(device, deadline)
        except Exception as error:
            self._end_with(error)
        try:
            if self._is_over():  # an abort may have found no child
                self._kill()
            self.replies.read()
        finally:
            self._bury()

    def _receive(self, wait_s: float) -> bool:
        """Wait for one message, for the next limit of an op, or ``wait_s`` seconds, and do what it asks for.

        Returns whether there can be more. For the reader.
        """
        if self._ended is not None:
            return self._end_with(self._ended)
        child = self._child
        wait_s = min(wait_s, max(0.0, self._limits.next_s() - time.monotonic()))
        try:
            # an exception from outside (Ctrl-C) that comes here leaves everything as it is
            if not self._pipe.is_ahead() and self._pace.is_burst(self._link.submitted, self._link.active):
                time.sleep(REST_S)
            came = self._pipe.poll(wait_s, child.fileno() if child is not None else -1)
        except PipeBroken as error:
            self._ended = error  # before any call, for which there may be no stack left
            return self._end_with(error)
        try:
            if came:
                self._pace.heard()
                self._perform(self._heard(says.decode(self._pipe.receive())))
            elif child is not None and child.wait(0) is not None:  # somebody has a copy of its socket
                raise PipeBroken("the child has ended", ended=True)
            self._look_at_the_time()
        except BaseException as error:
            self._ended = error
            self._end_with(error)
            if not isinstance(error, (PipeBroken, ProtocolError)):
                raise
        return self._ended is None

    def _heard(self, message: says.Message) -> list[_link.Effect]:
        """What follows from ``message``, with the results in place of the ops that have ended; not once all is over."""
        with self.pending.writing:
            with self._lock:
                effects = self._link.received(message, self.epoch)
            return effects if self._is_over() else [self.pending.bring_back(effect) for effect in effects]

    def _end_with(self, error: BaseException) -> bool:
        """There are no more replies: tell the link, if nobody has. Returns False."""
        self._ended = error = frameless(fresh(error))
        if not self._is_over():
            (self._lost if isinstance(error, PipeBroken) else self._broke)(error)
        self.pending.settle()  # what whoever told it had no stack left for
        return False

    def _look_at_the_time(self) -> None:
        """Also while one reply comes after the other."""
        now_s = time.monotonic()
        if now_s >= self._chores_s:
            self._chores_s = now_s + _CHORES_S
            self.pending.settle()  # what others had to leave
            self._give_memory_back(now_s)
        while now_s >= self._limits.next_s():
            with self._lock:
                op_id = self._limits.pop_due(now_s)
                if op_id is None:
                    return
                deadline = self.pending.works[op_id].deadline
                effects = self._link.timed_out(op_id, deadline.limit_s, deadline.elapsed_s())
            self._perform(effects)

    def _give_memory_back(self, now_s: float) -> None:
        """Forget what is idle. It is the machine's when the child has forgotten it too: at its next op, or now."""
        if self._is_over():
            return  # the next child's session does that
        # one that has nothing to do reads what is sent at once, so that nothing waits here
        if self._ledger.tidy(now_s) and not self.pending.works and self._issuing.acquire_now():
            try:
                self._announce(None)
            finally:
                self._issuing.release()

    def _bury(self) -> None:
        """The end of the reader: the child is dead, or soon will be, and its memory free."""
        if self._ended is not None:
            self._end_with(self._ended)
        child = self._child
        died = True
        if child is not None:
            if self._ledger.is_busy():  # it has the device leave what is queued, which streams here wait for
                child.wait(_REPORT_S)
            child.kill()
            died = child.wait(_DEATH_S) is not None
            child.close()
        self._pipe.close()
        with self._lock:
            self._dead = died
        if died:
            self._ledger.ransom()
        self.pending.end(died)
        self._decide(lambda: self._link.left(self.pending.names()))
