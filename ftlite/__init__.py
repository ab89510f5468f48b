# SPDX-License-Identifier: BSD-3-Clause
"""Fault tolerance for PyTorch training in one folder of pure Python.

This is the door: it lists the public names. What needs torch is imported at its first use, so importing
the package starts nothing and loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import (
    ChildDied,
    ChildError,
    ChildStartFailed,
    DeadlineExceeded,
    FtliteError,
    IncompleteTransfer,
    IntegrityError,
    LayoutError,
    NotServing,
    ProtocolError,
    QuorumError,
    RemoteFailure,
    StateError,
    TransferError,
    UnsupportedOp,
)
from ._lazy import open_door

if TYPE_CHECKING:
    from . import checkpointing
    from .checkpointing import CheckpointTransport, HTTPTransport, RWLock

__version__ = "0.1.0"

__all__ = [
    "CheckpointTransport",
    "ChildDied",
    "ChildError",
    "ChildStartFailed",
    "DeadlineExceeded",
    "FtliteError",
    "HTTPTransport",
    "IncompleteTransfer",
    "IntegrityError",
    "LayoutError",
    "NotServing",
    "ProtocolError",
    "QuorumError",
    "RWLock",
    "RemoteFailure",
    "StateError",
    "TransferError",
    "UnsupportedOp",
    "__version__",
    "checkpointing",
]

__getattr__, __dir__ = open_door(
    __name__,
    {
        "CheckpointTransport": ".checkpointing",
        "HTTPTransport": ".checkpointing",
        "RWLock": ".checkpointing",
        "checkpointing": ".checkpointing",
    },
)
