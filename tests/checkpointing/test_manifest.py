# SPDX-License-Identifier: BSD-3-Clause
"""The document about a state. What must hold: what was written is read back; whatever else arrives is an
IntegrityError or a LayoutError, found before anything is allocated, imported or called."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import random
import sys
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests import load
from tests.checkpointing._states import MISSING, noise, plan, publish

errors = load("_errors")
manifest = load("checkpointing._manifest")
plans = load("checkpointing._plan")

TYPED = (errors.IntegrityError, errors.LayoutError)


def state() -> dict[str, Any]:
    """Something of everything: ties, gaps, an offset that needs a lead, bits, an empty one, large and small."""
    flat = noise((400,), seed=1)
    weight = torch.nn.Parameter(noise((3, 4), seed=2))
    return {
        "large": noise((300, 300), seed=3), "weight": weight, "tied": weight, "alias": weight.detach().t(),
        "flat": [flat[5:9], flat[9:40].view(torch.int32), flat[60:100]], "column": noise((9, 9), seed=4)[:, 2],
        "expanded": noise((1,), seed=5).expand(7), "empty": torch.empty(3, 0, 2),
        "conj": noise((2,), torch.complex64).conj(),
        "neg": noise((2,), torch.complex64).conj().imag, "bool": noise((5,), torch.bool),
        "step": torch.tensor(3.0), "double": noise((2,), torch.float64),
        5: {(1, "a"): b"x", "n": 10**30}, "none": None, "lr": 1e-3,
    }  # fmt: skip


GOOD = publish(state(), num_chunks=5).document


def fields() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOOD)
    return found


def written(found: Any) -> bytes:
    return json.dumps(found).encode()


@contextlib.contextmanager
def nothing_allocated() -> Iterator[None]:
    """Fail when a tensor of any size is made."""
    refuse = mock.Mock(side_effect=AssertionError("a tensor was made"))
    names = ("empty", "zeros", "empty_strided", "frombuffer", "tensor")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch, name, refuse))
        yield


class RoundTrip(unittest.TestCase):
    def test_what_was_written_is_read(self) -> None:
        snapshot = publish(state(), num_chunks=5)
        read = manifest.parse(snapshot.document)
        wrote = snapshot.manifest
        for field in dataclasses.fields(manifest.Manifest):
            if field.name not in ("tree", "specs"):
                self.assertEqual(getattr(read, field.name), getattr(wrote, field.name), field.name)
        self.assertEqual(read.tree, json.loads(json.dumps(wrote.tree)))
        for ours, theirs in zip(read.specs, wrote.specs, strict=True):
            for name in manifest.Spec.__slots__:
                self.assertEqual(getattr(ours, name), getattr(theirs, name), name)
        self.assertEqual(read.to_bytes(), snapshot.document)
        self.assertEqual(read.flat().total, sum(wrote.sizes))

    def test_the_state_of_this_test_has_something_of_everything(self) -> None:
        read = manifest.parse(GOOD)
        self.assertTrue(read.large and read.leads and read.offsets and -1 in read.regions)
        flags = {flag for spec in read.specs for flag in (1, 2, 4, 8, 16) if spec.flags & flag}
        self.assertEqual(flags, {1, 2, 4, 8, 16})

    def test_nothing_to_send(self) -> None:
        for empty in ({}, None, [1, "a"], {"e": torch.empty(0)}):
            read = manifest.parse(publish(empty).document)
            self.assertEqual((read.sizes, read.ends, read.sums, read.flat().total), ([], [], [], 0))

    def test_reading_allocates_no_tensor(self) -> None:
        with nothing_allocated():
            manifest.parse(GOOD)


class Refused(unittest.TestCase):
    def refuses(self, document: bytes, kind: type[Exception] = errors.IntegrityError) -> Exception:
        with nothing_allocated(), self.assertRaises(kind) as caught:
            manifest.parse(document)
        return caught.exception

    def test_another_protocol_or_byte_order(self) -> None:
        for change in (
            {"protocol": 2},
            {"protocol": None},
            {"protocol": "1"},
            {"byteorder": "middle"},
            {"byteorder": 3},
        ):
            error = self.refuses(written({**fields(), **change}), errors.LayoutError)
            self.assertIn("run the same version on both sides", str(error))

    def test_a_dtype_that_this_torch_does_not_have(self) -> None:
        found = fields()
        found["specs"][0][0] = "float1024"
        self.assertRegex(
            str(self.refuses(written(found), errors.LayoutError)), "'float1024'.*torch .* here does not know"
        )

    def test_no_json_at_all(self) -> None:
        for document in (b"", b"{", b"\xff\xfe", b"nul", b"[]", b'"x"', b"1", b"\x00" * 100, b"<html>", b"{}" * 2):
            self.refuses(document)
        self.refuses(b"{}", errors.LayoutError)  # no protocol: another program's

    def test_every_field_dropped(self) -> None:
        for name in fields():
            found = fields()
            del found[name]
            self.refuses(written(found), errors.LayoutError if name in ("protocol", "byteorder") else TYPED[0])

    def test_every_field_of_another_type(self) -> None:
        for name in fields():
            if name == "tree":
                continue  # any JSON is a tree until it is matched
            for value in (None, True, 1.5, "x", {}, [[]], [None], ["x"], [1.0], [True], -1, [-1], 1 << 63, [1 << 63]):
                found = fields()
                number_of_step = name == "step" and type(value) is int
                nothing = name in ("leads", "dtensors") and value == {}
                if found[name] == value or number_of_step or nothing or (name == "torch" and value == "x"):
                    continue
                with self.subTest(field=name, value=value), nothing_allocated(), self.assertRaises(TYPED):
                    manifest.parse(written({**found, name: value}))

    def test_numbers_out_of_range(self) -> None:
        def change(name: str, at: int, value: Any) -> None:
            found = fields()
            found[name][at] = value
            with self.subTest(field=name, at=at, value=value):
                self.refuses(written(found))

        count = len(fields()["sizes"])
        for at in (0, -1):
            for value in (-1, 0.0, True, None, 1 << 63, 10**30, "1"):
                for name in ("sizes", "regions", "offsets", "kinds", "ends", "sums"):
                    change(name, at, value)
            change("regions", at, count + 1)
            change("kinds", at, len(fields()["specs"]))
            change("sums", at, 1 << 32)
            change("ends", at, 0)
            change("offsets", at, 1 << 40)
            change("sizes", at, 1)
            change("sizes", at, 1 << 40)

    def test_leads_out_of_range(self) -> None:
        for leads in ([[0]], [[0, 16]], [[99, 1]], [[0, -1]], [[0, 1, 2]], [["0", 1]], [0], {"0": 1}, [[True, 1]]):
            self.refuses(written({**fields(), "leads": leads}))

    def test_kinds_of_tensors_that_do_not_exist(self) -> None:
        good = fields()["specs"][0]
        for at, values in (
            (1, ([-1], [1.0], 3, None, [1] * 65, [1 << 63])),
            (2, ([-1], ["1"], [], [1] * 65)),
            (3, (None, 1.5, "1")),
        ):
            for value in values:
                row = list(good)
                row[at] = value
                self.refuses(written({**fields(), "specs": [row, *fields()["specs"][1:]]}))
        for row in ([], good[:3], [*good, 1], None, 5, {}):
            self.refuses(written({**fields(), "specs": [row, *fields()["specs"][1:]]}))

    def test_places_that_cannot_be(self) -> None:
        found = fields()
        filled = next(n for n, region in enumerate(found["regions"]) if region)
        empty = next(n for n, region in enumerate(found["regions"]) if not region)
        for name, number, value in (("regions", filled, 0), ("regions", empty, 1), ("offsets", empty, 4)):
            changed = copy.deepcopy(found)
            changed[name][number] = value
            self.refuses(written(changed))
        number = next(n for n, offset in enumerate(found["offsets"]) if offset)
        found["offsets"][number] += 1  # not aligned
        self.refuses(written(found))

    def test_chunks_that_do_not_cover_the_state(self) -> None:
        found = fields()
        ends, sums = found["ends"], found["sums"]
        for bad in (ends[:-1], ends[::-1], [*ends, ends[-1] + 1], [*ends, ends[-1]], [], [ends[0], *ends]):
            self.refuses(written({**found, "ends": bad, "sums": (sums * 2)[: len(bad)]}))
        self.refuses(written({**found, "sums": sums[:-1]}))

    def test_deep_nesting(self) -> None:
        for depth in (2_000, 100_000):
            for opening, closing in (('["l",[', "]]"), ('{"a":', "}"), ("[", "]")):
                tree = opening * depth + "1" + closing * depth
                document = GOOD.replace(b'"tree":', b'"tree":' + tree.encode() + b',"was":', 1)
                with self.assertRaises(TYPED):
                    plans.Plan(manifest.parse(document), MISSING)

    def test_constants_and_numbers_that_json_does_not_have(self) -> None:
        for text in (b"NaN", b"Infinity", b"-Infinity", b"9" * 5000):
            for field in (b'"large":', b'"step":'):
                document = GOOD.replace(field, field + text + b',"was":', 1)
                if text.isdigit() and field == b'"step":':
                    continue  # a step may be any number; the receiver compares it with its own
                self.refuses(document)


class Mutations(unittest.TestCase):
    """Whatever arrives in place of a good document: the two errors, or a manifest that a plan can judge."""

    def survive(self, document: bytes, own: Any) -> None:
        try:
            with nothing_allocated():
                read = manifest.parse(document)
        except TYPED:
            return
        try:
            made = plans.Plan(read, own, max_bytes=4 << 20)
            made.finish(lambda data, path: (data, path))
        except TYPED:
            pass

    def test_bytes(self) -> None:
        rng = random.Random(1)
        before = set(sys.modules)
        own = state()
        for number in range(3_000):
            document = bytearray(GOOD)
            for _ in range(rng.choice((1, 1, 2, 8))):
                at = rng.randrange(len(document))
                kind = rng.randrange(4)
                if kind == 0:
                    document[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    document[at] = rng.choice(b'0123456789[]{},:"-tpnld')
                elif kind == 2:
                    del document[at : at + rng.randint(1, 30)]
                else:
                    document = document[: rng.choice((at, len(document) // 2, len(document) - 1))] or bytearray(b"{")
            with self.subTest(number):
                self.survive(bytes(document), own if rng.random() < 0.5 else MISSING)
        self.assertEqual(set(sys.modules) - before, set())

    def test_values(self) -> None:
        rng = random.Random(2)
        own = state()
        for number in range(3_000):
            found = fields()
            for _ in range(rng.choice((1, 1, 2))):
                self.mutate(rng, found)
            with self.subTest(number):
                self.survive(written(found), own if rng.random() < 0.5 else MISSING)

    def mutate(self, rng: random.Random, found: Any) -> None:
        at, key = found, rng.choice(list(found))
        while isinstance(at[key], (list, dict)) and at[key] and rng.random() < 0.85:
            at = at[key]
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        value = at[key]
        choices: list[Any] = [
            None,
            -1,
            0,
            1,
            2,
            3,
            16,
            1 << 62,
            1.0,
            True,
            "x",
            "t",
            "p",
            [],
            {},
            "int8",
            "qint8",
            "bool",
        ]
        if type(value) is int:
            choices += [value + 1, value - 1, value * 2, value ^ 8, value ^ 4, value ^ 16]
        if rng.random() < 0.15:
            del at[key]
        else:
            at[key] = rng.choice(choices)


class FromTheWire(unittest.TestCase):
    def test_a_huge_expanded_tensor_costs_nothing(self) -> None:
        found = fields()
        number = next(i for i, row in enumerate(found["specs"]) if row[1] == [7])
        found["specs"][number][1] = [1 << 40]
        made = plans.Plan(manifest.parse(written(found)), MISSING, max_bytes=4 << 20)
        self.assertEqual(made.finish(lambda data, path: None)["expanded"].shape, (1 << 40,))

    def test_gaps_count_as_memory(self) -> None:
        found = fields()
        number = next(i for i, row in enumerate(found["specs"]) if row[3] & manifest.PACKED)
        found["specs"][number][2] = [1 << 40]
        with self.assertRaisesRegex(errors.LayoutError, "bytes have to be allocated"):
            plans.Plan(manifest.parse(written(found)), MISSING)
        with self.assertRaisesRegex(errors.LayoutError, "max_bytes is 1000000"):
            plans.Plan(manifest.parse(written(found)), MISSING, max_bytes=1_000_000)

    def test_a_plan_of_a_good_document(self) -> None:
        snapshot = publish(state(), num_chunks=5)
        made = plan(snapshot)
        snapshot.copy_to(made.intervals)
        self.assertEqual(made.only_here, [])
