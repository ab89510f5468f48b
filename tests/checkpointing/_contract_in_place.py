# SPDX-License-Identifier: BSD-3-Clause
"""The part of the contract about what the receiver has already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import load
from tests.checkpointing import _transport_states as states
from tests.checkpointing._contract_tools import ContractTools, Sending
from tests.checkpointing._transport_states import clone, noise, scrambled

errors = load("_errors")

Transport = Any


class InPlaceContract(ContractTools):
    """Into the tensors of ``state_dict=``."""

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

    def test_in_place_into_inference_tensors(self) -> None:
        """As an average of the weights that is kept under inference_mode()."""
        state = {"average": noise(4, 6), "w": noise(3)}
        with torch.inference_mode():
            own = {"average": torch.zeros(6, 4).t(), "w": torch.zeros(3)}
        self.heal(state, own)
        self.assertTrue(all(torch.equal(own[key], state[key]) for key in state))

    def test_in_place_into_a_tensor_that_overlaps_itself(self) -> None:
        own = {"a": torch.zeros(20).unfold(0, 5, 1)}
        _, error = self.refused({"a": noise(16, 5)}, own)
        self.assertIsInstance(error, errors.LayoutError)
        self.assertIn("overlaps itself", str(error))
        self.assertFalse(own["a"].any())
        # one that lies alike is as good as any
        state = {"a": noise(20).unfold(0, 5, 1)}
        self.heal(state, own)
        self.assertTrue(torch.equal(own["a"], state["a"]))

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
