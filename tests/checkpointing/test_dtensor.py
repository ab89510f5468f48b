# SPDX-License-Identifier: BSD-3-Clause
"""DTensors. What must hold: the local shard is healed in place on the receiver's own, equal mesh; anything else is
a LayoutError before a byte is written; and a process without DTensors never imports them."""

from __future__ import annotations

import contextlib
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests import load
from tests._support import GuardedTestCase, run_python
from tests.checkpointing._states import MISSING, heal, noise, plan, publish, raw

errors = load("_errors")
dtensor = load("checkpointing._dtensor")

try:
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError:  # moved, in a torch to come
    FakeStore = None


@contextlib.contextmanager
def pretending(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` processes whose collectives do nothing."""
    if FakeStore is None:
        raise unittest.SkipTest("this torch has no fake process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(local: torch.Tensor, mesh: Any, *placements: Any, shape: tuple[int, ...] | None = None) -> DTensor:
    """A DTensor of whose parts this process has ``local``."""
    shape = tuple(local.shape) if shape is None else shape
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
    )


class Quiet(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        ignoring = warnings.catch_warnings()
        ignoring.__enter__()
        self.addCleanup(ignoring.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # torch's, about groups in tests

    def refused(self, state: Any, own: Any, words: str) -> None:
        before = (
            [raw(t.to_local() if isinstance(t, DTensor) else t) for t in own.values()] if own is not MISSING else []
        )
        with self.assertRaisesRegex(errors.LayoutError, words) as caught:
            heal(state, own)
        self.assertEqual(caught.exception.keys, ("['w']",))
        if own is not MISSING:
            self.assertEqual(before, [raw(t.to_local() if isinstance(t, DTensor) else t) for t in own.values()])


class OneProcess(Quiet):
    """A real process group of this process alone."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)
        # a mesh may make groups of its own, whose descriptors stay as long as the process
        cls.mesh = init_device_mesh("cpu", (1,))
        cls.named = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        cls.square = init_device_mesh("cpu", (1, 1))

    def test_in_place(self) -> None:
        mesh = self.mesh
        for placement in (Shard(0), Shard(1), Replicate()):
            for make in (lambda t: t, lambda t: torch.nn.Parameter(t)):
                state = {"w": make(distribute_tensor(noise((6, 4)), mesh, [placement])), "n": 1}
                own = {"w": make(distribute_tensor(torch.zeros(6, 4), mesh, [placement])), "n": 2}
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    out = heal(state, own)
                self.assertEqual([str(w.message) for w in warned], [])
                self.assertIs(out["w"], own["w"])
                self.assertTrue(raw(own["w"].to_local()) == raw(noise((6, 4))))
                self.assertEqual(out["n"], 1)

    def test_into_other_strides(self) -> None:
        mesh = self.mesh
        own = {"w": shard(torch.zeros(4, 6).t(), mesh, Shard(0))}
        heal({"w": shard(noise((6, 4)), mesh, Shard(0))}, own)
        self.assertTrue(raw(own["w"].to_local()) == raw(noise((6, 4))))

    def test_without_the_receivers_own(self) -> None:
        mesh = self.mesh
        state = {"w": distribute_tensor(noise((6, 4)), mesh, [Shard(0)])}
        for own in (MISSING, {"other": torch.zeros(1)}, {"w": None}):
            with self.assertRaisesRegex(errors.LayoutError, r"^\['w'\].*give state_dict= with the same DTensor"):
                plan(publish(state), own)

    def test_a_dtensor_at_one_side_only(self) -> None:
        mesh = self.mesh
        whole, plain = distribute_tensor(noise((6, 4)), mesh, [Shard(0)]), torch.zeros(6, 4)
        self.refused({"w": whole}, {"w": plain}, r"^\['w'\].*the receiver a plain tensor")
        self.refused({"w": plain}, {"w": whole}, r"^\['w'\].*the donor has a plain tensor")

    def test_another_placement_or_mesh(self) -> None:
        flat, named, square = self.mesh, self.named, self.square
        state = {"w": shard(noise((6, 4)), flat, Shard(0))}
        for own in (
            shard(torch.zeros(6, 4), flat, Shard(1)), shard(torch.zeros(6, 4), flat, Replicate()),
            shard(torch.zeros(6, 4), flat, Partial()), shard(torch.zeros(6, 4), named, Shard(0)),
            shard(torch.zeros(6, 4), square, Shard(0), Replicate()),
            shard(torch.zeros(6, 4), flat, Shard(0), shape=(12, 4)),
        ):  # fmt: skip
            self.refused(state, {"w": own}, r"^\['w'\].*the same shard of an equal mesh")

    def test_tied_with_a_plain_tensor_of_the_donor(self) -> None:
        mesh = self.mesh
        local, mine = noise((6, 4)), torch.zeros(6, 4)
        own = {"w": shard(mine, mesh, Shard(0)), "plain": mine}
        heal({"w": shard(local, mesh, Shard(0)), "plain": local}, own)
        self.assertTrue(raw(mine) == raw(local))

    def test_what_describes_it(self) -> None:
        tensor = distribute_tensor(noise((6, 4)), self.named, [Shard(0)])
        self.assertTrue(dtensor.is_dtensor(tensor))
        self.assertFalse(dtensor.is_dtensor(tensor.to_local()))
        found = dtensor.describe(tensor)
        self.assertEqual(
            {k: found[k] for k in ("shape", "mesh", "names", "coordinate")},
            {"shape": [6, 4], "mesh": [1], "names": ["dp"], "coordinate": [0]},
        )
        self.assertEqual(dtensor.local_shard(tensor).data_ptr(), tensor.to_local().data_ptr())


class ManyProcesses(Quiet):
    def test_uneven_shards(self) -> None:
        # 10 rows over 4 processes: 3, 3, 3, 1; over 6: 2, 2, 2, 2, 2, none
        for world_size, rows in ((4, (3, 3, 3, 1)), (6, (2, 2, 2, 2, 2, 0))):
            for rank, count in enumerate(rows):
                with self.subTest(rank=rank), pretending(rank, world_size):
                    mesh = init_device_mesh("cpu", (world_size,))
                    own = {"w": shard(torch.zeros(count, 4), mesh, Shard(0), shape=(10, 4))}
                    out = heal({"w": shard(noise((count, 4)), mesh, Shard(0), shape=(10, 4))}, own)
                    self.assertIs(out["w"], own["w"])
                    self.assertTrue(raw(own["w"].to_local()) == raw(noise((count, 4))))

    def test_the_shard_of_another_rank(self) -> None:
        with pretending(0, 2):
            snapshot = publish({"w": shard(noise((3, 4)), init_device_mesh("cpu", (2,)), Shard(0), shape=(6, 4))})
        with pretending(1, 2):
            own = {"w": shard(torch.zeros(3, 4), init_device_mesh("cpu", (2,)), Shard(0), shape=(6, 4))}
            with self.assertRaisesRegex(errors.LayoutError, "coordinate"):
                plan(snapshot, own)

    def test_a_mesh_of_another_size(self) -> None:
        with pretending(0, 2):
            snapshot = publish({"w": shard(noise((3, 4)), init_device_mesh("cpu", (2,)), Shard(0), shape=(6, 4))})
        with pretending(0, 3):
            own = {"w": shard(torch.zeros(3, 4), init_device_mesh("cpu", (3,)), Shard(0), shape=(6, 4))}
            with self.assertRaisesRegex(errors.LayoutError, r"^\['w'\].*equal mesh"):
                plan(snapshot, own)


class NotImported(GuardedTestCase):
    def test_a_process_without_dtensors_does_not_pay_for_them(self) -> None:
        code = (
            "import sys\n"
            "from tests.checkpointing._states import heal, noise\n"
            "heal({'a': noise((3,))}, {'a': noise((3,), seed=1)})\n"
            "print('torch.distributed.tensor' in sys.modules)\n"
        )
        self.assertEqual(run_python("-c", code, check=True).stdout.strip(), "False")
