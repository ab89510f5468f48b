# SPDX-License-Identifier: BSD-3-Clause
"""Clients of the store at which the ranks of a group meet.

A client is one connection with one lock: a wait in one thread keeps every other thread of that client waiting, so
each ``configure()`` makes its own and drops it with the group.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .._deadline import Deadline, Timeout, seconds
from .._errors import StateError
from .._net import split_store_address

__all__ = ["create_store_client"]

# torch takes whole milliseconds and 0 for "for ever" or "at once", by version; one connection to a live store
# in the same network takes less than this.
_SHORTEST_S = 0.1


def create_store_client(store_addr: str, timeout: Timeout) -> Store:
    """Connect to the TCPStore at ``store_addr`` and return a view of it below the address's prefix.

    Args:
        store_addr: ``host:port/prefix``, an IPv6 host in brackets or not; the prefix may hold more slashes.
        timeout: for the connection, and afterwards for each operation of the client; a timedelta or seconds.

    Raises:
        ValueError: ``store_addr`` has another form.
        DeadlineExceeded: nobody answered there in time.
        StateError: whoever answered is no store.
    """
    host, port, prefix = split_store_address(store_addr)
    deadline = Deadline(seconds(timeout))
    limit = timedelta(seconds=max(_SHORTEST_S, deadline.limit_s))
    try:
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (RuntimeError, ValueError) as error:
        what = f"connecting to the store at {host}:{port}"
        if deadline.remaining_s() < 0.05 * deadline.limit_s or "timed out" in str(error).lower():
            raise deadline.exceeded(what, "check that it runs and that this machine can reach it") from error
        raise StateError(f"{what} failed: {error}", state="unconnected", attempted="connect") from error
    return PrefixStore(prefix, client)
