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
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from tests import load
from tests._support import SCALE, WAIT_S
from tests.checkpointing import _transport_states as states
from tests.checkpointing._transport_states import Point, block, clone, elements, noise, scrambled

errors = load("_errors")

Transport = Any


class Sending:
    """``send_checkpoint`` on a thread."""

    def __init__(self, donor: Transport, step: int, state: Any, timeout: Any = None) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(donor, step, state, timeout), daemon=True)
        self._thread.start()

    def _run(self, donor: Transport, step: int, state: Any, timeout: Any) -> None:
        try:
            donor.send_checkpoint([1], step, state, timeout)
        except BaseException as e:
            self.error = e

    def join(self) -> Sending:
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            raise AssertionError(f"send_checkpoint() did not return within {WAIT_S:g} s")
        return self

    def finish(self) -> None:
        """Wait for the end, and raise what it raised."""
        self.join()
        if self.error is not None:
            raise self.error


class TransportContract:
    """Mix into a ``GuardedTestCase``."""

    # whether send_checkpoint() returns only when the receiver has everything
    send_waits_for_receiver = False

    def make_pair(self, **options: Any) -> tuple[Transport, Transport]:
        """A donor and a receiver that can reach each other; the caller shuts them down.

        Options: ``timeout`` for both, ``state_dict`` for the receiver.
        """
        raise NotImplementedError

    # --- tools ------------------------------------------------------------------------------------------

    def pair(self, **options: Any) -> tuple[Transport, Transport]:
        donor, receiver = self.make_pair(**{"timeout": 20 * SCALE, **options})
        self.addCleanup(donor.shutdown)
        self.addCleanup(receiver.shutdown)
        return donor, receiver

    def move(self, pair: tuple[Transport, Transport], state: Any, step: int = 7) -> Any:
        """Move ``state`` once, and be ready for the next."""
        donor, receiver = pair
        sending = Sending(donor, step, state)
        result = receiver.recv_checkpoint(0, donor.metadata(), step)
        sending.finish()
        donor.disallow_checkpoint()
        return result

    def heal(self, state: Any, own: Any = None, **options: Any) -> Any:
        if own is not None:
            options["state_dict"] = lambda: own
        return self.move(self.pair(**options), state)

    def assert_same(self, a: Any, b: Any) -> None:
        found = list(states.differences(a, b))
        self.assertFalse(found, "\n" + "\n".join(found[:20]))

    def refused(self, state: Any, own: Any = None) -> tuple[BaseException | None, BaseException]:
        """Try to move ``state``; the errors of both sides, and that the receiver's came within a second."""
        pair = self.pair(**({} if own is None else {"state_dict": lambda: own}))
        sending = Sending(pair[0], 7, state)
        if not self.send_waits_for_receiver:
            sending.join()
        began_s = time.monotonic()
        with self.assertRaises(errors.TransferError) as caught:
            pair[1].recv_checkpoint(0, pair[0].metadata(), 7)
        self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)
        sending.join()
        pair[0].disallow_checkpoint()
        # it failed, and both can be used again
        pair[1].__dict__["_state_dict"] = None
        self.assert_same({"x": noise(3)}, self.move(pair, {"x": noise(3)}, step=8))
        return sending.error, caught.exception

    # --- into fresh memory ------------------------------------------------------------------------------

    def test_fresh_heals(self) -> None:
        pair = self.pair()
        for step, (name, make) in enumerate(states.fresh_states().items()):
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

    def test_nan_payloads_and_dtypes(self) -> None:
        for dtype in states.whole_byte_dtypes():
            with self.subTest(dtype=dtype):
                state = {"x": states.of_dtype(dtype)}
                own = {"x": states.of_dtype(dtype, 7)[1:]}
                at = own["x"].data_ptr()
                moved = self.heal(state, own)
                self.assertTrue(torch.equal(elements(own["x"]), elements(state["x"])))
                self.assertEqual(moved["x"].data_ptr(), at)

    # --- into what the receiver has ---------------------------------------------------------------------

    def test_in_place_heals(self) -> None:
        for name in ("one tensor", "large and small", "many small", "odd shapes", "deep"):
            with self.subTest(name):
                state = states.fresh_states()[name]()
                own = scrambled(state)
                mine = {id(t): t.data_ptr() for t in states.tensors(own)}
                moved = self.heal(state, own)
                self.assert_same(state, moved)
                self.assert_same(state, own)
                self.assertEqual({id(t): t.data_ptr() for t in states.tensors(moved)}, mine)

    def test_in_place_into_other_strides(self) -> None:
        for nbytes in (4 * 30, 4 * 300_000):
            with self.subTest(nbytes=nbytes):
                columns = nbytes // 40
                state = {
                    "transposed": noise(10, columns),
                    "channels_last": noise(1, 2, columns, 5, seed=1),
                    "slice": noise(10, columns, seed=2),
                    "strided here": noise(10, columns, seed=3).t().contiguous().t(),
                }
                flat = torch.full((10 * columns + 64,), -1.0)
                own = {
                    "transposed": torch.zeros(columns, 10).t(),
                    "channels_last": torch.zeros(1, 2, columns, 5).to(memory_format=torch.channels_last),
                    "slice": flat[32:-32].view(10, columns),
                    "strided here": torch.zeros(10, columns),
                }
                at = {key: (t.data_ptr(), t.stride()) for key, t in own.items()}
                self.heal(state, own)
                for key, tensor in own.items():
                    self.assertTrue(torch.equal(tensor, state[key]), key)
                    self.assertEqual((tensor.data_ptr(), tensor.stride()), at[key])
                self.assertTrue(bool((flat[:32] == -1).all() and (flat[-32:] == -1).all()))

    def test_in_place_into_slices_of_one_buffer(self) -> None:
        flat = torch.full((4 * 100_000,), -1.0)
        own = {str(i): flat[i * 100_000 + 10 : (i + 1) * 100_000 - 10] for i in range(4)}
        state = {str(i): noise(99_980, seed=i) for i in range(4)}
        self.heal(state, own)
        for i in range(4):
            self.assertTrue(torch.equal(own[str(i)], state[str(i)]))
            self.assertEqual(flat[i * 100_000 : i * 100_000 + 10].tolist(), [-1.0] * 10)

    def test_in_place_with_ties(self) -> None:
        weight, own_weight = noise(300, 300), torch.zeros(300, 300)
        state = {"a": weight, "b": weight, "c": weight.t()}
        own = {"a": own_weight, "b": own_weight, "c": own_weight.t()}
        moved = self.heal(state, own)
        self.assertTrue(torch.equal(own_weight, weight))
        self.assertIs(moved["a"], own_weight)
        self.assertTrue(torch.equal(moved["c"], weight.t()))

    def test_in_place_where_only_the_donor_ties(self) -> None:
        weight = noise(300, 300)
        own = {"a": torch.zeros(300, 300), "b": torch.zeros(300, 300)}
        self.heal({"a": weight, "b": weight}, own)
        self.assertTrue(torch.equal(own["a"], weight) and torch.equal(own["b"], weight))

    def test_a_tie_that_the_receiver_alone_has_is_refused(self) -> None:
        for other in (False, True):
            with self.subTest(strides_differ=other):
                tied = torch.full((20, 20), -1.0)
                own = {"a": tied.t() if other else tied, "b": tied.t() if other else tied}
                _, error = self.refused({"a": noise(20, 20), "b": noise(20, 20, seed=1)}, own)
                self.assertIsInstance(error, errors.LayoutError)
                self.assertIn("'a'", str(error))
                self.assertTrue(bool((tied == -1).all()))

    def test_what_only_one_side_has(self) -> None:
        mine, left = torch.zeros(5), torch.full((3,), 9.0)
        own = {"both": mine, "only here": left, "nested": {"only here": left}}
        moved = self.heal({"both": noise(5), "only there": noise(2), "nested": {"x": noise(4)}}, own)
        self.assertIs(moved["both"], mine)
        self.assert_same({"both": noise(5), "only there": noise(2), "nested": {"x": noise(4)}}, moved)
        self.assertEqual(left.tolist(), [9.0] * 3)

    def test_matched_by_key_not_by_order(self) -> None:
        own = {"b": torch.zeros(4), "a": torch.zeros(4)}
        self.heal({"a": noise(4), "b": noise(4, seed=1)}, own)
        self.assert_same({"b": noise(4, seed=1), "a": noise(4)}, own)

    def test_plain_values_come_from_the_donor(self) -> None:
        moved = self.heal({"step": 5, "x": noise(2)}, {"step": 0, "x": torch.zeros(2)})
        self.assertEqual(moved["step"], 5)

    def test_what_does_not_fit_is_refused_before_a_byte(self) -> None:
        good = {"first": noise(400_000), "last": noise(7)}
        for own_x, donor_x, words in (
            (torch.zeros(4, dtype=torch.int32), noise(4), ("torch.int32", "torch.float32")),
            (torch.zeros(2, 3), noise(3, 2), ("(2, 3)", "(3, 2)", "(3, 1)")),
            (torch.zeros(6), noise(2, 3), ("(6,)", "(2, 3)")),
            (torch.zeros(3), noise(4), ("(3,)", "(4,)")),
            (torch.zeros(3), {"y": noise(3)}, ("(3,)",)),
            (torch.zeros(3), "a text", ("(3,)",)),
            (torch.zeros(1).expand(3), noise(3), ()),
            (torch.zeros(3, device="meta"), noise(3), ()),
        ):
            with self.subTest(own=str(own_x), donor=str(donor_x)):
                own = {"first": torch.zeros(400_000), "x": {"y": own_x}, "last": torch.zeros(7)}
                before = clone({key: own[key] for key in ("first", "last")})
                _, error = self.refused({**good, "x": {"y": donor_x}}, own)
                self.assertIsInstance(error, errors.LayoutError)
                for word in ("['x']['y']", *words):
                    self.assertIn(word, str(error))
                self.assertFalse(error.destination_dirty)
                self.assert_same(before, {key: own[key] for key in ("first", "last")})

    def test_all_leaves_of_a_joiners_optimizer(self) -> None:
        def adamw(p: Any) -> Any:
            return torch.optim.AdamW(p, lr=1e-2)

        def plain_sgd(p: Any) -> Any:
            return torch.optim.SGD(p, lr=1e-2)

        def sgd(p: Any) -> Any:
            return torch.optim.SGD(p, lr=1e-2, momentum=0.9)

        for make in (adamw, plain_sgd, sgd):
            for joiner_steps in (0, 2):
                with self.subTest(make.__name__, joiner_steps=joiner_steps):
                    self._heal_a_joiner(make, joiner_steps)

    def _heal_a_joiner(self, make: Callable[[Any], Any], joiner_steps: int) -> None:
        def build(seed: int) -> tuple[Any, Any, Any]:
            model = states.Tiny(seed)
            optimizer = make(model.parameters())
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def train(parts: tuple[Any, Any, Any], seeds: range) -> None:
            model, optimizer, scheduler = parts
            for seed in seeds:
                optimizer.zero_grad()
                model(noise(16, 8, seed=seed)).square().mean().backward()
                optimizer.step()
                scheduler.step()

        def state_of(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
            return {name: part.state_dict() for name, part in zip(("model", "optimizer", "scheduler"), parts)}

        donor, joiner = build(1), build(2)
        train(donor, range(3))
        train(joiner, range(100, 100 + joiner_steps))
        pair = self.pair(state_dict=lambda: state_of(joiner))
        moved = self.move(pair, state_of(donor))
        for name, part in zip(("model", "optimizer", "scheduler"), joiner):
            part.load_state_dict(moved[name])
        self.assert_same(state_of(donor), state_of(joiner))
        train(donor, range(50, 51))
        train(joiner, range(50, 51))
        self.assert_same(state_of(donor), state_of(joiner))
        self.assertIs(joiner[0].last.weight, joiner[0].first.weight)

    def test_statistics_that_a_forward_changes(self) -> None:
        model = states.Tiny(1)
        model(noise(16, 8))
        at_publish = clone(dict(model.state_dict()))
        donor, receiver = self.pair()
        sending = Sending(donor, 1, dict(model.state_dict()))
        if not self.send_waits_for_receiver:
            sending.finish()
            model(noise(16, 8, seed=5))
        moved = receiver.recv_checkpoint(0, donor.metadata(), 1)
        sending.finish()
        self.assert_same(at_publish, clone(moved))

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
