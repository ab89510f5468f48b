# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of bad bytes share: a state, what a donor answers about it, a receiver that has to fail."""

from __future__ import annotations

from typing import Any

from tests import load
from tests._support import SCALE, GuardedTestCase
from tests.checkpointing import _wire
from tests.checkpointing._transport_states import block, noise
from tests.checkpointing._wire import Recording

HTTPTransport = load("checkpointing").HTTPTransport
checksum = load("checkpointing._checksum")
client = load("checkpointing._client")
errors = load("_errors")

STEP = 4


def small_state() -> dict[str, Any]:
    """Two extents and some small tensors, in three chunks of less than a block."""
    return {"a": block(300_000), "b": [block(280_000, seed=1), noise(5), noise(7)], "n": 3}


def recorded(state: Any, num_chunks: int | None = 3, **options: Any) -> Recording:
    donor = HTTPTransport(timeout=20 * SCALE, num_chunks=num_chunks, host="127.0.0.1", **options)
    try:
        donor.send_checkpoint([], STEP, state)
        return _wire.record(donor.metadata(), STEP)
    finally:
        donor.shutdown()


class FaultTestCase(_wire.OneThread, GuardedTestCase):
    def receiver(self, own: Any = None, **options: Any) -> Any:
        options = {"timeout": 10 * SCALE, "host": "127.0.0.1", **options}
        if own is not None:
            options["state_dict"] = lambda: own
        made = HTTPTransport(**options)
        self.addCleanup(made.shutdown)
        return made

    def fails(self, url: str, kind: Any, receiver: Any = None, **call: Any) -> Any:
        with self.assertRaises(kind) as caught:
            (receiver or self.receiver()).recv_checkpoint(0, url, STEP, **call)
        self.assertNotIn("s3cr3t", str(caught.exception))
        return caught.exception
