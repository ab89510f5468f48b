# SPDX-License-Identifier: BSD-3-Clause
"""What the trainer and a child say to each other: typed here, frames of builtins on the pipe.

- A message is a named tuple on either side only. Both sides run the same files, and a class that crossed by its name
  would have the child import the package that a copy of this one lies in, with whatever that import does. A frame is

      the number        one byte, the place in ``MESSAGES``
      the integers      that the message begins with, eight bytes each, least first
      the other fields  as one pickled tuple; nothing where there are none

- They are read by an unpickler that knows no class, and every field is checked before a message is made of it. What
  does not fit is a ProtocolError that names the message and the field; nothing of it has run. That is against mistakes
  and damage. The child is one of ours: a frame made to use up memory could.
- A step of a training is like the one before: what follows the integers of a ``Run``, which number it, is read and
  checked once, and known from then on.
- No I/O; any thread may call ``encode`` and ``decode``.

What a tensor looks like in ``Run.args``: ``("t", segment, offset, dtype code, shape)``, where it lies in the
arena; on a device ``("d", memory, offset, dtype code, shape)``, with memory 0 for an empty one and the device's index
in the place of the offset. Other values there are integers, and tuples of both.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .._errors import ProtocolError
from ._fields import CHECKS, INT_LIMIT, INTEGERS

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
    "decode",
    "encode",
]

# --- trainer to child ----------------------------------------------------------------------------------


class Configure(NamedTuple):
    """Make the backend and meet the other ranks; answered by Ready or ConfigureFailed."""

    epoch: int
    backend: str
    store_addr: str
    rank: int
    world_size: int
    timeout_s: float
    global_ranks: tuple[int, ...]


class Run(NamedTuple):
    """Start the collective number ``op``; once ``after`` (an op id, -1: none) is done. Answered when it is done."""

    op_id: int
    after: int
    op: int
    timeout_s: float
    args: tuple[Any, ...]
    options: tuple[Any, ...]


class Segment(NamedTuple):
    """Memory of ``nbytes`` that later messages call ``number``; its descriptor follows."""

    number: int
    nbytes: int


class DropSegment(NamedTuple):
    """The memory ``number`` is not used any more."""

    number: int


class DeviceMemory(NamedTuple):
    """Memory of ``nbytes`` on a device that later messages call ``number``; what torch opens it by."""

    number: int
    kind: str
    device: int
    handle: bytes
    nbytes: int
    offset: int


class DropMemory(NamedTuple):
    """The device memory ``number`` is not used any more; answered by Dropped."""

    number: int


class DeviceEvents(NamedTuple):
    """Two events on a device that later messages call ``number``; what torch opens them by."""

    number: int
    kind: str
    device: int
    ready: bytes
    done: bytes


class RunOnDevice(NamedTuple):
    """As Run, once the first of the events ``pair`` has fired; answered when it is queued, the second one behind it."""

    op_id: int
    pair: int
    op: int
    timeout_s: float
    args: tuple[Any, ...]
    options: tuple[Any, ...]


class Bye(NamedTuple):
    """The last message: end."""


# --- child to trainer ----------------------------------------------------------------------------------


class Hello(NamedTuple):
    """The first message: the child's loop runs."""

    pid: int


class Ready(NamedTuple):
    """The backend of ``epoch`` is up."""

    epoch: int


class ConfigureFailed(NamedTuple):
    """The backend did not come up; what was raised, as text."""

    type: str
    text: str
    traceback: str


class Done(NamedTuple):
    """The op is done and its results lie in the memory that it named; they are from ``source`` (-1: no one rank)."""

    op_id: int
    source: int = -1


class OpFailed(NamedTuple):
    """The op raised, as text; ``broken``: and nothing else of this backend will work."""

    op_id: int
    type: str
    text: str
    traceback: str
    broken: bool


class Broken(NamedTuple):
    """The child cannot go on, whatever it was doing; what was raised, as text."""

    type: str
    text: str
    traceback: str


class Unsupported(NamedTuple):
    """The backend cannot do this op, and said so before it began."""

    op_id: int
    text: str


class Dropped(NamedTuple):
    """The device memory ``number`` is not open here any more."""

    number: int


class Phase(NamedTuple):
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


_NUMBERS = {message: number for number, message in enumerate(MESSAGES)}


class _Form(NamedTuple):
    """How a message crosses."""

    head: struct.Struct  # of the number and the integers
    split: int  # so many these are
    rules: tuple[Callable[[object], bool], ...]  # for each field


def _form(message: type[Message]) -> _Form:
    rules = tuple(CHECKS[name] for name in message._fields)
    split = next((place for place, rule in enumerate(rules) if rule not in INTEGERS), len(rules))
    return _Form(struct.Struct(f"<B{split}q"), split, rules)


_FORMS = tuple(map(_form, MESSAGES))
# What is known of the ops of a training step, and of those of the next one: some steps of a model with hundreds of
# parameters. An op on so many tensors that its text is longer takes longer than its text does.
_KNOWN = 1024
_SHORT_BYTES = 1024


class _Builtins(pickle.Unpickler):
    """Reads numbers, text and tuples; whatever else is named is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module[:100]}.{name[:100]}, and only builtins cross the pipe")


def encode(message: Message) -> bytes:
    """The frame that says ``message``. Its fields are trusted here: the other side checks them."""
    number = _NUMBERS[type(message)]
    head, split, rules = _FORMS[number]
    frame = head.pack(number, *message[:split])
    return frame if split == len(rules) else frame + pickle.dumps(message[split:], 5)


def decode(data: bytes) -> Message:
    """The message that the frame ``data`` says.

    Raises:
        ProtocolError: it says none, or one with a field that does not fit.
    """
    number = data[0] if data else len(MESSAGES)
    if number >= len(MESSAGES):
        raise ProtocolError(f"a frame of {len(data)} bytes begins with no message's number (0 to {len(MESSAGES) - 1})")
    message, (head, split, rules) = MESSAGES[number], _FORMS[number]
    if len(data) < head.size:
        raise ProtocolError(f"a frame of {len(data)} bytes is too short for {message.__name__}")
    integers = head.unpack_from(data)[1:]
    for place in range(split):
        if not rules[place](integers[place]):
            raise _misfit(message, message._fields[place], integers[place])
    rest = data[head.size :]
    if split == len(rules) and not rest:
        return message._make(integers)
    return message._make(integers + (_known if len(rest) <= _SHORT_BYTES else _read)(number, rest))


def _read(number: int, rest: bytes) -> tuple[Any, ...]:
    """What follows the integers of the message ``number``, checked."""
    stream = io.BytesIO(rest)
    message, (_, split, rules) = MESSAGES[number], _FORMS[number]
    try:
        values = _Builtins(stream).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        text = f"{message.__name__}, of {len(rest)} bytes after its integers, cannot be read"
        raise ProtocolError(f"{text}: {type(error).__name__}: {error}") from error
    if stream.tell() != len(rest):
        raise ProtocolError(f"{message.__name__}, of {len(rest)} bytes after its integers, ends after {stream.tell()}")
    if type(values) is not tuple or len(values) != len(rules) - split:
        count = len(values) if type(values) is tuple else "no"
        raise ProtocolError(f"{message.__name__} came with {count} fields after its integers, not {len(rules) - split}")
    for place, value in enumerate(values, split):
        if not rules[place](value):
            raise _misfit(message, message._fields[place], value)
    return values


_known = functools.lru_cache(_KNOWN)(_read)


def _misfit(message: type[Message], name: str, value: object) -> ProtocolError:
    # a scalar is shown, as far as it is short; the repr of what is nested could be as deep as an attacker likes
    short = type(value) in (bool, float, type(None)) or (type(value) is int and abs(value) < INT_LIMIT << 1)
    shown = f" ({value!r})" if short else ""
    return ProtocolError(f"{message.__name__}.{name} is a {type(value).__name__}{shown} that does not fit there")
