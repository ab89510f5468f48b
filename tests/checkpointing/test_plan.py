# SPDX-License-Identifier: BSD-3-Clause
"""A donor's snapshot and a receiver's plan together, without sockets. What must hold: the result is the donor's
state to the last bit, fresh or in place; what does not fit is a LayoutError by key, and then no byte is written."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, namedtuple
from typing import Any
from unittest import mock

import torch

from tests import load
from tests.checkpointing._states import (
    MISSING,
    Case,
    flat_bytes,
    heal,
    load_blob,
    noise,
    plan,
    publish,
    quiet,
    raw,
    same,
    tensors,
)

errors = load("_errors")
manifest = load("checkpointing._manifest")
plans = load("checkpointing._plan")

Pair = namedtuple("Pair", ["first", "second"])
NAMES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
WHOLE_BYTES = [v for _, v in sorted(NAMES.items()) if "q" not in str(v)]


def odd_layouts(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every way in which a tensor may lie in memory."""
    flat = noise((1000,), dtype, seed=9)
    return {
        "scalar": noise((), dtype, seed=1), "one": noise((1,), dtype, seed=2), "line": noise((17,), dtype, seed=3),
        "empty": torch.empty(0, dtype=dtype), "no rows": torch.empty((0, 3), dtype=dtype),
        "hollow": torch.empty((3, 0, 2), dtype=dtype), "transposed": noise((3, 5), dtype, seed=4).t(),
        "channels_last": noise((2, 4, 4, 3), dtype, seed=5).permute(0, 3, 1, 2),
        "column": noise((7, 5), dtype, seed=6)[:, 2],
        "block": noise((7, 5), dtype, seed=6)[1:4, 1:3], "steps": noise((30,), dtype, seed=7)[::3],
        "expanded": noise((1, 3), dtype, seed=8).expand(5, 3),
        "spread": noise((3, 1, 4), dtype, seed=8)[:, :, 1].expand(3, 6),
        "slice": flat[100:110], "later": flat[110:130].view(4, 5), "far": flat[500:503],
        "gap": flat[600:640].view(8, 5)[:, 1:3],
    }  # fmt: skip


class Fresh(Case):
    def test_every_layout_comes_back_with_its_strides(self) -> None:
        state = odd_layouts()
        out = heal(state)
        same(self, out, state)
        self.assertFalse({t.data_ptr() for t in tensors(out) if t.numel()} & {t.data_ptr() for t in tensors(state)})

    def test_every_dtype_bit_by_bit(self) -> None:
        for dtype in WHOLE_BYTES:
            with self.subTest(str(dtype)), quiet():
                try:
                    noise((2,), dtype)
                except (RuntimeError, TypeError) as e:
                    self.skipTest(str(e))
                state = {"a": noise((3, 5), dtype), "e": torch.empty((0,), dtype=dtype), "s": noise((), dtype, seed=2)}
                state["column"], state["turned"] = noise((4, 6), dtype, seed=3)[:, 1::2], noise((2, 3), dtype).t()
                same(self, heal(state), state)

    def test_parameters_and_gradients(self) -> None:
        state = {
            "trained": torch.nn.Parameter(noise((3,))), "frozen": torch.nn.Parameter(noise((3,)), requires_grad=False),
            "whole": torch.nn.Parameter(torch.arange(3), requires_grad=False), "leaf": noise((2,)).requires_grad_(),
            "made": noise((2,)).requires_grad_() * 2, "buffer": noise((4,)), "none": torch.nn.Parameter(torch.empty(0)),
        }  # fmt: skip
        out = heal(state)
        same(self, out, state)
        self.assertTrue(all(t.is_leaf for t in tensors(out)))

    def test_conjugate_and_negative_bits(self) -> None:
        base = noise((4, 3), torch.complex64)
        state = {
            "conj": base.conj(), "neg": noise((3,), torch.complex64).conj().imag, "both": base.conj()[:, 1],
            "tied": base, "turned": noise((2, 5), torch.complex128).mH,
        }  # fmt: skip
        same(self, heal(state), state)

    def test_states_without_tensors(self) -> None:
        for state in ({}, [], None, 5, "text", {"a": [1, (2.5, b"x")]}, (torch.float32, torch.device("cpu"))):
            same(self, heal(state), state)

    def test_a_single_tensor_is_a_state(self) -> None:
        same(self, heal(noise((5, 5))), noise((5, 5)))

    def test_any_number_of_chunks(self) -> None:
        state = {**odd_layouts(), "large": noise((200_000,))}
        sent = [flat_bytes(publish(state, num_chunks=n)) for n in (None, 1, 3, 64)]
        self.assertEqual(len(set(sent)), 1)
        for n in (None, 1, 3, 64, 10**9):
            same(self, heal({"one": noise((2,))}, options={"num_chunks": n}), {"one": noise((2,))})

    def test_rng_states_schedulers_and_optimizers(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=9)
        model(noise((2, 4)).nan_to_num().clamp(-1, 1)).sum().backward()
        adam.step()
        state = {
            "model": model.state_dict(), "optimizer": adam.state_dict(),
            "rng": (torch.get_rng_state(), random.Random(1).getstate()),
            "scheduler": {k: v for k, v in scheduler.state_dict().items() if not k.startswith("_anneal")},
        }  # fmt: skip
        del state["model"]._metadata
        same(self, heal(state), state)


class Ties(Case):
    """What shares memory at the donor crosses once, and shares it again."""

    def sent(self, state: Any) -> int:
        total: int = publish(state).flat.total
        return total

    def test_one_tensor_at_two_places(self) -> None:
        weight = torch.nn.Parameter(noise((100, 100)))
        out = heal({"a": weight, "b": [weight]})
        self.assertIs(out["a"], out["b"][0])
        self.assertEqual(self.sent({"a": weight, "b": [weight]}), 40_000)

    def test_two_tensors_over_one_memory(self) -> None:
        for make in (lambda: noise((100, 100)), lambda: noise((7, 100))[:, 5], lambda: noise((1,)).expand(9)):
            base = make()
            state = {"a": base, "b": base.detach(), "c": torch.nn.Parameter(base.detach()), "d": base.view(torch.int32)}
            out = heal(state)
            same(self, out, state)
            self.assertEqual(len({t.data_ptr() for t in tensors(out)}), 1)
            with torch.no_grad():
                out["a"][0] = 5.0
            self.assertTrue(raw(out["a"]) == raw(out["b"]) == raw(out["c"]) == raw(out["d"]))
            self.assertEqual(self.sent(state), self.sent({"a": base}))

    def test_a_weight_and_its_transposed_twin(self) -> None:
        weight = noise((30, 20))
        out = heal({"w": weight, "t": weight.t()})
        same(self, out, {"w": weight, "t": weight.t()})
        self.assertEqual(out["w"].data_ptr(), out["t"].data_ptr())

    def test_eight_views_of_one_buffer(self) -> None:
        buffer = torch.zeros(16 << 20, dtype=torch.uint8)
        state = {"parts": list(buffer.split(2 << 20)), "all": buffer}
        self.assertLessEqual(self.sent(state), (16 << 20) * 1.01)
        out = heal(state)
        starts = [t.data_ptr() - out["all"].data_ptr() for t in out["parts"]]
        self.assertEqual(starts, [i * (2 << 20) for i in range(8)])

    def test_overlapping_views(self) -> None:
        base = noise((10_000,))
        state = {"a": base[:6000], "b": base[4000:], "c": base[5000:5010].view(2, 5).t()}
        self.assertEqual(self.sent(state), 40_000)
        out = heal(state)
        same(self, out, state)
        self.assertEqual(out["b"].data_ptr() - out["a"].data_ptr(), 16_000)
        self.assertEqual(out["c"].data_ptr() - out["b"].data_ptr(), 4_000)

    def test_a_little_slice_of_a_large_buffer(self) -> None:
        state = {"slice": torch.zeros(16 << 20, dtype=torch.uint8)[4096:5120]}
        self.assertEqual(self.sent(state), 1024)
        self.assertEqual(heal(state)["slice"].untyped_storage().nbytes(), 1024)

    def test_an_expanded_tensor_is_not_unrolled(self) -> None:
        for state in ({"e": torch.ones(1).expand(1 << 40)}, {"e": torch.ones(1, 3).expand(1 << 40, 3)}):
            self.assertLessEqual(self.sent(state), 12)
            out = heal(state)
            self.assertEqual((out["e"].shape, out["e"].stride()), (state["e"].shape, state["e"].stride()))

    def test_a_sliding_window(self) -> None:
        state = {"w": noise((1000,)).unfold(0, 100, 1)}
        self.assertEqual(self.sent(state), 4000)
        out = heal(state)
        same(self, out, state)
        self.assertEqual(out["w"].untyped_storage().nbytes(), 4000)
        own = {"w": torch.zeros(1000).unfold(0, 100, 1)}
        same(self, self.healed(state, own), state)

    def test_two_storages_over_one_memory(self) -> None:
        memory = bytearray(range(200))
        pieces = ((0, 40), (0, 160), (48, 8), (56, 8))
        state = {f"{at}+{n}": torch.frombuffer(memory, dtype=torch.uint8, count=n, offset=at) for at, n in pieces}
        for snapshot in ("small", "all", "none"):
            same(self, heal(state, options={"snapshot": snapshot}), state)

    def test_small_neighbours_in_memory_that_are_no_neighbours_in_torch(self) -> None:
        memory = bytearray(range(200))
        state = [torch.frombuffer(memory, dtype=torch.uint8, count=10, offset=at) for at in range(0, 200, 10)]
        for snapshot in ("small", "all", "none"):
            same(self, heal(state, options={"snapshot": snapshot}), state)

    def test_mixed_sizes_of_elements_in_one_buffer(self) -> None:
        raw_bytes = noise((400,), torch.uint8)
        state = {
            "f4": raw_bytes[4:8].view(torch.float32), "f8": raw_bytes[8:24].view(torch.float64),
            "c16": raw_bytes[32:64].view(torch.complex128), "h": raw_bytes[24:32].view(torch.float16),
            "odd": raw_bytes[101:102], "f8 alone": raw_bytes[200:208].view(torch.float64),
        }  # fmt: skip
        same(self, heal(state), state)
        same(self, publish(state).whole(), state)


class InPlace(Case):
    def test_into_the_same_layout(self) -> None:
        state, own = odd_layouts(), odd_layouts()
        for t in own.values():
            if t.numel():
                t.untyped_storage().fill_(7)
        out = self.healed(state, own)
        same(self, out, state)
        self.assertTrue(all(out[k] is own[k] for k in own))

    def test_into_any_other_layout(self) -> None:
        shape = (4, 3, 6)
        donors = {
            "plain": noise(shape), "turned": noise((6, 3, 4)).permute(2, 1, 0), "gaps": noise((4, 3, 12))[:, :, ::2],
            "expanded": noise((4, 1, 6)).expand(4, 3, 6), "block": noise((9, 9, 9))[1:5, 2:5, :6],
        }  # fmt: skip
        receivers = {
            "plain": lambda: torch.zeros(shape), "turned": lambda: torch.zeros(6, 3, 4).permute(2, 1, 0),
            "middle": lambda: torch.zeros(4, 6, 3).transpose(1, 2), "gaps": lambda: torch.zeros(4, 3, 18)[:, :, 1::3],
            "block": lambda: torch.zeros(9, 9, 9)[1:5, 2:5, 3:],
        }  # fmt: skip
        for donor, state in donors.items():
            for receiver, make in receivers.items():
                with self.subTest(donor=donor, receiver=receiver):
                    own = make()
                    out = self.healed({"t": state}, {"t": own})
                    self.assertIs(out["t"], own)
                    self.assertTrue(raw(own) == raw(state))

    def test_only_the_view_of_a_flat_buffer_is_written(self) -> None:
        for view in (lambda f: f[10:34], lambda f: f.view(10, 10)[2:8, 3:7].flatten(0, 0), lambda f: f[5:77:3]):
            flat = noise((100,), seed=3)
            before = flat.clone()
            own = view(flat)
            state = noise(tuple(own.shape), seed=4)
            same(self, heal({"t": state}, {"t": own})["t"], own)
            self.assertTrue(raw(own) == raw(state))
            untouched = torch.ones(100, dtype=torch.bool)
            view(untouched).fill_(False)
            self.assertTrue(raw(flat[untouched]) == raw(before[untouched]))

    def test_channels_last(self) -> None:
        for one in (torch.contiguous_format, torch.channels_last):
            for other in (torch.contiguous_format, torch.channels_last):
                state = {"w": noise((4, 3, 2, 2)).contiguous(memory_format=one)}
                own = {"w": torch.zeros(4, 3, 2, 2).contiguous(memory_format=other)}
                self.assertTrue(raw(self.healed(state, own)["w"]) == raw(state["w"]))

    def test_every_dtype(self) -> None:
        for dtype in WHOLE_BYTES:
            with self.subTest(str(dtype)), quiet():
                try:
                    state = {"t": noise((3, 4), dtype, seed=1), "u": noise((4, 3), dtype, seed=2)}
                except (RuntimeError, TypeError) as e:
                    self.skipTest(str(e))
                own = {"t": noise((3, 4), dtype, seed=3), "u": noise((3, 4), dtype, seed=4).t()}
                out = self.healed(state, own)
                self.assertEqual([raw(t) for t in tensors(out)], [raw(t) for t in tensors(state)])

    def test_parameters_stay_the_receivers(self) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        out = self.healed({"w": noise((3,)), "f": torch.nn.Parameter(noise((3,)))}, {"w": weight, "f": frozen})
        self.assertIs(out["w"], weight)
        self.assertEqual((weight.requires_grad, frozen.requires_grad), (True, False))
        self.assertTrue(raw(weight) == raw(noise((3,))))

    def test_conjugate_and_negative_bits_on_either_side(self) -> None:
        kinds = {
            "plain": lambda t: t, "conj": lambda t: t.conj(), "neg": lambda t: torch._neg_view(t),
            "both": lambda t: torch._neg_view(t.conj()), "turned": lambda t: t.t().conj().t(),
        }  # fmt: skip
        values = torch.tensor([[1 + 2j, -3 - 4j, 5j], [7.0 + 0j, 0j, -1j]])
        for donor, one in kinds.items():
            for receiver, other in kinds.items():
                with self.subTest(donor=donor, receiver=receiver):
                    own = other(torch.zeros(2, 3, dtype=torch.complex64))
                    bits = own.is_conj(), own.is_neg()
                    self.healed({"t": one(values)}, {"t": own})
                    self.assertTrue(
                        torch.equal(own.resolve_conj().resolve_neg(), one(values).resolve_conj().resolve_neg())
                    )
                    self.assertEqual((own.is_conj(), own.is_neg()), bits)

    def test_expanded_at_both(self) -> None:
        own = torch.zeros(1, 3).expand(5, 3)
        out = self.healed({"t": noise((1, 3)).expand(5, 3)}, {"t": own})
        self.assertTrue(raw(out["t"]) == raw(noise((1, 3)).expand(5, 3)))
        self.assertEqual(out["t"].stride(), (0, 1))

    def test_expanded_at_the_receiver_only(self) -> None:
        own = {"t": torch.zeros(1, 3).expand(5, 3)}
        self.refused({"t": noise((5, 3))}, own, "['t']", "stride (0, 1)", "stride (3, 1)")

    def test_another_dtype_shape_or_kind(self) -> None:
        for state, own in (
            (noise((4,)), noise((4,), torch.int32)),
            (noise((4,)), noise((8,), torch.float16)),
            (noise((2, 6)), noise((3, 4))),
            (noise((2, 6)), noise((12,))),
            (noise((1,)), noise(())),
            (torch.empty(0, 3), torch.empty(0)),
            (torch.empty(0), torch.empty(0, dtype=torch.int64)),
        ):
            both = {"good": noise((3,)), "bad": state}
            mine = {"good": torch.zeros(3), "bad": own}
            words = [
                "['bad']",
                *(w for t in (state, own) for w in (str(tuple(t.shape)), str(t.stride()), str(t.dtype))),
            ]
            error = self.refused(both, mine, *words)
            self.assertEqual(error.keys, ("['bad']",))

    def test_a_tensor_here_and_none_there(self) -> None:
        for theirs in (None, 1, "x", [noise((1,))], {"deeper": noise((1,))}, b"x"):
            self.refused({"a": noise((1,)), "k": theirs}, {"a": torch.zeros(1), "k": torch.zeros(1)}, "['k']")

    def test_memory_that_cannot_be_written(self) -> None:
        for own in (torch.empty(3, device="meta"), torch.zeros(3).to_sparse(), torch.nn.UninitializedParameter()):
            with self.assertRaisesRegex(errors.LayoutError, r"^\['t'\]"):
                heal({"t": noise((3,))}, {"t": own})

    def test_a_fresh_joiner_without_optimizer_state(self) -> None:
        def replica() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = torch.nn.Linear(3, 2)
            return model, torch.optim.Adam(model.parameters())

        def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}

        def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        torch.manual_seed(1)
        donor, joiner = replica(), replica()
        for _ in range(3):
            step(*donor)
        weight = joiner[0].weight
        out = heal(state(*donor), state(*joiner))
        joiner[1].load_state_dict(out["optimizer"])
        self.assertIs(joiner[0].weight, weight)
        same(self, state(*joiner), state(*donor))
        for replica_ in (donor, joiner):
            step(*replica_)
        same(self, state(*joiner), state(*donor))

    def test_matched_by_key_not_by_position(self) -> None:
        own = OrderedDict(b=torch.zeros(2), a=torch.zeros(3))
        out = self.healed({"a": noise((3,)), "b": noise((2,))}, own)
        self.assertEqual(list(out), ["a", "b"])
        self.assertIs(out["a"], own["a"])

    def test_keys_of_either_side_alone(self) -> None:
        mine = noise((5,), seed=8)
        own = {"both": torch.zeros(2), "here": mine, "deep": {"x": [torch.zeros(1), 3], "y": 1}, 7: torch.zeros(1)}
        state = {"both": noise((2,)), "there": noise((4,), seed=2), "deep": {"y": 2}}
        snapshot = publish(state)
        made = plan(snapshot, own)
        self.assertEqual(sorted(made.only_here), ["['deep']['x'][0]", "['here']", "[7]"])
        self.assertTrue(made.in_place)
        self.assertEqual(made.keys, ("['both']",))
        snapshot.copy_to(made.intervals)
        out = made.finish(load_blob)
        same(self, out, state)
        self.assertTrue(raw(mine) == raw(noise((5,), seed=8)))

    def test_nodes_are_rebuilt_from_the_receivers_own(self) -> None:
        own = {"p": Pair(torch.zeros(2), [torch.zeros(3)])}
        state = {"p": Pair(noise((2,)), [noise((3,))])}
        out = self.healed(state, own)
        same(self, out, state)
        with self.assertRaisesRegex(errors.LayoutError, r"^\['p'\].*Pair"):
            plan(publish(state))

    def test_random_pairs_of_states(self) -> None:
        for seed in range(60):
            with self.subTest(seed=seed):
                rng = random.Random(seed)
                shapes = {str(i): tuple(rng.randrange(4) for _ in range(rng.randrange(3))) for i in range(12)}
                state = {k: self.laid(rng, s, seed) for k, s in shapes.items() if rng.random() < 0.8}
                own = {k: self.laid(rng, s, seed + 1) for k, s in shapes.items() if rng.random() < 0.8}
                kept = {k: raw(own[k]) for k in own.keys() - state.keys()}
                out = heal(state, own)
                self.assertEqual(list(out), list(state))
                for k in state:
                    self.assertTrue(raw(out[k]) == raw(state[k]), k)
                    self.assertEqual(out[k].stride(), own[k].stride() if k in own else state[k].stride())
                self.assertEqual(kept, {k: raw(own[k]) for k in kept})

    def laid(self, rng: random.Random, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        kind = rng.randrange(4)
        if kind == 1:
            return noise(shape[::-1], seed=seed).permute(*range(len(shape))[::-1]) if shape else noise((), seed=seed)
        if kind == 2:
            return noise((*shape, 3), seed=seed)[..., 1]
        if kind == 3:
            whole = noise((300,), seed=seed)
            at = rng.randrange(200)
            return whole[at : at + torch.Size(shape).numel()].view(shape)
        return noise(shape, seed=seed)


class Limits(Case):
    def test_max_bytes(self) -> None:
        state = {"a": noise((1000,)), "b": noise((10,))}
        own = {"a": torch.zeros(1000), "b": torch.zeros(10)}
        for given in (MISSING, own):
            self.assertIsNotNone(heal(state, given, max_bytes=4040))
            with self.assertRaisesRegex(errors.LayoutError, "4040 bytes.*max_bytes is 4039") as caught:
                heal(state, given, max_bytes=4039)
            self.assertEqual(caught.exception.bytes_total, 4040)

    def test_memory_at_hand(self) -> None:
        state = {"a": noise((1000,)), "b": noise((10,))}
        with mock.patch.object(plans, "memory_at_hand", return_value=3999):
            with self.assertRaisesRegex(errors.LayoutError, "4040 bytes .* 3999 are at hand"):
                heal(state)
            heal(state, {"a": torch.zeros(1000)})  # in place little is needed
            heal(state, max_bytes=5000)  # the caller knows better
        with mock.patch.object(plans, "memory_at_hand", return_value=None):
            heal(state)

    def test_nothing_is_allocated_before_the_check(self) -> None:
        snapshot = publish({"a": noise((1000,))})
        with mock.patch.object(torch, "empty", side_effect=AssertionError), self.assertRaises(errors.LayoutError):
            plan(snapshot, max_bytes=10)


class Blobs(Case):
    def test_a_plan_that_may_not_load(self) -> None:
        sparse = {"s": noise((3,)).to_sparse()}
        snapshot = publish(sparse, weights_only=False)
        with self.assertRaisesRegex(errors.LayoutError, r"^\['s'\].*safe loader"):
            plan(snapshot, loader=False)

    def test_the_loader_gets_the_bytes_and_the_path(self) -> None:
        got: list[Any] = []
        snapshot = publish({"k": [Odd(3)]}, weights_only=False)
        made = plan(snapshot)
        snapshot.copy_to(made.intervals)
        out = made.finish(lambda data, path: got.append(data) or torch.load(_file(data), weights_only=False))
        self.assertEqual(out, {"k": [Odd(3)]})
        self.assertIs(type(got[0]), bytes)


class Odd:
    """A class that needs a loader."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def _file(data: bytes) -> Any:
    import io

    return io.BytesIO(data)


class Untouched(Case):
    def test_the_donor_is_not_changed(self) -> None:
        state = {**odd_layouts(), "w": torch.nn.Parameter(noise((3,)))}
        before = copy.deepcopy({k: raw(v) for k, v in state.items()})
        pointers = {k: v.data_ptr() for k, v in state.items()}
        heal(state, {k: torch.zeros_like(v) for k, v in odd_layouts().items()})
        self.assertEqual({k: raw(v) for k, v in state.items()}, before)
        self.assertEqual({k: v.data_ptr() for k, v in state.items()}, pointers)
