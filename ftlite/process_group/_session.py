# SPDX-License-Identifier: BSD-3-Clause
"""One child during one epoch, as the trainer holds it: issues ops, reads replies, settles what was issued.

    issue:   lend the tensors -> submit to the link -> send        (one thread at a time, in the order of op ids)
    replies: receive -> link -> take results back, settle          (whoever has the turn, see ``_replies``)

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
from typing import Any

import torch

from .._deadline import Deadline
from .._errors import ProtocolError, UnsupportedOp
from . import _link
from . import _messages as says
from ._arena import Arena
from ._forked_child import ForkedChild
from ._handle import OpWork
from ._loans import Ledger, Lent
from ._ops import Op, options_to_fields, replace, results, walk
from ._pipe import Pipe, PipeBroken
from ._replies import Replies
from ._staging import alias, stageable
from ._template import Template

__all__ = ["ChildWork", "Session"]

_logger = logging.getLogger(__name__)

# After the end of the pipe: so long for the template to report how the child died. It does so within milliseconds.
_REPORT_S = 0.2
# A child that was told to end leaves in milliseconds; a shutdown may take half a second at most.
_LEAVE_S = 0.3
# A killed process is gone at once, unless it waits for a device that does not answer; its memory is then given up.
_DEATH_S = 1.0
# A callback that has the turn and wants to issue looks so often whether it can; meanwhile it reads.
_LOOK_S = 0.005


class ChildWork(OpWork):
    """An op in the child, and what it was lent."""

    def __init__(self, session: Session, what: str, deadline: Deadline, tensors: list[Any]) -> None:
        super().__init__(what, deadline.limit_s, tensors)
        self.op_id = -1  # until it is sent
        self.ticket = -1
        self.lent: list[Lent] = []
        self.deadline = deadline
        self._session = session

    def until_over(self, limit_s: float) -> bool:
        """Wait until it is over; whether it is, within ``limit_s`` seconds."""
        return self.is_over() or self._session.replies.wait(self, limit_s)

    def wait_for_others(self, limit_s: float) -> bool:
        """Wait until another thread has settled it; whether it has, within ``limit_s`` seconds."""
        self._start()
        return self._over.wait(limit_s)

    def _start(self) -> None:
        if not self.is_over():
            self._session.watch(self)

    def _await(self, limit_s: float, slack_s: float) -> None:
        deadline = Deadline(limit_s)
        if not self.until_over(limit_s + slack_s):
            raise self._late(deadline)


class Session:
    """One child and its link.

    Args:
        arena: where tensors are lent; the group's, which outlives this.
        configure: what the child is told first.
    """

    def __init__(self, arena: Arena, configure: says.Configure) -> None:
        self.epoch = configure.epoch
        self.backend = configure.backend
        self.replies = Replies(self._receive)
        self._arena = arena
        self._lock = threading.RLock()
        self._issuing = threading.Lock()
        self._link = _link.Link(configure)
        self._ledger = Ledger(arena, self._lock, self._keep_reading)
        self._issued: dict[int, ChildWork] = {}  # by op id
        self._watched: set[int] = set()  # op ids of which somebody is told by whoever reads
        self._limits: list[tuple[float, int]] = []  # a heap of (monotonic time, op id)
        self._configured = threading.Event()
        self._outcome: Exception | None = None
        self._told: set[int] = set()  # segments that the child has mapped
        self._forgotten: list[int] = []  # and of these, those that the arena has given up
        self._ended = False
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
        except BaseException as error:
            self._broke(error)
            self._pipe.close()
            raise
        with self._lock:
            self._child = child
            aborted = self._link.state in _link.OVER
        if aborted:
            self._kill()
        self._reader.start()
        if not self._configured.wait(deadline.remaining_s()):
            self._broke(deadline.exceeded("configure", "check that every rank got the same address and world size"))
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
        """Send ``op`` to the child; does not wait for it.

        Raises:
            UnsupportedOp: a tensor cannot be handed over.
            ChildError, StateError, DeadlineExceeded: the session is over.
            DeadlineExceeded: for ``limit_s`` seconds there was no room for the tensors, or no turn.
        """
        deadline = Deadline(limit_s)
        views = [(direction, self._view(op, tensor)) for direction, tensor in walk(op, values)]
        fields = options_to_fields(options)
        work = ChildWork(self, f"{op.name} on {self.backend}", deadline, results(op, values))
        self._acquire_issuing(op, deadline)
        try:
            after = self._ledger.lend(work, views, deadline)
            self._send(op, values, fields, work, after)
        finally:
            self._issuing.release()
        return work

    def watch(self, work: ChildWork) -> None:
        """Somebody wants to be told of the end of ``work`` who will not read for it."""
        with self._lock:
            if work.op_id in self._issued:
                self._watched.add(work.op_id)
                self.replies.tell(len(self._watched))

    def _view(self, op: Op, tensor: torch.Tensor) -> torch.Tensor:
        if not stageable(tensor):
            raise UnsupportedOp(
                f"{op.name}: the {self.backend} child takes strided CPU tensors, and this one is {tensor.layout} on "
                f"{tensor.device}{' and quantized' if tensor.is_quantized else ''}: convert it first",
                backend=self.backend,
                op=op.name,
            )
        return alias(tensor)

    def _keep_reading(self) -> Callable[[float], object] | None:
        """In a callback, which has the turn, what to do instead of waiting; None in other threads."""
        return self._receive if self.replies.is_mine() else None

    def _acquire_issuing(self, op: Op, deadline: Deadline) -> None:
        if self._issuing.acquire(blocking=False):
            return
        keep_reading = self._keep_reading()
        while not self._issuing.acquire(timeout=deadline.remaining_s() if keep_reading is None else 0.0):
            if deadline.expired():
                raise deadline.exceeded(f"{op.name}: waiting for other threads to issue", "the child does not keep up")
            if keep_reading is not None:  # whoever issues may wait for room, and so for replies
                keep_reading(_LOOK_S)

    def _send(self, op: Op, values: list[Any], fields: tuple[Any, ...], work: ChildWork, after: int) -> None:
        references = iter([lent.reference() for lent in work.lent])
        args = _tuples(replace(op, values, lambda direction, tensor: next(references)))
        limit_s = work.deadline.limit_s
        try:
            with self._lock:
                work.op_id, effects = self._link.submit(op.name, op.number, args, fields, limit_s, after)
                self._issued[work.op_id] = work
                heapq.heappush(self._limits, (time.monotonic() + limit_s, work.op_id))
        except BaseException:
            self._ledger.forget(work, True)  # the child has not heard of it
            raise
        try:
            self._tell_segments(work)
        except PipeBroken as error:
            self._lost(error)
        self._perform(effects)

    def _tell_segments(self, work: ChildWork) -> None:
        """See that the child has mapped what the op needs, and nothing that is idle."""
        while self._forgotten:
            number = self._forgotten.pop()
            if number in self._told:
                self._told.remove(number)
                self._pipe.send(says.encode(says.DropSegment(number)))
        for lent in work.lent:
            if lent.segment not in self._told:
                segment = self._arena.segment(lent.segment)
                self._pipe.send(says.encode(says.Segment(segment.number, segment.nbytes)), (segment.fd,))
                self._told.add(lent.segment)

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
        self._pipe.cut()  # wakes whoever reads, and whoever is in the middle of a write

    def _settle(self, op_id: int, outcome: Exception | None) -> None:
        with self._lock:
            work = self._issued.pop(op_id)
        if outcome is None:
            try:
                self._ledger.take_back(work)
            except Exception as error:  # the user has freed the memory
                outcome = error
        self._ledger.forget(work, self._link.state not in _link.OVER or self._dead)
        work.settle(outcome)
        if op_id in self._watched:
            with self._lock:
                self._watched.discard(op_id)
                self.replies.tell(len(self._watched))

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

    # --- replies ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self.replies.read()
        finally:
            self._bury()

    def _receive(self, wait_s: float) -> bool:
        """Wait for one message, for the next limit of an op, or ``wait_s`` seconds, and do what it asks for.

        Returns whether there can be more. For whoever has the turn.
        """
        if self._ended:
            return False
        child = self._child
        limits = self._limits
        if limits:
            wait_s = min(wait_s, max(0.0, limits[0][0] - time.monotonic()))
        try:
            # an exception from outside (Ctrl-C) that comes here leaves everything as it is
            came = self._pipe.poll(wait_s, child.fileno() if child is not None else -1)
        except PipeBroken as error:
            return self._end_with(error)
        try:
            if came:
                message = says.decode(self._pipe.receive())
                self._perform(self._decide(lambda: self._link.received(message, self.epoch)))
            elif child is not None and child.wait(0) is not None:  # somebody has a copy of its socket
                raise PipeBroken("the child has ended", ended=True)
            else:
                self._look_at_limits()
                self._forgotten += self._arena.forget_idle()
        except BaseException as error:
            self._end_with(error)
            if not isinstance(error, (PipeBroken, ProtocolError)):
                raise
        return not self._ended

    def _end_with(self, error: BaseException) -> bool:
        """There are no more replies."""
        self._ended = True
        if isinstance(error, PipeBroken):
            self._lost(error)
        else:
            self._broke(error)
        return False

    def _look_at_limits(self) -> None:
        now_s = time.monotonic()
        while True:
            with self._lock:
                if not self._limits or self._limits[0][0] > now_s:
                    return
                _, op_id = heapq.heappop(self._limits)
                work = self._issued.get(op_id)
                if work is None:
                    continue
                deadline = work.deadline
                effects = self._link.timed_out(op_id, deadline.limit_s, deadline.elapsed_s())
            self._perform(effects)

    def _bury(self) -> None:
        """The end of the reader: the child is dead, or soon will be, and its memory free."""
        child = self._child
        died = True
        if child is not None:
            child.kill()
            died = child.wait(_DEATH_S) is not None
            child.close()
        self._pipe.close()
        with self._lock:
            self._dead = True
        if died:
            self._ledger.ransom()


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down: what a message holds."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
