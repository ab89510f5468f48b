# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of one donor and its server share."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tests import load
from tests._support import SCALE, WAIT_S, GuardedTestCase
from tests.checkpointing import _wire

HTTPTransport = load("checkpointing").HTTPTransport
errors = load("_errors")
server = load("checkpointing._server")

STEP = 4


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def serving_threads() -> int:
    return sum(thread.name.startswith("heal-serve") for thread in threading.enumerate())


class ServerTestCase(_wire.OneThread, GuardedTestCase):
    def transport(self, **options: Any) -> Any:
        made = HTTPTransport(**{"timeout": 20 * SCALE, "host": "127.0.0.1", **options})
        self.addCleanup(made.shutdown)
        return made

    def donor(self, state: Any, **options: Any) -> Any:
        made = self.transport(**options)
        made.send_checkpoint([], STEP, state)
        return made

    def heals(self, donor: Any, state: Any, **options: Any) -> None:
        moved = self.transport(**options).recv_checkpoint(0, donor.metadata(), STEP)
        for key, tensor in state.items():
            self.assertTrue(torch.equal(tensor, moved[key]), key)

    @contextlib.contextmanager
    def connection(self, donor: Any) -> Iterator[socket.socket]:
        with socket.create_connection(_wire.address(donor.metadata()), WAIT_S) as sock:
            yield sock

    def raw(self, donor: Any, request: bytes) -> bytes:
        """All that the server answers until it closes the connection."""
        answer = b""
        with self.connection(donor) as sock, contextlib.suppress(OSError):
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                answer += more
        return answer
