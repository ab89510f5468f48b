# SPDX-License-Identifier: BSD-3-Clause
"""The part of the contract about a user's own memory: aliases, views, autograd, storages that go away."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from tests import load
from tests.process_group._collectives import Slot

errors = load("_errors")


class ViewContract:
    """Mixed in by ``ProcessGroupContract``."""

    def slot(self, kind: str, value: torch.Tensor) -> Slot:
        return Slot(kind, value)

    def summed(self: Any, make: Any) -> None:
        """allreduce ``make(rank)`` on two ranks; it returns the tensor and a check of what it is afterwards."""

        def body(group: Any, rank: int) -> None:
            tensor, check = make(rank)
            group.allreduce([tensor]).wait()
            check(tensor)

        with self.team(2) as team:
            team.run(body)

    def test_the_storage_stays_where_it_is(self: Any) -> None:
        def make(rank: int) -> Any:
            base = torch.full((6, 8), float(rank + 1))
            alias, pointer = base.view(-1), base.data_ptr()

            def check(tensor: torch.Tensor) -> None:
                self.assertEqual(base.data_ptr(), pointer)
                self.assertEqual(alias.view(6, 8)[2:5, 3:8].unique().tolist(), [3.0])
                self.assertEqual(float(alias.sum()), 15 * 3.0 + 33 * (rank + 1))

            return base[2:5, 3:8], check

        self.summed(make)

    def test_numpy_sees_the_result(self: Any) -> None:
        if importlib.util.find_spec("numpy") is None:
            self.skipTest("needs numpy")
        numpy = importlib.import_module("numpy")

        def make(rank: int) -> Any:
            array = numpy.full((4, 4), rank + 1.0)
            return torch.from_numpy(array)[1:3, 1:3], lambda t: self.assertEqual(array[1:3, 1:3].sum(), 12.0)

        self.summed(make)

    def test_ranks_with_different_strides(self: Any) -> None:
        def make(rank: int) -> Any:
            values = torch.arange(12.0).view(3, 4)
            tensor = values.clone() if rank == 0 else values.t().contiguous().t()
            return tensor, lambda t: self.assertEqual(t.tolist(), (values * 2).tolist())

        self.summed(make)

    def test_an_expanded_tensor(self: Any) -> None:
        def make(rank: int) -> Any:
            one = torch.full((1, 4), float(rank + 1))
            return one.expand(3, 4), lambda t: self.assertEqual(one.tolist(), [[3.0] * 4])

        self.summed(make)

    def test_tensors_that_autograd_knows(self: Any) -> None:
        def make_leaf(rank: int) -> Any:
            leaf = torch.full((3, 4), float(rank + 1), requires_grad=True)

            def check(tensor: torch.Tensor) -> None:
                self.assertTrue(leaf.is_leaf and leaf.requires_grad)
                self.assertEqual(leaf.detach().unique().tolist(), [3.0])

            return leaf, check

        def make_view_of_leaf(rank: int) -> Any:
            leaf = torch.full((3, 4), float(rank + 1), requires_grad=True)
            return leaf.t()[1:3], lambda t: self.assertEqual(leaf.detach()[:, 1:3].unique().tolist(), [3.0])

        def make_result(rank: int) -> Any:
            made = torch.full((3, 4), float(rank + 1), requires_grad=True) * 2
            return made[::2], lambda t: self.assertEqual(made.detach()[::2].unique().tolist(), [6.0])

        def make_inference(rank: int) -> Any:
            with torch.inference_mode():
                made = torch.full((3, 4), float(rank + 1))
                view = made[::2]
            return view, lambda t: self.assertEqual(made.tolist()[0], [3.0] * 4)

        for make in (make_leaf, make_view_of_leaf, make_result, make_inference):
            with self.subTest(make.__name__):
                self.summed(make)

    def test_a_tensor_that_is_resized_after_the_call(self: Any) -> None:
        def body(group: Any, rank: int) -> None:
            tensor = torch.full((4, 4), float(rank + 1))
            alias = tensor.detach()
            work = group.allreduce([tensor])
            tensor.resize_(0)
            work.wait()
            self.assertEqual(alias.unique().tolist(), [3.0])
            view = torch.full((4, 4), float(rank + 1))[::2]
            work = group.allreduce([view])
            view.resize_(0)
            work.wait()

        with self.team(2) as team:
            team.run(body)

    def test_conjugate_views(self: Any) -> None:
        def body(group: Any, rank: int) -> None:
            base = torch.full((3,), complex(rank + 1, 1))
            try:
                group.allreduce([base.conj()]).wait()
            except errors.UnsupportedOp:
                return
            self.assertEqual(base.tolist(), [3 + 2j] * 3)

        with self.team(2) as team:
            team.run(body)
