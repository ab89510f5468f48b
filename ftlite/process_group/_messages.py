# SPDX-License-Identifier: BSD-3-Clause
"""What the trainer and a child say to each other: typed here, frames of builtins on the pipe.

- A message is a frozen dataclass on either side only. What crosses is ``(number, *fields)``, where the number
  is the place in ``MESSAGES``: both sides run the same files, and a class that crossed by its name would have
  the child import the package that a copy of this one lies in, with whatever that import does.
- A frame is read by an unpickler that knows no class, and every field is checked before a message is made of
  it. What does not fit is a ProtocolError that names the message and the field; nothing of it has run.
  That is against mistakes and damage. The child is one of ours: a frame made to use up memory could.
- Pure: no I/O, no state; any thread may call ``encode`` and ``decode``.

What a tensor looks like in ``Run.args``: ``("t", segment, offset, dtype code, shape)``, where it lies in the
arena; on a device ``("d", memory, offset, dtype code, shape)``, with memory 0 for an empty one and the device's index
in the place of the offset. Other values there are integers, and tuples of both.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias

from .._errors import ProtocolError
from ._fields import CHECKS, INT_LIMIT

__all__ = [
    "MESSAGES",
    "Broken",
    "Bye",
    "Configure",
    "ConfigureFailed",
    "DeviceEvents",
    "DeviceMemory",
    "Done",
    "DropMemory",
    "DropSegment",
    "Dropped",
    "Hello",
    "Message",
    "OpFailed",
    "Phase",
    "Ready",
    "Run",
    "RunOnDevice",
    "Segment",
    "Unsupported",
    "as_tuples",
    "decode",
    "encode",
]

# --- trainer to child ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configure:
    """Make the backend and meet the other ranks; answered by Ready or ConfigureFailed."""

    epoch: int
    backend: str
    store_addr: str
    rank: int
    world_size: int
    timeout_s: float
    global_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Start the collective number ``op``; once ``after`` (an op id, -1: none) is done. Answered when it is done."""

    op_id: int
    op: int
    args: tuple[Any, ...]
    options: tuple[Any, ...]
    timeout_s: float
    after: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of ``nbytes`` that later messages call ``number``; its descriptor follows."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DropSegment:
    """The memory ``number`` is not used any more."""

    number: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of ``nbytes`` on a device that later messages call ``number``; what torch opens it by."""

    number: int
    kind: str
    index: int
    handle: bytes
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class DropMemory:
    """The device memory ``number`` is not used any more; answered by Dropped."""

    number: int


@dataclass(frozen=True, slots=True)
class DeviceEvents:
    """Two events on a device that later messages call ``number``; what torch opens them by."""

    number: int
    kind: str
    index: int
    ready: bytes
    done: bytes


@dataclass(frozen=True, slots=True)
class RunOnDevice:
    """As Run, once the first of the events ``pair`` has fired; answered when it is queued, the second one behind it."""

    op_id: int
    op: int
    args: tuple[Any, ...]
    options: tuple[Any, ...]
    timeout_s: float
    pair: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The last message: end."""


# --- child to trainer ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: the child's loop runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The backend of ``epoch`` is up."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ConfigureFailed:
    """The backend did not come up; what was raised, as text."""

    type: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Done:
    """The op is done and its results lie in the memory that it named."""

    op_id: int


@dataclass(frozen=True, slots=True)
class OpFailed:
    """The op raised, as text; ``broken``: and nothing else of this backend will work."""

    op_id: int
    type: str
    text: str
    traceback: str
    broken: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """The child cannot go on, whatever it was doing; what was raised, as text."""

    type: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The backend cannot do this op, and said so before it began."""

    op_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The device memory ``number`` is not open here any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What the child is at now, for the text of an error."""

    text: str


Message: TypeAlias = (
    Configure
    | Run
    | Segment
    | DropSegment
    | Bye
    | Hello
    | Ready
    | ConfigureFailed
    | Done
    | OpFailed
    | Broken
    | Unsupported
    | Phase
    | DeviceMemory
    | DropMemory
    | DeviceEvents
    | RunOnDevice
    | Dropped
)

# --- the table -----------------------------------------------------------------------------------------

MESSAGES: tuple[type[Message], ...] = (
    Configure,
    Run,
    Segment,
    DropSegment,
    Bye,
    Hello,
    Ready,
    ConfigureFailed,
    Done,
    OpFailed,
    Broken,
    Unsupported,
    Phase,
    DeviceMemory,
    DropMemory,
    DeviceEvents,
    RunOnDevice,
    Dropped,
)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a message to its fields as a tuple; attrgetter makes one of two names or more only."""
    if not names:
        return lambda message: ()
    if len(names) == 1:
        one = attrgetter(names[0])
        return lambda message: (one(message),)
    return attrgetter(*names)


_NAMES = tuple(tuple(field.name for field in fields(message)) for message in MESSAGES)
_FIELDS = {
    message: (number, _getter(names)) for number, (message, names) in enumerate(zip(MESSAGES, _NAMES, strict=True))
}
_RULES = tuple(tuple(CHECKS[name] for name in names) for names in _NAMES)


def as_tuples(value: Any) -> Any:
    """Lists as tuples, all the way down: what a message holds."""
    return tuple(as_tuples(each) for each in value) if isinstance(value, list) else value


class _Builtins(pickle.Unpickler):
    """Reads numbers, text and tuples; whatever else is named is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module[:100]}.{name[:100]}, and only builtins cross the pipe")


def encode(message: Message) -> bytes:
    """The frame that says ``message``. Its fields are trusted here: the other side checks them."""
    number, get = _FIELDS[type(message)]
    return pickle.dumps((number, *get(message)), 5)


def decode(data: bytes) -> Message:
    """The message that the frame ``data`` says.

    Raises:
        ProtocolError: it says none, or one with a field that does not fit.
    """
    stream = io.BytesIO(data)
    try:
        frame = _Builtins(stream).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ProtocolError(f"a frame of {len(data)} bytes cannot be read: {type(error).__name__}: {error}") from error
    if stream.tell() != len(data):
        raise ProtocolError(f"a frame of {len(data)} bytes ends after {stream.tell()}")
    if type(frame) is not tuple or not frame or type(frame[0]) is not int or not 0 <= frame[0] < len(MESSAGES):
        raise ProtocolError(f"a frame of {len(data)} bytes begins with no message's number (0 to {len(MESSAGES) - 1})")
    number, *values = frame
    message, rules = MESSAGES[number], _RULES[number]
    if len(values) != len(rules):
        raise ProtocolError(f"{message.__name__} came with {len(values)} fields and has {len(rules)}")
    for place, rule in enumerate(rules):
        if not rule(values[place]):
            raise _misfit(message, _NAMES[number][place], values[place])
    return message(*values)


def _misfit(message: type[Message], name: str, value: object) -> ProtocolError:
    # a scalar is shown, as far as it is short; the repr of what is nested could be as deep as an attacker likes
    short = type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < INT_LIMIT << 1)
    shown = f" ({value!r})" if short else ""
    return ProtocolError(f"{message.__name__}.{name} is a {type(value).__name__}{shown} that does not fit there")
