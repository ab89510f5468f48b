# SPDX-License-Identifier: BSD-3-Clause
"""torchft's HTTPTransport heals from ours, and ours from it, over the single stream, on the same torch."""

from __future__ import annotations

import importlib.util
import time
import unittest
from datetime import timedelta
from typing import Any
from unittest import mock

from tests import load
from tests._support import SCALE, GuardedTestCase, captured_logs
from tests.checkpointing import _wire
from tests.checkpointing._transport_states import clone, differences, noise, scrambled

if importlib.util.find_spec("torchft") is None:
    raise unittest.SkipTest("needs torchft")

from torchft.checkpointing import HTTPTransport as Theirs

HTTPTransport = load("checkpointing").HTTPTransport
errors = load("_errors")

STEP = 4
LIMIT = timedelta(seconds=10 * SCALE)


def state() -> dict[str, Any]:
    weight = noise(300, 1000)
    return {
        "model": {"w": weight, "tied": weight, "b": noise(7)},
        "optimizer": {"state": {0: {"step": noise(1)[0], "m": noise(300, 1000, seed=1)}}, "lr": [0.1, 2]},
        "step": 5,
        "name": "x",
    }


class Interop(GuardedTestCase):
    # its server's threads end by themselves when they were served, and its accepting thread with shutdown()
    def theirs(self, num_chunks: int = 0) -> Any:
        made = Theirs(LIMIT, num_chunks)
        self.addCleanup(made._server.server_close)
        self.addCleanup(made.shutdown)
        return made

    def ours(self, **options: Any) -> Any:
        made = HTTPTransport(**{"timeout": LIMIT, "host": "127.0.0.1", "num_chunks": 0, **options})
        self.addCleanup(made.shutdown)
        return made

    def of(self, donor: Any) -> str:
        """Their address by number; they advertise the host's name."""
        return f"http://127.0.0.1:{_wire.address(donor.metadata())[1]}/checkpoint/"

    def same(self, a: Any, b: Any) -> None:
        self.assertEqual(list(differences(a, b)), [])

    def test_theirs_heals_from_ours(self) -> None:
        for num_chunks in (0, None):
            donor = self.ours(num_chunks=num_chunks)
            donor.send_checkpoint([1], STEP, state(), LIMIT)
            moved = self.theirs().recv_checkpoint(0, donor.metadata(), STEP, LIMIT)
            self.same(state(), moved)
            self.assertEqual(moved["model"]["w"].data_ptr(), moved["model"]["tied"].data_ptr())
            donor.disallow_checkpoint()

    def test_ours_heals_from_theirs(self) -> None:
        donor = self.theirs()
        donor.send_checkpoint([1], STEP, state(), LIMIT)
        with captured_logs(20) as records:
            moved = self.ours().recv_checkpoint(0, self.of(donor), STEP, LIMIT)
        self.same(state(), moved)
        lines = [record.getMessage() for record in records if "healed" in record.getMessage()]
        self.assertEqual(len(lines), 1)
        self.assertTrue(lines[0].endswith("unchecked"), lines)

    def test_ours_heals_from_theirs_in_place(self) -> None:
        donor = self.theirs()
        donor.send_checkpoint([1], STEP, state(), LIMIT)
        own = clone(scrambled(state()))
        own["model"]["tied"] = own["model"]["w"]
        moved = self.ours(state_dict=lambda: own).recv_checkpoint(0, self.of(donor), STEP, LIMIT)
        self.same(state(), moved)
        self.assertIs(moved["model"]["w"], own["model"]["w"])

    def test_their_stream_has_no_length_and_max_bytes_holds_all_the_same(self) -> None:
        donor = self.theirs()
        donor.send_checkpoint([1], STEP, state(), LIMIT)
        with self.assertRaises(errors.TransferError):
            self.ours(max_bytes=100_000).recv_checkpoint(0, self.of(donor), STEP, LIMIT)

    def test_a_stream_of_theirs_that_breaks(self) -> None:
        donor = self.theirs()
        donor.send_checkpoint([1], STEP, state(), LIMIT)
        host_port = ("127.0.0.1", _wire.address(donor.metadata())[1])
        proxy = _wire.Proxy(host_port, lambda data, passed: None if passed > 1 << 20 else data)
        with proxy, self.assertRaises(errors.IncompleteTransfer) as caught:
            self.ours().recv_checkpoint(0, _wire.through(self.of(donor), proxy.port), STEP, LIMIT)
        self.assertGreater(caught.exception.bytes_done, 1 << 19)

    def test_chunks_of_theirs_are_refused_with_the_way_out(self) -> None:
        for num_chunks in (0, 3):
            donor = self.theirs(num_chunks)
            donor.send_checkpoint([1], STEP, state(), LIMIT)
            began_s = time.monotonic()
            with self.assertRaises(errors.LayoutError) as caught:
                self.ours(num_chunks=None).recv_checkpoint(0, self.of(donor), STEP, LIMIT)
            self.assertLess(time.monotonic() - began_s, 2 * SCALE)
            self.assertIn("num_chunks=0", str(caught.exception))

    def test_another_step_of_theirs(self) -> None:
        donor = self.theirs()
        donor.send_checkpoint([1], STEP, state(), LIMIT)
        with mock.patch("sys.stderr"), self.assertRaises(errors.NotServing):  # its server logs there
            self.ours().recv_checkpoint(0, self.of(donor), STEP + 1, LIMIT)
