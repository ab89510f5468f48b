# SPDX-License-Identifier: BSD-3-Clause
"""Moving a live state from a healthy replica to one that is behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import open_door

if TYPE_CHECKING:
    from ._http_transport import HTTPTransport
    from ._pg_transport import PGTransport
    from ._rwlock import RWLock
    from ._transport import CheckpointTransport

__all__ = ["CheckpointTransport", "HTTPTransport", "PGTransport", "RWLock"]

__getattr__, __dir__ = open_door(
    __name__,
    {
        "CheckpointTransport": "._transport",
        "HTTPTransport": "._http_transport",
        "PGTransport": "._pg_transport",
        "RWLock": "._rwlock",
    },
)
