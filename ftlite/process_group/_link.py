# SPDX-License-Identifier: BSD-3-Clause
"""The link to one child during one epoch, as the trainer sees it: what happens next, whatever happens when.

- Pure: no clock, no lock, no I/O. Events go in as calls, and come from four sides: the group's user
  (``submit``, ``abort``, ``close``, ``supersede``), the child (``received``), whoever watches the child and the
  pipe (``broke``), and whoever has the clock (``timed_out``). Effects come out as a list, to be performed in
  its order. The caller holds one lock around a call; any thread may be that caller.
- The transitions are ``TRANSITIONS``. A pair that is not there is: of the user, an error raised and no change;
  of the child, in a state that is over, late: dropped and counted; of the child otherwise, against the
  protocol, which breaks the link; of those who watch, late as well.
- Every op that was submitted settles exactly once. A state that is over stays, and what ended it is the first
  cause of all that is pending then and of all that is asked later: each gets an error of its own (one object
  raised in two threads mixes their tracebacks) of the same class, with the first one as its cause.
- Op ids count from 0 in each epoch and are never used twice. Nothing crosses: what a child says is dropped by
  the link of any other epoch.
- ``Kill`` comes before the ``Settle``s. An op that has failed may still be running: its memory is free once the
  child is known to be dead, not once the op is settled.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .._errors import (
    ChildDied,
    ChildError,
    ChildStartFailed,
    DeadlineExceeded,
    FtliteError,
    ProtocolError,
    RemoteFailure,
    StateError,
    UnsupportedOp,
)
from . import _messages as says
from ._effects import Configured, Effect, Kill, Released, Send, Settle

__all__ = ["TRANSITIONS", "Configured", "Effect", "Event", "Kill", "Link", "Released", "Send", "Settle", "State"]

# How much of the child's stderr or traceback an op's own error repeats: the last words. All of it is in the
# cause, once, since there may be thousands of ops pending.
TAIL_CHARS = 1000


class _Word(enum.Enum):
    """Hashed by identity, in C: Enum hashes by its name, in Python, which was 16 calls more for each op."""

    __hash__ = object.__hash__


class State(_Word):
    """Where the link stands; the last three are over."""

    STARTING = "starting"  # the child was asked for
    CONFIGURING = "configuring"  # it is there, and meets the other ranks
    UP = "up"
    BROKEN = "broken"  # ``error`` says why
    CLOSED = "closed"  # by shutdown
    SUPERSEDED = "superseded"  # by a later configure


class Event(_Word):
    """What can happen to it."""

    HELLO = "hello"
    READY = "ready"
    CONFIGURE_FAILED = "configure failed"
    REPLY = "reply"  # to an op: done, failed, unsupported
    PHASE = "phase"
    BREAK = "break"  # the child said so, died, broke the protocol; the pipe failed; a limit was exceeded
    TIMEOUT = "time out"  # an op has, at the group's timeout
    SUBMIT = "submit"
    ABORT = "abort"
    CLOSE = "close"
    SUPERSEDE = "supersede"


OVER = frozenset({State.BROKEN, State.CLOSED, State.SUPERSEDED})

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.HELLO): State.CONFIGURING,
    (State.STARTING, Event.PHASE): State.STARTING,
    (State.CONFIGURING, Event.READY): State.UP,
    (State.CONFIGURING, Event.CONFIGURE_FAILED): State.BROKEN,
    (State.CONFIGURING, Event.PHASE): State.CONFIGURING,
    (State.UP, Event.SUBMIT): State.UP,
    (State.UP, Event.REPLY): State.UP,
    (State.UP, Event.PHASE): State.UP,
    (State.UP, Event.TIMEOUT): State.BROKEN,
    **{(state, Event.BREAK): State.BROKEN for state in set(State) - OVER},
    **{(state, Event.ABORT): State.BROKEN for state in set(State) - OVER},
    **{(state, Event.CLOSE): State.CLOSED for state in set(State) - OVER},
    **{(state, Event.SUPERSEDE): State.SUPERSEDED for state in set(State) - OVER},
    # again, or after the other: a no-op
    **{(state, event): state for state in OVER for event in (Event.ABORT, Event.CLOSE, Event.SUPERSEDE)},
}


_Raised: TypeAlias = says.ConfigureFailed | says.OpFailed | says.Broken


class Link:
    """One epoch with one child, which is to be told ``configure`` once it is there.

    ``state``, ``epoch``, ``phase`` (in words), ``pid`` (None before the child's first message), ``last_op`` ("" or
    "allreduce (op 3)"), ``dropped`` (how many late messages there were) may be read.
    """

    def __init__(self, configure: says.Configure) -> None:
        self.state = State.STARTING
        self.epoch = configure.epoch
        self.phase = State.STARTING.value
        self.pid: int | None = None
        self.last_op = ""
        self.dropped = 0
        self._configure = configure
        self._ended: FtliteError | None = None
        self._short = ""
        self._pending: dict[int, str] = {}
        self._next_id = 0

    @property
    def error(self) -> Exception | None:
        """What broke the link first; None while it is not broken, and when it was shut down or superseded."""
        return self._ended if self.state is State.BROKEN else None

    @property
    def submitted(self) -> int:
        """How many ops were submitted."""
        return self._next_id

    @property
    def active(self) -> int:
        """How many ops were submitted and have not settled."""
        return len(self._pending)

    # --- the group's user ------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        op: int,
        args: tuple[Any, ...],
        options: tuple[Any, ...],
        timeout_s: float,
        after: int = -1,
        pair: int = -1,
    ) -> tuple[int, list[Effect]]:
        """Give the op an id. ``name`` is for people, ``op`` its number in the table.

        ``after`` is the id of an op that has to be done before this one starts; it is left out where that has
        settled by now. ``pair`` are the events of an op on a device, which needs no ``after``.

        Raises:
            StateError: the group is not up yet, was shut down, or is of an earlier configure.
            ChildError, DeadlineExceeded: it is broken; what broke it is the cause.
        """
        if self._ended is not None:
            raise self._fresh(f"{name} (epoch {self.epoch})") from self._ended
        if not self._listed(Event.SUBMIT):
            raise StateError(
                f"{name}: the group is {self.state.value} (epoch {self.epoch}); wait until configure() has returned",
                state=self.state.value,
                attempted=name,
            )
        op_id = self._next_id
        run: says.Message = (
            says.Run(op_id, after if after in self._pending else -1, op, timeout_s, args, options)
            if pair < 0
            else says.RunOnDevice(op_id, pair, op, timeout_s, args, options)
        )
        self._next_id += 1
        self._pending[op_id] = name
        self.last_op = f"{name} (op {op_id})"
        return op_id, [Send(run)]

    def abort(self, reason: str | BaseException | None = None) -> list[Effect]:
        """Break the link on purpose; ``reason`` is told to all who wait. When it is over this is a no-op."""
        if self.state in OVER:
            return []
        cause = reason if isinstance(reason, BaseException) else None
        text = f"{type(cause).__name__}: {cause}" if cause is not None else reason or "no reason was given"
        error = ChildError(f"{self._child()} was aborted: {text}; {self._circumstances()}")
        return self._end(Event.ABORT, error, cause)

    def close(self) -> list[Effect]:
        """The normal shutdown; what is pending fails. An idle child is told to end, any other is killed."""
        if self.state in OVER:
            return []
        idle = self.state is State.UP and not self._pending
        text = f"{self._child()} was shut down; call configure() to use the group again"
        effects = self._end(Event.CLOSE, StateError(text, state=State.CLOSED.value))
        return [Send(says.Bye())] if idle else effects

    def supersede(self) -> list[Effect]:
        """A later configure() has come; what is pending fails as stale, and the child is killed."""
        if self.state in OVER:
            return []
        text = f"{self._child()} is stale: a later configure() has replaced it; submit the op again"
        return self._end(Event.SUPERSEDE, StateError(text, state=State.SUPERSEDED.value))

    def left(self, names: Mapping[int, str]) -> list[Effect]:
        """These ops have not settled, by ids: of a link that is over, whose effects got lost with an exception."""
        return [Settle(op_id, self._fresh(f"{name} (op {op_id})")) for op_id, name in names.items()]

    # --- whoever watches -------------------------------------------------------------------------------

    def broke(self, cause: BaseException, death: str = "", stderr_tail: str = "") -> list[Effect]:
        """The child or the pipe is gone: end of file, a failed write, a broken protocol, a limit, a death.

        Args:
            cause: what was seen first. An error of this package, be it a cause of ``cause``, gives the class;
                anything else means that the child died, or, before its first message, did not start.
            death: how the child ended, in words ("exit code 3", "killed by SIGSEGV"), where that is known.
            stderr_tail: the last that it wrote there, likewise.
        """
        if not self._listed(Event.BREAK):
            return self._late()
        what = f"{death}; {cause}" if death else str(cause) or type(cause).__name__
        text = f"{self._child()} is lost: {what}; {self._circumstances()}"
        known = _known(cause)
        if known is not None:
            error = _copy(known, text)
        else:
            error = (ChildStartFailed if self.state is State.STARTING else ChildDied)(text)
        return self._end(Event.BREAK, error, cause, f"the end of its stderr:\n{stderr_tail}" if stderr_tail else "")

    def timed_out(self, op_id: int, limit_s: float, elapsed_s: float) -> list[Effect]:
        """The op has reached the group's timeout: the backend cannot be used any more. Late if it has settled."""
        if not self._listed(Event.TIMEOUT) or op_id not in self._pending:
            return self._late()
        what = f"{self._pending[op_id]} (op {op_id}) in {self._child()}"
        hint = f"{self._circumstances()}; the group is broken: call configure()"
        return self._end(Event.TIMEOUT, DeadlineExceeded(what, limit_s=limit_s, elapsed_s=elapsed_s, hint=hint))

    # --- the child -------------------------------------------------------------------------------------

    def received(self, message: says.Message, epoch: int) -> list[Effect]:
        """The child of ``epoch`` has said ``message``."""
        if epoch != self.epoch or self.state in OVER:
            return self._late()
        event, handle = _CHILD.get(type(message), (None, None))
        if event is None or handle is None or not self._listed(event):
            return self._violated(f"{type(message).__name__} while it was {self.state.value}")
        return handle(self, message)

    def _hello(self, message: says.Hello) -> list[Effect]:
        self._move(Event.HELLO)
        self.pid = message.pid
        self.phase = self.state.value
        return [Send(self._configure)]

    def _ready(self, message: says.Ready) -> list[Effect]:
        if message.epoch != self.epoch:
            return self._violated(f"Ready for epoch {message.epoch}")
        self._move(Event.READY)
        self.phase = self.state.value
        return [Configured(None)]

    def _at_phase(self, message: says.Phase) -> list[Effect]:
        self._move(Event.PHASE)
        self.phase = message.text
        return []

    def _reply(self, message: says.Done | says.OpFailed | says.Unsupported) -> list[Effect]:
        op_id = message.op_id
        if not 0 <= op_id < self._next_id:
            return self._violated(f"{type(message).__name__} for op {op_id}, and {self._next_id} were submitted")
        name = self._pending.get(op_id)
        if isinstance(message, says.OpFailed) and message.broken:
            # even if nobody waits for this op any more, the others will not come
            return self._failed(Event.BREAK, f"{name or 'an op that had settled'} (op {op_id})", message)
        if name is None:
            return self._late()
        del self._pending[op_id]
        if isinstance(message, says.Done):
            return [Settle(op_id, None, message.source)]
        where = f"{name} (op {op_id}) in {self._child()}"
        if isinstance(message, says.Unsupported):
            backend = self._configure.backend
            return [Settle(op_id, UnsupportedOp(f"{where}: {message.text}", backend=backend, op=name))]
        return [Settle(op_id, RemoteFailure(_joined(f"{where}: {_raised(message)}", _traceback(message))))]

    def _dropped(self, message: says.Dropped) -> list[Effect]:
        return [Released(message.number)]

    def _configure_failed(self, message: says.ConfigureFailed) -> list[Effect]:
        return self._failed(Event.CONFIGURE_FAILED, "configure", message)

    def _child_failed(self, message: says.Broken) -> list[Effect]:
        return self._failed(Event.BREAK, "the child's loop", message)

    def _failed(self, event: Event, what: str, message: _Raised) -> list[Effect]:
        text = f"{what} failed in {self._child()}: {_raised(message)}; {self._circumstances()}"
        return self._end(event, RemoteFailure(text), None, _traceback(message))

    def _violated(self, what: str) -> list[Effect]:
        error = ProtocolError(f"{self._child()} said what the protocol does not allow: {what}; {self._circumstances()}")
        return self._end(Event.BREAK, error)

    # --- the end ---------------------------------------------------------------------------------------

    def _end(
        self, event: Event, ended: FtliteError, cause: BaseException | None = None, detail: str = ""
    ) -> list[Effect]:
        """Fail everything that is pending, for ``ended``, whose own cause is ``cause``. Once in a link's life."""
        waiting = self.state in (State.STARTING, State.CONFIGURING)
        self._short = _joined(str(ended), detail[-TAIL_CHARS:])
        self._ended = _copy(ended, _joined(str(ended), detail))
        self._ended.__cause__ = cause
        effects: list[Effect] = [Kill(str(ended))]
        if waiting:
            effects.append(Configured(self._fresh(f"configure (epoch {self.epoch})")))
        effects += [Settle(op_id, self._fresh(f"{name} (op {op_id})")) for op_id, name in self._pending.items()]
        # last: with no stack or memory left for the above, it is not over, and somebody will try again
        self._move(event)
        self._pending = {}
        return effects

    def _fresh(self, what: str) -> FtliteError:
        """An error of its own for ``what``, which failed because the link is over."""
        if self._ended is None:
            raise StateError(f"the link of epoch {self.epoch} is not over", state=self.state.value)
        fresh = _copy(self._ended, f"{what}: {self._short}")
        fresh.__cause__ = self._ended
        return fresh

    def _listed(self, event: Event) -> bool:
        return (self.state, event) in TRANSITIONS

    def _move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _late(self) -> list[Effect]:
        self.dropped += 1
        return []

    def _child(self) -> str:
        """The child, in words."""
        pid = "" if self.pid is None else f", pid {self.pid}"
        return f"the {self._configure.backend} child (epoch {self.epoch}{pid})"

    def _circumstances(self) -> str:
        """What went on when it happened, in words."""
        return f"phase: {self.phase}, last op: {self.last_op or 'none'}, pending: {len(self._pending)}"


# who answers to which message of the child's, and as which event
_CHILD: dict[type[Any], tuple[Event, Callable[[Link, Any], list[Effect]]]] = {
    says.Hello: (Event.HELLO, Link._hello),
    says.Ready: (Event.READY, Link._ready),
    says.ConfigureFailed: (Event.CONFIGURE_FAILED, Link._configure_failed),
    says.Phase: (Event.PHASE, Link._at_phase),
    says.Done: (Event.REPLY, Link._reply),
    says.OpFailed: (Event.REPLY, Link._reply),
    says.Unsupported: (Event.REPLY, Link._reply),
    says.Broken: (Event.BREAK, Link._child_failed),
    says.Dropped: (Event.REPLY, Link._dropped),
}


def _known(cause: BaseException) -> FtliteError | None:
    """``cause``, or the nearest of its own causes, that is an error of this package."""
    seen: set[int] = set()
    one: BaseException | None = cause
    while one is not None and id(one) not in seen:  # somebody else may have tied a knot
        if isinstance(one, FtliteError):
            return one
        seen.add(id(one))
        one = one.__cause__
    return None


def _copy(error: FtliteError, text: str) -> FtliteError:
    """Another of the class and with the data of ``error``, saying ``text``."""
    another = copy.copy(error)
    another.args = (text,)
    return another


def _joined(text: str, detail: str) -> str:
    return f"{text}\n{detail}" if detail else text


def _raised(message: _Raised) -> str:
    return f"{message.type}: {message.text}"


def _traceback(message: _Raised) -> str:
    return f"in the child:\n{message.traceback}" if message.traceback else ""
