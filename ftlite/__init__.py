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
    from . import checkpointing, process_group
    from .checkpointing import CheckpointTransport, HTTPTransport, PGTransport, RWLock
    from .process_group import (
        ErrorSwallowingProcessGroupWrapper,
        FakeProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupBabyGloo,
        ProcessGroupBabyNCCL,
        ProcessGroupBabyXCCL,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupWrapper,
        create_store_client,
        register_backend,
    )

__version__ = "0.1.0"

__all__ = [
    "CheckpointTransport",
    "ChildDied",
    "ChildError",
    "ChildStartFailed",
    "DeadlineExceeded",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "FtliteError",
    "HTTPTransport",
    "IncompleteTransfer",
    "IntegrityError",
    "LayoutError",
    "ManagedProcessGroup",
    "NotServing",
    "PGTransport",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProtocolError",
    "QuorumError",
    "RWLock",
    "RemoteFailure",
    "StateError",
    "TransferError",
    "UnsupportedOp",
    "__version__",
    "checkpointing",
    "create_store_client",
    "process_group",
    "register_backend",
]

__getattr__, __dir__ = open_door(
    __name__,
    {
        "CheckpointTransport": ".checkpointing",
        "ErrorSwallowingProcessGroupWrapper": ".process_group",
        "FakeProcessGroupWrapper": ".process_group",
        "HTTPTransport": ".checkpointing",
        "ManagedProcessGroup": ".process_group",
        "PGTransport": ".checkpointing",
        "ProcessGroup": ".process_group",
        "ProcessGroupBabyGloo": ".process_group",
        "ProcessGroupBabyNCCL": ".process_group",
        "ProcessGroupBabyXCCL": ".process_group",
        "ProcessGroupDummy": ".process_group",
        "ProcessGroupGloo": ".process_group",
        "ProcessGroupNCCL": ".process_group",
        "ProcessGroupWrapper": ".process_group",
        "RWLock": ".checkpointing",
        "checkpointing": ".checkpointing",
        "create_store_client": ".process_group",
        "process_group": ".process_group",
        "register_backend": ".process_group",
    },
)
