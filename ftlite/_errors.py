# SPDX-License-Identifier: BSD-3-Clause
"""The error tree of the package, split by who is to blame.

Rules of this file: an error keeps its data in attributes and derives its text from a message given at
the raise; every one survives pickling, whatever arguments its constructor takes; nothing here imports
from the rest of the package.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ChildDied",
    "ChildError",
    "ChildStartFailed",
    "DeadlineExceeded",
    "FtliteError",
    "IncompleteTransfer",
    "IntegrityError",
    "LayoutError",
    "NotServing",
    "ProtocolError",
    "QuorumError",
    "RemoteFailure",
    "StateError",
    "TransferError",
    "UnsupportedOp",
]


def _rebuild(cls: type[FtliteError], text: str, data: dict[str, Any]) -> FtliteError:
    """Make an error again from its text and attributes, past its constructor."""
    error = cls.__new__(cls, text)
    error.args = (text,)
    error.__dict__.update(data)
    return error


def _number(value: float) -> str:
    """Three digits for a reader, and 1800 as 1800, not as 1.8e+03."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class FtliteError(Exception):
    """Base of every error that this package raises by itself, bad arguments (ValueError, TypeError) aside."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class StateError(FtliteError):
    """A call came in a state that does not allow it. ``state`` is the present one, ``attempted`` the call."""

    def __init__(self, message: str, *, state: str = "", attempted: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.attempted = attempted


class DeadlineExceeded(FtliteError, TimeoutError):
    """A wait ended at its limit. ``what`` was waited for, ``limit_s`` allowed, ``elapsed_s`` spent (seconds)."""

    def __init__(self, what: str, *, limit_s: float, elapsed_s: float, hint: str = "") -> None:
        text = f"{what}: gave up after {_number(elapsed_s)} s (limit {_number(limit_s)} s)"
        super().__init__(f"{text}; {hint}" if hint else text)
        self.what = what
        self.limit_s = limit_s
        self.elapsed_s = elapsed_s


class UnsupportedOp(FtliteError, NotImplementedError):
    """The backend ``backend`` cannot do ``op``."""

    def __init__(self, message: str, *, backend: str = "", op: str = "") -> None:
        super().__init__(message)
        self.backend = backend
        self.op = op


class ChildError(FtliteError, RuntimeError):
    """Something went wrong in, or on the way to, a child process."""


class ChildStartFailed(ChildError):
    """The child did not come up."""


class ChildDied(ChildError):
    """The child ended while it was needed."""


class RemoteFailure(ChildError):
    """An operation raised in the child; the remote traceback crosses as text."""


class ProtocolError(ChildError):
    """The other end of the pipe said what the protocol does not allow."""


class TransferError(FtliteError, OSError):
    """A state could not be moved between two replicas.

    ``bytes_done`` and ``bytes_total`` say how far it got (0 where nothing was asked for yet).
    ``destination_dirty`` is true when tensors of the receiver were written to and are now undefined;
    ``keys`` names some of them.
    """

    def __init__(
        self,
        message: str,
        *,
        bytes_done: int = 0,
        bytes_total: int = 0,
        destination_dirty: bool = False,
        keys: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.bytes_done = bytes_done
        self.bytes_total = bytes_total
        self.destination_dirty = destination_dirty
        self.keys = tuple(keys or ())


class NotServing(TransferError):
    """The donor answers, and has not what was asked for: another step, no state, or not this address."""


class IncompleteTransfer(TransferError):
    """The bytes stopped before the end: a donor that left, a broken connection, a short body."""


class IntegrityError(TransferError):
    """Bytes arrived that are not those the donor announced."""


class LayoutError(TransferError):
    """The donor's state does not fit: the receiver's tensors, what may be carried, or the memory at hand."""


class QuorumError(FtliteError):
    """The members could not agree."""
