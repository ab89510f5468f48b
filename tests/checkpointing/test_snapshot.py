# SPDX-License-Identifier: BSD-3-Clause
"""The donor's side. What must hold: what was copied at publish keeps its values; what is served from where it is
either keeps them or fails its checksum; and what cannot be carried is refused by key, before anybody waits."""

from __future__ import annotations

import copy
import datetime
import enum
import unittest
from typing import Any
from unittest import mock

import torch

from tests import PACKAGE, load
from tests._support import run_python
from tests.checkpointing._states import flat_bytes, heal, noise, plan, publish, quiet, raw, same

compat = load("_compat")
errors = load("_errors")
checksum = load("checkpointing._checksum")
layout = load("checkpointing._layout")
snapshots = load("checkpointing._snapshot")

MB = 1 << 20


class Colour(enum.Enum):
    RED = 1


class Subclass(torch.Tensor):
    pass


def sums_now(snapshot: Any) -> list[int]:
    """The checksums of the chunks as they would be served at this moment."""
    out = []
    for start, end in zip([0, *snapshot.ends], snapshot.ends):
        sums = checksum.RowSum()
        for view, ends in snapshot.blocks(start, end):
            sums.feed(view)
            if ends:
                sums.restart()
        out.append(sums.value())
    return out


class Blocks(unittest.TestCase):
    """The flat bytes come out alike in whatever ranges they are asked for."""

    def state(self) -> dict[str, Any]:
        small = [noise((n,), torch.uint8, seed=n) for n in (0, 1, 3, 5, 700, 4096, 100_000)]
        large = [noise((layout.SMALL_BYTES + n,), torch.uint8, seed=n) for n in (1, 2 * MB)]
        return {"small": small, "large": large, "column": noise((700, 600))[:, 3::3]}

    def test_any_range(self) -> None:
        rng = torch.Generator().manual_seed(1)
        for how in snapshots.SNAPSHOTS:
            snapshot = publish(self.state(), snapshot=how)
            whole = flat_bytes(snapshot)
            total = snapshot.flat.total
            self.assertEqual(len(whole), total)
            for _ in range(40):
                start, end = sorted(torch.randint(0, total + 1, (2,), generator=rng).tolist())
                got = b"".join(bytes(view) for view, _ in snapshot.blocks(start, end))
                self.assertTrue(got == whole[start:end], (start, end))

    def test_blocks_are_bounded_and_say_where_a_piece_ends(self) -> None:
        snapshot = publish(self.state())
        at, ends = 0, set()
        for view, last in snapshot.blocks(0, snapshot.flat.total):
            self.assertTrue(0 < len(view) <= snapshots.BLOCK_BYTES)
            at += len(view)
            if last:
                ends.add(at)
        self.assertEqual(sorted(ends), snapshot.flat.starts[1:])

    def test_the_announced_sums_are_those_of_the_bytes(self) -> None:
        for num_chunks in (None, 1, 3, 8):
            snapshot = publish(self.state(), num_chunks=num_chunks)
            self.assertEqual(snapshot.manifest.sums, sums_now(snapshot))
            self.assertEqual(snapshot.document_sum, checksum.checksum_of(snapshot.document))

    def test_nothing(self) -> None:
        snapshot = publish({"e": torch.empty(0), "n": 1})
        self.assertEqual((snapshot.ends, list(snapshot.blocks(0, 0)), snapshot.flat.total), ([], [], 0))


class LittleBudget(unittest.TestCase):
    """With 2 MB for copies in place of 32, so that 4 MB are large."""

    def setUp(self) -> None:
        super().setUp()
        patch = mock.patch.object(snapshots, "SNAPSHOT_BYTES", 2 * MB)
        patch.start()
        self.addCleanup(patch.stop)


class Changes(LittleBudget):
    """The trainer goes on while the state is served."""

    def state(self) -> dict[str, torch.Tensor]:
        return {
            "statistics": noise((64,), seed=1), "counter": torch.tensor(7), "column": noise((3000, 100), seed=2)[:, 5],
            "medium": noise((MB // 8,), seed=3), "large": noise((MB,), seed=4),
        }  # fmt: skip

    def forward(self, state: dict[str, torch.Tensor], *keys: str) -> None:
        for key in keys or state:
            state[key].untyped_storage().fill_(3)

    def test_small_ones_have_the_values_of_publish(self) -> None:
        state, wanted = self.state(), copy.deepcopy(self.state())
        snapshot = publish(state)
        self.forward(state, "statistics", "counter", "column", "medium")
        self.assertEqual(sums_now(snapshot), snapshot.manifest.sums)
        made = plan(snapshot)
        snapshot.copy_to(made.intervals)
        out = made.finish(None)
        for key in wanted:
            self.assertTrue(raw(out[key]) == raw(wanted[key]), key)

    def test_a_change_of_a_large_one_changes_its_sum_and_no_other(self) -> None:
        state = self.state()
        snapshot = publish(state, num_chunks=41)
        state["large"][MB // 3] = 1.0
        differ = [a != b for a, b in zip(sums_now(snapshot), snapshot.manifest.sums)]
        self.assertEqual(sum(differ), 1)

    def test_all_keeps_everything(self) -> None:
        state = self.state()
        snapshot = publish(state, snapshot="all")
        self.forward(state)
        self.assertEqual(sums_now(snapshot), snapshot.manifest.sums)

    def test_none_keeps_nothing(self) -> None:
        state = self.state()
        del state["column"]  # what is sent without its gaps is gathered in any case
        snapshot = publish(state, snapshot="none", num_chunks=1)
        before = flat_bytes(snapshot)
        self.forward(state)
        after = flat_bytes(snapshot)
        self.assertEqual(after, b"\x03" * len(before))

    def test_the_copies_stay_within_their_budget(self) -> None:
        with mock.patch.object(snapshots, "SNAPSHOT_BYTES", 1000):
            state = [torch.zeros(n, dtype=torch.uint8) for n in (600, 300, 50, 500, 40)]
            snapshot = publish(state, num_chunks=1)
        self.forward(dict(enumerate(state)))
        kept = sum(byte == 0 for byte in flat_bytes(snapshot))
        self.assertEqual(kept, 40 + 50 + 300 + 500)

    def test_the_state_is_not_copied_where_it_need_not_be(self) -> None:
        state = {"large": torch.zeros(4 * MB, dtype=torch.uint8)}
        snapshot = publish(state, num_chunks=1)
        state["large"][:10] = 1
        self.assertEqual(bytes(next(snapshot.blocks(0, 10))[0]), b"\x01" * 10)


class Whole(LittleBudget):
    """The state as one object, for the single stream."""

    def state(self) -> dict[str, Any]:
        flat, base = noise((50,), seed=1), noise((4, 5), seed=9)
        tied = noise((6,), seed=2)
        return {
            "small": noise((5,), seed=3), "large": noise((MB,), seed=4),
            "weight": torch.nn.Parameter(noise((3, 2), seed=5)), "leaf": noise((2,)).requires_grad_(),
            "frozen": torch.nn.Parameter(noise((3,), seed=6), requires_grad=False),
            "conj": noise((3,), torch.complex64).conj(), "neg": noise((3,), torch.complex64).conj().imag,
            "turned": noise((4, 5), seed=7).t(), "column": noise((4, 5), seed=8)[:, 2],
            "expanded": noise((1,)).expand(4),
            "wide": noise((3, 1, 4), seed=8)[:, :, 1].expand(3, 6), "empty": torch.empty(0, 3),
            "scalar": torch.tensor(5.0),
            "tied": tied, "twin": tied.detach(), "same": tied, "slices": [flat[3:9], flat[9:20], flat[11:13]],
            "columns": [base[:, 3], base[:, 3].detach(), base[:, 3].view(torch.int32)],
            "plain": {1: (2.5, b"x"), "n": None}, "mixed": [flat[21:22], flat[22:26].view(torch.float64)],
        }  # fmt: skip

    def test_it_is_the_state(self) -> None:
        for how in snapshots.SNAPSHOTS:
            with self.subTest(snapshot=how):
                state = self.state()
                same(self, publish(state, snapshot=how).whole(), state)

    def test_it_has_the_values_of_publish(self) -> None:
        for how in ("small", "all"):
            state = self.state()
            if how == "small":
                del state["large"]
            wanted = {key: self.state()[key] for key in state}
            snapshot = publish(state, snapshot=how)
            for value in state.values():
                for t in value if isinstance(value, list) else [value]:
                    if isinstance(t, torch.Tensor) and t.numel():
                        t.untyped_storage().fill_(9)
            same(self, snapshot.whole(), wanted)

    def test_ties_stay_ties(self) -> None:
        for how in snapshots.SNAPSHOTS:
            out = publish(self.state(), snapshot=how).whole()
            self.assertIs(out["tied"], out["same"])
            self.assertEqual(out["tied"].data_ptr(), out["twin"].data_ptr())
            self.assertEqual(len({t.data_ptr() for t in out["columns"]}), 1)
            self.assertEqual(out["slices"][1].data_ptr() - out["slices"][0].data_ptr(), 24)

    def test_other_kinds_of_leaves_are_themselves(self) -> None:
        state = {"c": Colour.RED, "t": torch.zeros(1)}
        self.assertIs(publish(state, weights_only=False).whole()["c"], Colour.RED)


class Refused(unittest.TestCase):
    """What cannot be carried, at the donor and by key."""

    def refused(self, leaf: Any, **options: Any) -> Exception:
        with self.assertRaises(errors.LayoutError) as caught, quiet():
            publish({"fine": torch.zeros(1), "deep": [{"bad": leaf}]}, **options)
        error = caught.exception
        self.assertTrue(str(error).startswith("['deep'][0]['bad']"), str(error))
        return error

    def test_objects(self) -> None:
        for leaf in (lambda: 0, Colour.RED, datetime.date(2024, 1, 2), object(), unittest, {1}.__iter__()):
            error = self.refused(leaf)
            self.assertRegex(str(error), "store it as plain values or tensors.*weights_only=False")
            self.assertEqual(error.keys, ("['deep'][0]['bad']",))

    def test_what_nothing_can_pickle_is_refused_even_when_trusted(self) -> None:
        for leaf in (lambda: 0, unittest):
            self.assertIn("cannot be carried", str(self.refused(leaf, weights_only=False)))

    def test_numpy_scalars(self) -> None:
        try:
            import numpy
        except ModuleNotFoundError:
            self.skipTest("needs numpy")
        for leaf in (numpy.float64(1.5), numpy.int64(3)):
            if compat.SAFE_LOADER_IS_SOUND:
                with self.subTest(type(leaf).__name__):
                    try:
                        out = heal({"n": leaf})
                    except errors.LayoutError as e:
                        self.assertIn("['n']", str(e))
                    else:
                        self.assertIs(type(out["n"]), type(leaf))
            else:
                self.refused(leaf)

    def test_a_meta_tensor(self) -> None:
        self.assertIn("materialize", str(self.refused(torch.empty(3, device="meta"))))

    def test_what_is_no_plain_tensor_crosses_through_the_loader_or_is_refused(self) -> None:
        with quiet():
            leaves = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
        for leaf in leaves:
            if not compat.SAFE_LOADER_IS_SOUND:
                self.assertIn("not safe before torch 2.10", str(self.refused(leaf)))
            out = heal({"s": leaf}, options={"weights_only": False})
            self.assertIs(out["s"].layout, leaf.layout)
            self.assertTrue(torch.equal(out["s"].to_dense(), leaf.to_dense()))

    def test_subclasses(self) -> None:
        leaf = torch.zeros(2).as_subclass(Subclass)
        self.refused(leaf)

    def test_an_allowed_class_passes_the_safe_loader(self) -> None:
        if not compat.SAFE_LOADER_IS_SOUND:
            self.skipTest("the safe loader of this torch is not used")
        with torch.serialization.safe_globals([Colour, getattr]):
            self.assertIs(heal({"c": Colour.RED})["c"], Colour.RED)

    def test_a_description_that_no_receiver_takes(self) -> None:
        with (
            mock.patch.object(snapshots, "MAX_MANIFEST_BYTES", 1000),
            self.assertRaisesRegex(errors.LayoutError, "takes"),
        ):
            publish({"long": list(range(1000))})

    def test_a_refused_state_was_not_changed(self) -> None:
        state = {"a": noise((3,)), "b": lambda: 0}
        with self.assertRaises(errors.LayoutError):
            publish(state)
        same(self, state["a"], noise((3,)))


class Memory(unittest.TestCase):
    def test_a_state_of_many_small_tensors_costs_little_beside_its_copies(self) -> None:
        """25,000 of 4 KB: 32 MB of copies, and about 1 KB for each tensor."""
        child = (
            f"import torch; from {PACKAGE}.bench._common import MemoryPeak\n"
            f"from {PACKAGE}.checkpointing import _device, _snapshot\n"
            "state = {str(i): torch.full((1000,), float(i)) for i in range(25_000)}\n"
            "memory = MemoryPeak()\n"
            "held = _snapshot.publish(state, 1, weights_only=True, snapshot='small', num_chunks=None,\n"
            "                         stage=_device.HostStage())\n"
            "print(memory.growth())\n"
        )
        growth = run_python("-c", child, check=True).stdout.strip()
        if growth == "None":
            self.skipTest("this system does not tell")
        self.assertLess(int(growth), 64_000_000)
