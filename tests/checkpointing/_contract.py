# SPDX-License-Identifier: BSD-3-Clause
"""What every checkpoint transport has to do, as a mixin of tests.

A subclass says how to make a donor and a receiver (``make_pair``). Everything here goes through the four
calls of the interface, the donor's ``send_checkpoint`` on a thread of its own, since a transport may return
from it only when the receiver has everything.
"""

from __future__ import annotations

import datetime
import enum
import math
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from tests import load
from tests._support import SCALE
from tests.checkpointing import _transport_states as states
from tests.checkpointing._contract_in_place import InPlaceContract
from tests.checkpointing._contract_tools import Sending
from tests.checkpointing._transport_states import Point, block, clone, elements, noise

errors = load("_errors")

Transport = Any


class TransportContract(InPlaceContract):
    """Mix into a ``GuardedTestCase``."""

    # --- into fresh memory ------------------------------------------------------------------------------

    def test_fresh_heals(self) -> None:
        pair = self.pair()
        for step, (name, make) in enumerate(states.fresh_states().items()):
            if name in self.not_carried:
                continue
            with self.subTest(name):
                state = make()
                moved = self.move(pair, state, step)
                self.assert_same(state, moved)

    def test_the_result_shares_no_memory_with_the_donor(self) -> None:
        state = {"a": noise(50), "b": block(2 << 20)}
        moved = self.heal(state)
        before = clone(state)
        for tensor in state.values():
            tensor.zero_()
        self.assert_same(before, moved)

    def test_ties_are_ties_again(self) -> None:
        flat = noise(1000)
        weight = noise(10, 10)
        state = {
            "a": weight, "b": weight, "c": weight.view(-1), "d": weight.t(),
            "left": flat[:600], "right": flat[400:], "middle": flat[450:550],
        }  # fmt: skip
        moved = self.heal(state)
        self.assert_same(state, moved)
        self.assertIs(moved["a"], moved["b"])
        self.assertEqual(len({moved[key].data_ptr() for key in "abcd"}), 1)
        self.assertEqual(moved["right"].data_ptr() - moved["left"].data_ptr(), 400 * 4)
        moved["left"][460] = 1234.5
        self.assertEqual((moved["right"][60].item(), moved["middle"][10].item()), (1234.5, 1234.5))

    def test_equal_tensors_are_not_tied(self) -> None:
        moved = self.heal({"a": torch.ones(4), "b": torch.ones(4)})
        moved["a"].zero_()
        self.assertEqual(moved["b"].tolist(), [1, 1, 1, 1])

    def test_no_more_memory_than_the_donor_shows(self) -> None:
        big = block(4 << 20)
        state = {"slice": big[1000:2024], "expanded": noise(1, 4).expand(1 << 20, 4), "column": noise(2000, 500)[:, 3]}
        moved = self.heal(state)
        self.assert_same(state, moved)
        self.assertLess(states.span_bytes(moved["slice"]), 2048)
        self.assertLess(states.span_bytes(moved["expanded"]), 64)
        self.assertEqual(moved["expanded"].stride(), (0, 1))

    def test_every_dtype_in_place(self) -> None:
        state = {str(dtype): states.of_dtype(dtype) for dtype in states.whole_byte_dtypes()}
        own = {str(dtype): states.of_dtype(dtype, 7)[1:] for dtype in states.whole_byte_dtypes()}
        at = {key: tensor.data_ptr() for key, tensor in own.items()}
        moved = self.heal(state, own)
        for key, tensor in own.items():
            self.assertTrue(torch.equal(elements(tensor), elements(state[key])), key)
            self.assertEqual(moved[key].data_ptr(), at[key], key)

    def test_every_dtype_with_gaps(self) -> None:
        state = {str(d): states.of_dtype(d, 12)[::2] for d in states.whole_byte_dtypes()}
        self.assert_same(state, self.heal(state))
        own = {str(d): states.of_dtype(d, 24)[::4] for d in states.whole_byte_dtypes()}
        self.heal(state, own)
        for key, tensor in own.items():
            self.assertTrue(torch.equal(elements(tensor), elements(state[key])), key)

    def test_buffers(self) -> None:
        state = {
            "a": torch.nn.Buffer(noise(5)),
            "b": torch.nn.Buffer(noise(3, 4).t(), persistent=False),
            "large": torch.nn.Buffer(noise(300_000)),
        }
        moved = self.heal(state)
        for key, buffer in moved.items():
            self.assertIsInstance(buffer, torch.nn.Buffer)
            self.assertTrue(torch.equal(buffer, state[key]))
            self.assertEqual(buffer.persistent, state[key].persistent)

    def test_whatever_the_default_device_is(self) -> None:
        state = {"large": block(400_000), "columns": noise(300, 500)[:, ::2], "small": noise(3), "none": noise(0)}
        own = {"large": torch.zeros_like(state["large"]), "columns": torch.zeros(300, 250)}
        before = torch.get_default_device()
        torch.set_default_device("meta")  # memory there has no address
        self.addCleanup(torch.set_default_device, before)
        moved = self.heal(state, own)
        torch.set_default_device(before)
        self.assertTrue(all(torch.equal(moved[key], state[key]) for key in state))
        self.assertIs(moved["large"], own["large"])

    def test_a_step_that_is_no_whole_number(self) -> None:
        donor, receiver = self.pair()
        for step, kind in (
            (1.0, TypeError),
            (None, TypeError),
            ("7", TypeError),
            (-1, ValueError),
            (10**18, ValueError),
        ):
            with self.subTest(step=step):
                with self.assertRaisesRegex(kind, "step is"):
                    donor.send_checkpoint([1], step, {})
                with self.assertRaisesRegex(kind, "step is"):
                    receiver.recv_checkpoint(0, donor.metadata(), step)
        self.assert_same({"a": 1}, self.move((donor, receiver), {"a": 1}, step=torch.tensor(7)))

    # --- leaves that are no tensors ---------------------------------------------------------------------

    def test_registered_containers_need_the_receivers_own(self) -> None:
        state = {"p": Point(noise(2), 3)}
        moved = self.heal(state, {"p": Point(torch.zeros(2), 0)})
        self.assert_same(state, moved)
        sender, error = self.refused(state)
        self.assertIn("Point", str(sender or error))
        self.assertIn("'p'", str(sender or error))

    def test_leaves_that_cannot_be_carried(self) -> None:
        class Color(enum.IntEnum):
            RED = 1

        for leaf in (lambda: 0, Color.RED, datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), object()):
            with self.subTest(leaf=str(leaf)):
                sender, error = self.refused({"ok": noise(3), "deep": [{"bad": leaf}]})
                self.assertIsInstance(sender, errors.LayoutError)
                self.assertIn("['deep'][0]['bad']", str(sender))
                self.assertIn("weights_only=False", str(sender))
                # the receiver learns the reason
                self.assertIn("['deep'][0]['bad']", str(error))

    def test_tensors_that_are_not_plain_arrive_or_are_refused_at_the_sender(self) -> None:
        class Wrapped(torch.Tensor):
            pass

        quantized = torch.empty(0)
        with states.warnings.catch_warnings():
            states.warnings.simplefilter("ignore")
            quantized = torch.quantize_per_tensor(noise(4), 0.1, 0, torch.qint8)
            sparse = torch.eye(3).to_sparse()
        for leaf in (sparse, quantized, noise(3).as_subclass(Wrapped), torch.empty(2, device="meta")):
            pair = self.pair()
            sending = Sending(pair[0], 7, {"deep": [leaf]})
            with self.subTest(type(leaf).__name__):
                try:
                    moved = pair[1].recv_checkpoint(0, pair[0].metadata(), 7, timeout=5 * SCALE)
                except errors.TransferError as e:
                    sending.join()
                    self.assertIn("['deep'][0]", str(sending.error))
                    self.assertIn("['deep'][0]", str(e))
                else:
                    sending.finish()
                    self.assertIs(type(moved["deep"][0]), type(leaf))
                    self.assertEqual(moved["deep"][0].layout, leaf.layout)
                    self.assertEqual(repr(moved["deep"][0]), repr(leaf))

    # --- time -------------------------------------------------------------------------------------------

    def test_timeouts_that_make_no_sense(self) -> None:
        donor, receiver = self.pair()
        for bad, kind in (
            (-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (timedelta(seconds=-1), ValueError),
            ("3", TypeError), (True, TypeError),
        ):  # fmt: skip
            with self.subTest(bad=bad):
                with self.assertRaises(kind):
                    donor.send_checkpoint([1], 1, {}, bad)
                with self.assertRaises(kind):
                    receiver.recv_checkpoint(0, donor.metadata(), 1, bad)
        with self.assertRaises(ValueError):
            self.make_pair(timeout=None)

    def test_timeouts_that_make_sense(self) -> None:
        pair = self.pair()
        for step, timeout in enumerate((5 * SCALE, int(5 * SCALE), timedelta(seconds=5 * SCALE), None, timedelta.max)):
            with self.subTest(timeout=timeout):
                sending = Sending(pair[0], step, {"x": noise(2)}, timeout)
                moved = pair[1].recv_checkpoint(0, pair[0].metadata(), step, timeout)
                sending.finish()
                self.assert_same({"x": noise(2)}, moved)

    def test_nobody_sends(self) -> None:
        donor, receiver = self.pair(timeout=0.4)
        for timeout, at_least_s in ((0.3, 0.3), (timedelta(seconds=0.3), 0.3), (None, 0.4), (0, 0.0)):
            with self.subTest(timeout=timeout):
                began_s = time.monotonic()
                with self.assertRaises(errors.DeadlineExceeded) as caught:
                    receiver.recv_checkpoint(0, donor.metadata(), 1, timeout)
                took_s = time.monotonic() - began_s
                self.assertGreaterEqual(took_s, at_least_s)
                self.assertLess(took_s, at_least_s + 1.0 * SCALE)
                self.assertIsInstance(caught.exception, TimeoutError)
                self.assertFalse(caught.exception.destination_dirty)
        self.assert_same({"x": noise(3)}, self.move((donor, receiver), {"x": noise(3)}))

    def test_a_receiver_that_is_early(self) -> None:
        donor, receiver = self.pair()
        timer = threading.Timer(0.3, donor.send_checkpoint, ([1], 3, {"x": noise(9)}))
        timer.start()
        self.addCleanup(timer.join)
        self.assert_same({"x": noise(9)}, receiver.recv_checkpoint(0, donor.metadata(), 3))

    def test_another_step(self) -> None:
        donor, receiver = self.pair(timeout=5 * SCALE)
        sending = Sending(donor, 3, {"x": noise(3)})
        if not self.send_waits_for_receiver:
            sending.finish()
        began_s = time.monotonic()
        with self.assertRaises(errors.NotServing) as caught:
            receiver.recv_checkpoint(0, donor.metadata(), 4)
        self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)
        self.assertIn("step 3", str(caught.exception))
        self.assertIn("step 4", str(caught.exception))
        sending.join()
        self.assert_same({"x": noise(3)}, self.move((donor, receiver), {"x": noise(3)}, 5))

    # --- life -------------------------------------------------------------------------------------------

    def test_many_steps_over_one_pair(self) -> None:
        own = {"w": torch.zeros(1000), "b": torch.zeros(3)}
        pair = self.pair(state_dict=lambda: own)
        for step in range(10):
            state = {"w": noise(1000, seed=step), "b": noise(3, seed=-1 - step)}
            self.move(pair, state, step)
            self.assert_same(state, own)

    def test_disallow_and_shutdown_again_are_no_ops(self) -> None:
        donor, receiver = self.pair()
        donor.disallow_checkpoint()
        donor.disallow_checkpoint()
        self.move((donor, receiver), {"x": noise(2)})
        for wait in (True, False, True):
            donor.shutdown(wait)
            receiver.shutdown(wait=wait)
        donor.disallow_checkpoint()

    def test_shutdown_without_waiting(self) -> None:
        donor, receiver = self.pair()
        self.move((donor, receiver), {"x": noise(2)})
        began_s = time.monotonic()
        donor.shutdown(wait=False)
        receiver.shutdown(wait=False)
        self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)

    def test_use_after_shutdown(self) -> None:
        donor, receiver = self.pair(timeout=0.5)
        where = donor.metadata()
        donor.shutdown()
        with self.assertRaises(errors.StateError):
            donor.send_checkpoint([1], 1, {})
        began_s = time.monotonic()
        with self.assertRaises((errors.TransferError, errors.DeadlineExceeded)):
            receiver.recv_checkpoint(0, where, 1)
        self.assertLess(time.monotonic() - began_s, 2.0 * SCALE)
