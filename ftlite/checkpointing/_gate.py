# SPDX-License-Identifier: BSD-3-Clause
"""Who may read the state, and when: the serving gate.

``Gate`` is the decision alone, without threads or clocks: its states, and its transitions as a table.
``ServingGate`` is its one shell, with the lock, the waits and the sockets to cut.

- A *reader* is one receiver, by the id that it sends, with any number of connections; it counts from its
  first request until its last connection closes, so that a transfer of many requests is never interrupted
  between two of them by a gate that looks idle.
- While draining, a reader that is in may go on; nobody new comes in.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .._deadline import Deadline
from .._errors import StateError

S = TypeVar("S")


class State(enum.Enum):
    """Where the gate stands."""

    CLOSED = "closed"
    STAGING = "staging"
    SERVING = "serving"
    DRAINING = "draining"


class Event(enum.Enum):
    """What can happen to it."""

    STAGE = "stage"  # a new state is being prepared
    PUBLISH = "publish"  # it is ready
    REFUSE = "refuse"  # it will not be: the reason is kept for those who ask
    ALLOW = "allow"  # open again for what was published
    DRAIN = "drain"  # let those who are in finish, and nobody else come in
    CLOSE = "close"  # nobody is in any more


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.STAGE): State.STAGING,
    (State.CLOSED, Event.ALLOW): State.SERVING,
    (State.CLOSED, Event.DRAIN): State.DRAINING,
    (State.CLOSED, Event.CLOSE): State.CLOSED,
    (State.STAGING, Event.PUBLISH): State.SERVING,
    (State.STAGING, Event.REFUSE): State.CLOSED,
    (State.SERVING, Event.ALLOW): State.SERVING,
    (State.SERVING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.CLOSE): State.CLOSED,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
}


class Answer(enum.Enum):
    """What a request is told."""

    ENTER = "enter"
    WAIT = "wait"  # not now; ask again
    NEVER = "never"  # this step will not come


@dataclass
class Gate:
    """The decision. ``step`` is the one that is (or was, or will be) served; ``refusal`` why it is not."""

    max_readers: int
    state: State = State.CLOSED
    step: int | None = None
    refusal: str = ""
    readers: dict[str, set[int]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Move along the table.

        Raises:
            StateError: the table has no such transition.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise StateError(
                f"the serving gate is {self.state.value} and cannot {event.value}",
                state=self.state.value,
                attempted=event.value,
            )
        self.state = following

    def ask(self, step: int, reader: str) -> Answer:
        """What a request of ``reader`` for ``step`` is told."""
        if self.state in (State.SERVING, State.DRAINING) and step == self.step:
            if reader in self.readers:
                return Answer.ENTER
            if self.state is State.DRAINING or len(self.readers) >= self.max_readers:
                return Answer.WAIT
            return Answer.ENTER
        if self.state is State.SERVING or (self.refusal and step == self.step):
            return Answer.NEVER
        return Answer.WAIT

    def enter(self, reader: str, connection: int) -> None:
        """Count ``connection`` as one of ``reader``'s; again is a no-op."""
        self.readers.setdefault(reader, set()).add(connection)

    def leave(self, connection: int) -> None:
        """A connection has closed; again is a no-op."""
        for reader, connections in list(self.readers.items()):
            connections.discard(connection)
            if not connections:
                del self.readers[reader]


class ServingGate(Generic[S]):
    """The gate with its lock; ``S`` is what is served. All methods may be called from any thread."""

    def __init__(self, max_readers: int) -> None:
        self._gate = Gate(max_readers)
        self._changed = threading.Condition()
        self._served: S | None = None
        self._cuts: dict[int, Callable[[], None]] = {}
        self._closings = 0

    def stage(self, step: int) -> None:
        """A state of ``step`` is being prepared; readers who ask wait for it."""
        with self._changed:
            self._gate.apply(Event.STAGE)
            self._gate.step, self._gate.refusal, self._served = step, "", None

    def publish(self, served: S) -> None:
        """Open for ``served``."""
        with self._changed:
            self._gate.apply(Event.PUBLISH)
            self._served = served
            self._changed.notify_all()

    def refuse(self, reason: str) -> None:
        """The state that was being prepared will not come; those who ask for it are told ``reason``."""
        with self._changed:
            self._gate.apply(Event.REFUSE)
            self._gate.refusal = reason
            self._changed.notify_all()

    def allow(self, step: int) -> None:
        """Open again for the state of ``step`` that was published before.

        Raises:
            StateError: there is none.
        """
        with self._changed:
            if self._served is None or self._gate.step != step:
                has = "nothing" if self._served is None else f"step {self._gate.step}"
                raise StateError(
                    f"allow_checkpoint({step}): {has} was published; call send_checkpoint with that step first",
                    state=self._gate.state.value,
                    attempted="allow",
                )
            self._gate.apply(Event.ALLOW)
            self._changed.notify_all()

    def close(self, deadline: Deadline) -> int:
        """Let nobody new in, wait for those who are, cut off who is left at the deadline; how many that were."""
        with self._changed:
            if self._gate.state is State.STAGING:
                return 0  # whoever stages is on the thread that will publish or refuse
            self._gate.apply(Event.DRAIN)
            self._changed.notify_all()
            number = self._closings
            self._changed.wait_for(lambda: not self._gate.readers or self._closings != number, deadline.remaining_s())
            if self._closings != number:
                return 0  # another thread has closed it meanwhile, and who is in now reads what it published since
            late = len(self._gate.readers)
            for cut in list(self._cuts.values()):
                with contextlib.suppress(OSError):  # a connection that is gone already
                    cut()
            self._cuts.clear()
            self._gate.readers.clear()
            self._gate.apply(Event.CLOSE)
            self._closings += 1
            self._changed.notify_all()
            return late

    def drop(self) -> None:
        """Forget what was served, so that its memory can go."""
        with self._changed:
            self._served = None

    def enter(
        self, step: int, reader: str, connection: int, cut: Callable[[], None], wait_s: float
    ) -> tuple[S | None, Answer, str]:
        """Ask for ``step``, waiting up to ``wait_s`` seconds for a gate that may open.

        Returns what is served, or None; the answer; and why it is not "enter". ``cut`` must end the connection at
        once, from any thread; ``leave`` must follow.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._gate.ask(step, reader) is not Answer.WAIT, wait_s)
            answer = self._gate.ask(step, reader)
            if answer is Answer.ENTER:
                self._gate.enter(reader, connection)
                self._cuts[connection] = cut
                return self._served, answer, ""
            return None, answer, self._reason(step, answer)

    def leave(self, connection: int) -> None:
        """The connection is closed."""
        with self._changed:
            self._gate.leave(connection)
            self._cuts.pop(connection, None)
            self._changed.notify_all()

    def _reason(self, step: int, answer: Answer) -> str:
        gate = self._gate
        if answer is Answer.NEVER:
            return gate.refusal or f"step {gate.step} is served here, not step {step}"
        if len(gate.readers) >= gate.max_readers:
            return f"{gate.max_readers} readers (max_readers) are being served"
        return f"the donor is {gate.state.value}"
