# SPDX-License-Identifier: BSD-3-Clause
"""HTTPTransport passes the contract, whatever num_chunks says; what it offers beyond it."""

from __future__ import annotations

from typing import Any

from tests import load
from tests._support import GuardedTestCase
from tests.checkpointing._contract import TransportContract

HTTPTransport = load("checkpointing").HTTPTransport


class _OverHTTP(TransportContract, GuardedTestCase):
    num_chunks: int | None = None

    def make_pair(self, **options: Any) -> tuple[Any, Any]:
        own = options.pop("state_dict", None)
        donor = HTTPTransport(host="127.0.0.1", num_chunks=self.num_chunks, **options)
        return donor, HTTPTransport(host="127.0.0.1", num_chunks=self.num_chunks, state_dict=own, **options)


class ByDefault(_OverHTTP):
    pass


class InThreeChunks(_OverHTTP):
    num_chunks = 3


class AsOneStream(_OverHTTP):
    num_chunks = 0


del _OverHTTP, TransportContract
