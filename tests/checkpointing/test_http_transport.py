# SPDX-License-Identifier: BSD-3-Clause
"""HTTPTransport passes the contract, whatever num_chunks says; what it offers beyond it."""

from __future__ import annotations

import datetime
import enum
import importlib.util
from fractions import Fraction
from typing import Any

import torch

from tests import load
from tests._support import SCALE, GuardedTestCase
from tests.checkpointing._contract import TransportContract
from tests.checkpointing._transport_states import Point, fresh_states, noise

HTTPTransport = load("checkpointing").HTTPTransport
errors = load("_errors")


class Color(enum.Enum):
    RED = 1


class _OverHTTP(TransportContract, GuardedTestCase):
    num_chunks: int | None = None

    def make_pair(self, **options: Any) -> tuple[Any, Any]:
        own = options.pop("state_dict", None)
        donor = HTTPTransport(host="127.0.0.1", num_chunks=self.num_chunks, **options)
        return donor, HTTPTransport(host="127.0.0.1", num_chunks=self.num_chunks, state_dict=own, **options)


class ByDefault(_OverHTTP):
    pass


class LeavesForALoader(GuardedTestCase):
    """What is neither a tensor nor plain, where both sides have agreed on it."""

    def moved(self, leaf: Any, **options: Any) -> Any:
        donor, receiver = (HTTPTransport(timeout=20 * SCALE, host="127.0.0.1", **options) for _ in range(2))
        self.addCleanup(donor.shutdown)
        self.addCleanup(receiver.shutdown)
        donor.send_checkpoint([], 1, {"x": noise(3), "leaf": leaf})
        return receiver.recv_checkpoint(0, donor.metadata(), 1)["leaf"]

    def test_trusted(self) -> None:
        when = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
        for num_chunks in (None, 0):
            for leaf in (when, Color.RED, datetime.timedelta(3), slice(1, 2), Fraction(1, 3)):
                moved = self.moved(leaf, weights_only=False, num_chunks=num_chunks)
                self.assertEqual((moved, type(moved)), (leaf, type(leaf)))

    def test_allowed_by_class(self) -> None:
        if not load("_compat").SAFE_LOADER_IS_SOUND:
            self.skipTest("torch's safe loader is used from 2.10 on")
        with torch.serialization.safe_globals([Color]):
            self.assertIs(self.moved(Color.RED), Color.RED)
        with self.assertRaises(errors.LayoutError):
            self.moved(Color.RED)

    def test_a_receiver_that_does_not_trust(self) -> None:
        donor = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1", weights_only=False)
        self.addCleanup(donor.shutdown)
        donor.send_checkpoint([], 1, {"x": noise(3), "leaf": Color.RED})
        receiver = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1")
        self.addCleanup(receiver.shutdown)
        with self.assertRaises(errors.LayoutError) as caught:
            receiver.recv_checkpoint(0, donor.metadata(), 1)
        self.assertIn("['leaf']", str(caught.exception))

    def test_numpy_scalars(self) -> None:
        if importlib.util.find_spec("numpy") is None:
            self.skipTest("needs numpy")
        leaf = importlib.import_module("numpy").float64(2.5)
        try:
            moved = self.moved(leaf)
        except errors.LayoutError as e:
            self.assertIn("['leaf']", str(e))
            self.assertIn("weights_only=False", str(e))
        else:
            self.assertEqual((moved, type(moved)), (leaf, type(leaf)))
        moved = self.moved(leaf, weights_only=False)
        self.assertEqual((moved, type(moved)), (leaf, type(leaf)))


class InThreeChunks(_OverHTTP):
    num_chunks = 3


class AsOneStream(_OverHTTP):
    num_chunks = 0
    # containers that torch's safe loader refuses; weights_only=False takes them
    not_carried = frozenset({"containers", "one memory as two dtypes"})

    def test_no_more_memory_than_the_donor_shows(self) -> None:
        """torch's format carries whole storages."""

    def test_registered_containers_need_the_receivers_own(self) -> None:
        """torch's loader makes them, or refuses them, by class."""
        sender, error = self.refused({"p": Point(noise(2), 3)})
        self.assertIsNone(sender)
        self.assertIsInstance(error, errors.LayoutError)
        self.assertIn("Point", str(error))
        self.assertIn("weights_only=False", str(error))

    def test_what_torch_cannot_save(self) -> None:
        donor, receiver = self.pair()
        donor.send_checkpoint([], 1, fresh_states()["one memory as two dtypes"]())
        with self.assertRaises(errors.NotServing) as caught:
            receiver.recv_checkpoint(0, donor.metadata(), 1)
        self.assertIn("num_chunks=None at the receiver carries it", str(caught.exception))

    def test_what_a_trusted_stream_carries(self) -> None:
        state = {"containers": fresh_states()["containers"](), "point": Point(noise(2), 3)}
        self.assert_same(state, self.heal(state, weights_only=False))


del _OverHTTP, TransportContract
