# SPDX-License-Identifier: BSD-3-Clause
"""Ties at one side, at both, and in part. What must hold: what the donor has tied gets its value wherever it is at
the receiver; what only the receiver has tied is a LayoutError that names both, before a byte is written."""

from __future__ import annotations

import torch

from tests.checkpointing._states import Case, heal, noise, raw, same, tensors


class TiesInPlace(Case):
    """Ties at one side, at both, and in part."""

    def test_at_both(self) -> None:
        w, mine = noise((4, 4)), torch.zeros(4, 4)
        out = self.healed({"a": w, "b": w, "c": w.detach()}, {"a": mine, "b": mine, "c": mine.detach()})
        self.assertEqual(len({t.data_ptr() for t in tensors(out)}), 1)
        self.assertTrue(raw(mine) == raw(w))

    def test_at_the_donor_only(self) -> None:
        w = noise((4, 4))
        for theirs in ({"a": w, "b": w}, {"a": w, "b": w.detach()}, {"a": w, "b": w.t().t()}):
            own = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
            heal(theirs, own)
            self.assertTrue(raw(own["a"]) == raw(own["b"]) == raw(w))

    def test_at_the_donor_only_and_laid_out_otherwise(self) -> None:
        w = noise((4, 4))
        own = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4).t(), "c": torch.zeros(8, 4)[::2]}
        heal({"a": w, "b": w, "c": w.detach()}, own)
        for t in own.values():
            self.assertTrue(raw(t) == raw(w))

    def test_at_the_donor_and_the_receiver_has_one_of_them(self) -> None:
        w = noise((4, 4))
        for theirs in ({"a": w, "b": w}, {"a": w, "b": w.detach()}, {"a": w, "b": w.t()}):
            own = {"b": torch.zeros(4, 4)}
            out = heal(theirs, own)
            self.assertIs(out["b"], own["b"])
            for key in theirs:
                self.assertTrue(raw(out[key]) == raw(theirs[key]))
        self.assertEqual(heal({"a": w, "b": w.detach()}, {"b": torch.zeros(4, 4)})["a"].shape, (4, 4))

    def test_a_new_twin_shares_the_receivers_memory(self) -> None:
        w = noise((4, 4))
        own = {"b": torch.zeros(4, 4)}
        out = heal({"a": torch.nn.Parameter(w), "b": w}, own)
        self.assertEqual(out["a"].data_ptr(), own["b"].data_ptr())
        self.assertIs(type(out["a"]), torch.nn.Parameter)

    def test_at_the_receiver_only(self) -> None:
        for donors in (
            {"a": noise((4, 4), seed=1), "b": noise((4, 4), seed=2)},
            {"a": noise((4, 4), seed=1).t(), "b": noise((4, 4), seed=2)},
            {"a": noise((4, 4), seed=1).t(), "b": noise((4, 4), seed=2).t()},
            {"a": noise((4, 4), seed=1), "b": noise((4, 8), seed=2)[:, ::2]},
            {"a": noise((8, 4), seed=1)[:4], "b": noise((8, 4), seed=1)[4:]},
        ):
            for make in (lambda m: (m, m), lambda m: (m, m.detach()), lambda m: (m, m.t())):
                one, other = make(torch.zeros(4, 4))
                with self.subTest(strides=(donors["a"].stride(), donors["b"].stride(), other.stride())):
                    self.refused(donors, {"a": one, "b": other, "x": 1}, "['a']", "['b']", "share memory")

    def test_neighbours_of_one_buffer_that_the_receiver_has_tied(self) -> None:
        base = noise((8, 4))
        mine = torch.zeros(4, 4)
        self.refused({"a": base[:4], "b": base[4:]}, {"a": mine, "b": mine}, "['a']", "['b']")

    def test_overlapping_in_part_at_the_receiver(self) -> None:
        mine = torch.zeros(10)
        self.refused({"a": noise((6,)), "b": noise((6,), seed=1)}, {"a": mine[:6], "b": mine[4:]}, "['a']", "['b']")
        base = noise((10,))
        shifted = {"a": base[:6], "b": base[3:9]}
        self.refused(shifted, {"a": mine[:6], "b": mine[4:]}, "['a']", "['b']")

    def test_overlapping_alike_at_both(self) -> None:
        base, mine = noise((10,)), torch.zeros(10)
        heal({"a": base[:6], "b": base[4:], "c": base[5:6]}, {"a": mine[:6], "b": mine[4:], "c": mine[5:6]})
        self.assertTrue(raw(mine) == raw(base))

    def test_a_flat_buffer_beside_its_views(self) -> None:
        base, mine = noise((12,)), torch.zeros(12)

        def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"flat": flat, "w": flat[:8].view(2, 4), "t": flat[:8].view(2, 4).t(), "b": flat[8:]}

        out = self.healed(views(base), views(mine))
        same(self, out, views(base))

    def test_interleaved_views_share_no_element(self) -> None:
        mine = torch.zeros(5, 12)
        q, k, v = mine.split(4, dim=1)
        for donors in (noise((5, 12)).split(4, dim=1), [noise((5, 4), seed=i) for i in range(3)]):
            heal(dict(zip("qkv", donors)), dict(zip("qkv", (q, k, v))))
            self.assertTrue(raw(mine) == raw(torch.cat(list(donors), 1)))
        even, odd = torch.zeros(10)[::2], torch.zeros(10)[1::2]
        heal({"even": noise((5,)), "odd": noise((5,))}, {"even": even, "odd": odd})

    def test_a_tie_with_what_the_donor_does_not_have(self) -> None:
        mine = torch.zeros(4)
        heal({"a": noise((4,))}, {"a": mine, "here": mine})
        self.assertTrue(raw(mine) == raw(noise((4,))))

    def test_a_twin_that_is_tied_elsewhere(self) -> None:
        w, other = noise((4,)), noise((4,), seed=1)
        mine = torch.zeros(4)
        self.refused({"a": w, "b": w, "c": other}, {"a": torch.zeros(4), "b": mine, "c": mine}, "['b']", "['c']")
