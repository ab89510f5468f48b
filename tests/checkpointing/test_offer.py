# SPDX-License-Identifier: BSD-3-Clause
"""The single stream, whose sum takes time: readers wait for it, and nobody else does."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import torch

from tests import load
from tests._support import SCALE, WAIT_S, wait_until
from tests.checkpointing._serving import STEP, ServerTestCase, errors
from tests.checkpointing._transport_states import block, noise

client = load("checkpointing._client")
stream = load("checkpointing._stream")


def summing() -> bool:
    return any(thread.name == "heal-sum" for thread in threading.enumerate())


class Changed(ServerTestCase):
    """What is not the state of publish any more is no stream, whichever part of it has changed."""

    def refused(self, state: dict[str, Any], change: Any) -> None:
        donor = self.donor(state)
        change(state)
        with self.assertRaisesRegex(errors.NotServing, 'changed the state.*snapshot="all"'):
            self.transport(num_chunks=0, timeout=5 * SCALE).recv_checkpoint(0, donor.metadata(), STEP)

    def test_in_place(self) -> None:
        self.refused({"w": torch.zeros(12 << 20), "step": torch.tensor(1.0)}, lambda state: state["w"].add_(1))

    def test_with_other_memory(self) -> None:
        def change(state: dict[str, Any]) -> None:
            state["w"].data = torch.ones(12 << 20)

        self.refused({"w": torch.zeros(12 << 20)}, change)

    def test_freed(self) -> None:
        self.refused({"w": torch.zeros(12 << 20)}, lambda state: state["w"].untyped_storage().resize_(0))

    def test_served_again_after_a_step(self) -> None:
        state = {"w": torch.zeros(12 << 20)}
        donor = self.donor(state)
        donor.disallow_checkpoint()
        state["w"].add_(1)
        donor.allow_checkpoint(STEP)
        with self.assertRaisesRegex(errors.NotServing, "changed the state"):
            self.transport(num_chunks=0, timeout=5 * SCALE).recv_checkpoint(0, donor.metadata(), STEP)

    def test_small_ones_and_those_with_gaps_are_of_publish(self) -> None:
        wide = torch.zeros(10 << 20, 2)
        state = {"small": torch.zeros(5), "gaps": wide[:, 0]}
        donor = self.donor(state)
        state["small"].add_(1)
        state["gaps"].add_(1)
        healed = self.transport(num_chunks=0).recv_checkpoint(0, donor.metadata(), STEP)
        self.assertFalse(healed["small"].any() or healed["gaps"].any())


class SlowSums(ServerTestCase):
    """Adding up takes as long as the test says."""

    def setUp(self) -> None:
        super().setUp()
        self.state = {"x": block(300_000), "y": noise(5)}
        self.go_on = threading.Event()
        self.sums = 0
        add = stream.Meter.write

        def write(meter: Any, data: Any) -> Any:
            if not meter.sums.nbytes:
                self.sums += 1
            self.go_on.wait(WAIT_S)
            return add(meter, data)

        self.addCleanup(self.go_on.set)
        patched = mock.patch.object(stream.Meter, "write", write)
        patched.start()
        self.addCleanup(patched.stop)

    def release_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.go_on.set)
        timer.start()
        self.addCleanup(timer.join)

    def test_a_reader_waits_longer_than_its_idle_limit(self) -> None:
        donor = self.donor(self.state, num_chunks=0)
        self.release_in(1.5)
        with mock.patch.object(client, "IDLE_S", 0.7):
            self.heals(donor, self.state, num_chunks=0)
        self.assertEqual(self.sums, 1)

    def test_several_readers_and_one_sum(self) -> None:
        donor = self.donor(self.state)
        self.release_in(0.7)
        readers = [threading.Thread(target=self.heals, args=(donor, self.state), kwargs={"num_chunks": 0})
                   for _ in range(3)]  # fmt: skip
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(WAIT_S)
        self.heals(donor, self.state, num_chunks=0)
        self.assertEqual(self.sums, 1)

    def test_a_reader_that_is_not_ours_waits_for_its_answer(self) -> None:
        donor = self.donor(self.state)
        self.release_in(1.0)
        path = urlsplit(donor.metadata()).path
        answer = self.raw(donor, f"GET {path}{STEP}/full HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        self.assertTrue(answer.startswith(b"HTTP/1.1 200 "))

    def test_the_deadline_says_what_the_donor_said(self) -> None:
        donor = self.donor(self.state)
        with self.assertRaisesRegex(errors.DeadlineExceeded, "adds up its stream"):
            self.transport(num_chunks=0).recv_checkpoint(0, donor.metadata(), STEP, 1.0)
        self.go_on.set()


class EndlessSums(ServerTestCase):
    """Adding up takes half a minute."""

    def test_it_ends_with_what_it_is_for(self) -> None:
        state = {str(i): noise(5) for i in range(300)}
        add = stream.Meter.write

        def slow(meter: Any, data: Any) -> Any:
            time.sleep(0.05)
            return add(meter, data)

        for end in ("disallow_checkpoint", "send_checkpoint", "shutdown"):
            with self.subTest(end=end):
                donor = self.donor(state, timeout=0.2)
                with mock.patch.object(stream.Meter, "write", slow):
                    with self.assertRaises(errors.DeadlineExceeded):
                        self.transport(num_chunks=0).recv_checkpoint(0, donor.metadata(), STEP, 0.7)
                    self.assertTrue(summing())
                    began_s = time.monotonic()
                    getattr(donor, end)(*([[], STEP + 1, {}] if end == "send_checkpoint" else []))
                    self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)
                    wait_until(lambda: not summing(), "the sum ends")
                if end == "disallow_checkpoint":
                    donor.allow_checkpoint(STEP)
                    self.heals(donor, state, num_chunks=0)


class Changing:
    """Its pickle has another length each time."""

    def __init__(self, step: int) -> None:
        self.length, self.step = 100_000, step

    def __reduce__(self) -> Any:
        self.length += self.step
        return str, ("x" * self.length,)


class ChangedStates(ServerTestCase):
    def test_another_length_than_was_announced(self) -> None:
        """The reader learns of it at once, and not by waiting for bytes that will not come."""
        for step in (-1000, 1000):
            with self.subTest(step=step):
                donor = self.donor({"x": noise(3), "object": Changing(step)}, weights_only=False)
                began_s = time.monotonic()
                with self.assertRaises((errors.IncompleteTransfer, errors.IntegrityError)):
                    self.transport(num_chunks=0, weights_only=False).recv_checkpoint(0, donor.metadata(), STEP)
                self.assertLess(time.monotonic() - began_s, 2.0 * SCALE)


class Refusals(ServerTestCase):
    def test_a_state_that_is_no_stream(self) -> None:
        """Said to everybody who asks, and the chunks go on."""
        donor = self.donor({"x": noise(3)})
        with mock.patch.object(stream, "save", side_effect=RuntimeError("not this one")):
            for _ in range(2):
                with self.assertRaisesRegex(errors.NotServing, "not this one.*num_chunks=None"):
                    self.transport(num_chunks=0).recv_checkpoint(0, donor.metadata(), STEP)
        self.assertTrue(torch.equal(self.transport().recv_checkpoint(0, donor.metadata(), STEP)["x"], noise(3)))
