# SPDX-License-Identifier: BSD-3-Clause
"""What a donor and a receiver say to each other over a process group, and how a state is cut into messages.

Pure: bytes and numbers. A *control* message has one length for ever, since Gloo ends a process that receives more than
it has asked for; what it says may change with the version. The order of a session, which the donor numbers::

    donor                                   receiver
    OFFER  step, bytes, or a refusal   ->
                                       <-   REPLY  taken, or a refusal (another step, no room)
    GO, and the document               ->
                                       <-   REPLY  taken, or a refusal (a layout that does not fit)
    the messages of the state          ->
    END, and their checksums           ->
                                       <-   REPLY  all of it is right, or what is not

Whoever hears of a session that it has given up does not take it for the present one: the number tells.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from .._errors import IncompleteTransfer, IntegrityError, LayoutError, NotServing, TransferError
from ._layout import FlatSpace

# Raised whenever what follows the head of a control message, or the order of messages, changes.
VERSION = 1
# The head, and room for a reason of some lines. Never to be changed: see above.
CONTROL_BYTES = 2048
# Where each side's control messages go; any numbers that nobody else uses, below 2**31.
DONOR_TAG, RECEIVER_TAG = 0x5EA1_0001, 0x5EA1_0002
# The messages of one session have a tag of their own, or those of one that was given up would be taken for them.
_DATA_TAG, _SESSIONS = 0x6000_0000, 1 << 28

# Large enough that what a message costs (a thread's turn, the pipe to a child) is little beside its bytes, small enough
# that those on their way fit a processor's cache and 32 MB. 0.5 GB over Gloo of this process: 0.51 s in messages of
# 1 MB, 0.25 of 4 and of 8, 0.37 of 64; over Gloo in a child 0.7 or more, 0.4, 0.4 and 0.4 (2 cores, loopback).
MESSAGE_BYTES = 8 << 20
# From here on a region goes straight from its memory to its place, as a message of its own; below, a copy on either
# side costs less than one more message.
STRAIGHT_BYTES = 1 << 20
_PAGE = 4096

_MAGIC = b"heal\r\n\x1a\n"
_HEAD = struct.Struct("<8sIHH")  # magic, crc32 of all that follows, version, kind
_BODY = struct.Struct("<QqQQIHH")  # session, step, bytes, bytes and checksum of what follows, code, bytes of text
_TEXT_BYTES = CONTROL_BYTES - _HEAD.size - _BODY.size


class Kind(enum.IntEnum):
    """What a control message is."""

    OFFER = 1
    REPLY = 2
    GO = 3
    END = 4


# What a refusal is at the other side; 0 is none. The last one stands for every other error.
_ERRORS: tuple[type[TransferError] | None, ...] = (
    None, NotServing, LayoutError, IntegrityError, IncompleteTransfer, TransferError,
)  # fmt: skip


class Control(NamedTuple):
    """One control message.

    ``more_bytes`` and ``more_sum`` are of the document or the checksums that follow. ``code`` 0 means yes; another
    one names the error that ``text`` is the reason of.
    """

    kind: Kind
    session: int
    step: int = 0
    total: int = 0
    more_bytes: int = 0
    more_sum: int = 0
    code: int = 0
    text: str = ""


def code_of(error: BaseException) -> int:
    """The code of a refusal because of ``error``."""
    return next((code for code, kind in enumerate(_ERRORS) if kind is type(error)), len(_ERRORS) - 1)


def error_of(code: int) -> type[TransferError]:
    """The error that ``code``, which is not 0, stands for."""
    return (_ERRORS[code] if 0 < code < len(_ERRORS) else None) or TransferError


def data_tag(session: int) -> int:
    """The tag of the messages of ``session``."""
    return _DATA_TAG + session % _SESSIONS


def pack(control: Control) -> bytes:
    """The ``CONTROL_BYTES`` bytes of ``control``; a text that is too long loses its end."""
    text = control.text.encode("utf-8", "replace")[:_TEXT_BYTES]
    kind, session, step, total, more_bytes, more_sum, code, _ = control
    body = _BODY.pack(session, step, total, more_bytes, more_sum, code, len(text)) + text
    rest = struct.pack("<HH", VERSION, kind) + body.ljust(CONTROL_BYTES - _HEAD.size, b"\0")
    return struct.pack("<8sI", _MAGIC, zlib.crc32(rest)) + rest


def unpack(data: bytes) -> Control:
    """Read what ``pack`` wrote.

    Raises:
        IntegrityError: it is damaged, or of somebody else.
        NotServing: it is of another version.
    """
    magic, crc, version, kind = _HEAD.unpack_from(data)
    if len(data) != CONTROL_BYTES or magic != _MAGIC:
        raise IntegrityError(
            f"what came over the group ({data[:8].hex()}...) is no message of this transport; both sides need it, and "
            "a group that has not been left in the middle of something: configure() it again"
        )
    if crc != zlib.crc32(data[12:]):
        raise IntegrityError(
            f"a control message of {len(data)} bytes arrived damaged; nothing was written by it: configure() the group "
            "and heal again"
        )
    if version != VERSION:
        raise NotServing(
            f"the other side speaks version {version} of this protocol, this one {VERSION}: run the same on both"
        )
    session, step, total, more_bytes, more_sum, code, length = _BODY.unpack_from(data, _HEAD.size)
    start = _HEAD.size + _BODY.size
    if kind not in Kind.__members__.values() or length > _TEXT_BYTES:
        raise IntegrityError(f"a control message of kind {kind} with {length} bytes of text is none of ours")
    text = data[start : start + length].decode("utf-8", "replace")
    return Control(Kind(kind), session, step, total, more_bytes, more_sum, code, text)


def cut_messages(flat: FlatSpace, is_straight: bool = True) -> list[int]:
    """The ends of the messages of a state: few, of at most ``MESSAGE_BYTES``, with large extents apart from the others.

    An extent of ``STRAIGHT_BYTES`` and more has messages of its own, the smaller ones beside each other share one.
    Where none goes straight (``is_straight``), all are of the same size.
    """
    if not is_straight:
        return [*range(MESSAGE_BYTES, flat.total, MESSAGE_BYTES), flat.total] if flat.total else []
    ends: list[int] = []
    begun = at = 0
    for size in flat.extents:
        if size < STRAIGHT_BYTES:
            if at + size - begun > MESSAGE_BYTES:
                ends.append(at)
                begun = at
            at += size
            continue
        if at > begun:
            ends.append(at)
        count = -(-size // MESSAGE_BYTES)
        step = -(-size // count // _PAGE) * _PAGE if count > 1 else size
        ends += [at + step * i for i in range(1, count)]
        at += size
        ends.append(at)
        begun = at
    if at > begun:
        ends.append(at)
    return ends


def largest_of(ends: Sequence[int]) -> int:
    """The bytes of the largest of the messages with these ``ends``; 0 where there are none."""
    return max((end - start for start, end in zip([0, *ends], ends)), default=0)


def pack_sums(sums: Sequence[int]) -> bytes:
    """The table of checksums that follows END."""
    return struct.pack(f"<{len(sums)}I", *sums)


def unpack_sums(data: bytes) -> list[int]:
    """Read what ``pack_sums`` wrote."""
    return list(struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4]))
