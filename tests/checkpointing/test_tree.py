# SPDX-License-Identifier: BSD-3-Clause
"""The tagged JSON. What must hold: what was encoded comes back with the same types and values; what cannot be
carried goes to the leaf callback or is refused; and whatever JSON arrives, only the documented errors come out."""

from __future__ import annotations

import contextlib
import copy
import datetime
import enum
import json
import math
import random
import struct
import sys
import unittest
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from tests import load
from tests.checkpointing._states import same

errors = load("_errors")
tree = load("checkpointing._tree")

try:
    import numpy
except ModuleNotFoundError:
    numpy = None

Point = namedtuple("Point", ["x", "y"])


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@dataclass
class Moments:
    mean: Any
    spread: Any


class NotALeaf(Exception):
    """Raised by the leaf callback of a test in which nothing may reach it."""


def no_leaf(obj: Any, path: Any) -> Any:
    raise NotALeaf(f"{tree.show_path(path)}: {obj!r}")


def float_of(bits: int) -> float:
    value: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return value


def over_the_wire(node: Any) -> Any:
    return json.loads(json.dumps(node, allow_nan=False).encode("ascii"))


def trip(obj: Any, own: Any = tree.MISSING) -> Any:
    return tree.build(over_the_wire(tree.encode(obj, no_leaf)), None, own)


PLAIN = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**3000, -(10**3000),
    0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308, 0.1, math.inf, -math.inf, math.nan,
    float_of(0x7FF8DEADBEEF0001), float_of(0xFFF8000000000001),
    0j, complex(-0.0, 0.0), complex(math.nan, -math.inf), complex(1, float_of(0x7FF8000000000123)),
    "", "text", "\x00\n\"\\", "ünï ☃ 😀", "\ud800", "\udfff lone", "😀\udc00", "\ud83d\ude00",
    b"", b"\x00\xff", bytes(range(256)), bytearray(b"ab\x00"), bytearray(),
    torch.float32, torch.bfloat16, torch.bool, torch.complex64,
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
    torch.Size([]), torch.Size([2, 0, 3]),
]  # fmt: skip

CONTAINERS = [
    [], (), {}, set(), frozenset(), deque(), OrderedDict(), defaultdict(list), Counter(),
    [1, [2, (3, [4])]], (None,), ((),), {"a": {"b": {}}},
    {1, 2, "x", None, b"y", (1, 2), frozenset({3})}, frozenset({1.5, "a"}),
    {1: "int", "1": "str", 1.5: "float", None: "none", b"b": "bytes", (1, ("a", None)): "tuple"},
    {True: "true", False: "false"}, {1: "one", 0: "zero"}, {10**30: "big", -0.0: "zero"},
    {torch.float32: "dtype", torch.device("cpu"): "device", torch.Size([1]): "size", frozenset({1}): "set"},
    {"\ud800": 1, "": 2, "t": 3}, {"\ud83d\ude00": 1, "😀": 2},
    OrderedDict([("z", 1), ("a", 2), (3, [4])]), OrderedDict([("a", 2), ("z", 1)]),
    defaultdict(None, {"a": 1}), defaultdict(int, {(1, 2): 3}), defaultdict(list, {"a": [1]}),
    Counter("abracadabra"), Counter({1: -5, "x": 2.5}),
    deque([1, 2, 3]), deque([1, 2], maxlen=2), deque(maxlen=0), deque([[1]], maxlen=9),
    ["t", 0], ["p", 0], ["n", "x", []], ["d", {}], ["int", "0x1"], {"t": ["t", 1]},
]  # fmt: skip


class RoundTrip(unittest.TestCase):
    def test_plain_leaves(self) -> None:
        for obj in PLAIN:
            with self.subTest(repr(obj)[:60]):
                same(self, trip(obj), obj)
                same(self, trip({"a": [obj]}), {"a": [obj]})

    def test_containers(self) -> None:
        for obj in CONTAINERS:
            with self.subTest(repr(obj)[:60]):
                same(self, trip(obj), obj)
                same(self, trip([obj, {"k": obj}]), [obj, {"k": obj}])

    def test_every_factory_of_a_defaultdict(self) -> None:
        for factory in (None, list, dict, set, tuple, int, float, str, bool, bytes, complex):
            same(self, trip(defaultdict(factory, {"a": 1})), defaultdict(factory, {"a": 1}))

    def test_every_dtype(self) -> None:
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            self.assertIs(trip(dtype), dtype)

    def test_random_states(self) -> None:
        for seed in range(300):
            with self.subTest(seed=seed):
                obj = self.random_state(random.Random(seed), 4)
                same(self, trip(obj), obj)

    def random_state(self, rng: random.Random, depth: int) -> Any:
        def below() -> Any:
            return self.random_state(rng, depth - 1)

        def key() -> Any:
            return rng.choice(("a", "b", 1, 2, -0.5, None, b"k", (1, "x"), True, 10**20, rng.randrange(100)))

        kind = rng.randrange(9) if depth else 8
        count = rng.randrange(4)
        items = [(key(), below()) for _ in range(count)] if kind in (2, 3, 4) else []
        if kind in (0, 1):
            return (list, tuple)[kind](below() for _ in range(count))
        if kind in (2, 3):
            return (dict, OrderedDict)[kind - 2](items)
        if kind == 4:
            return defaultdict(rng.choice((list, int, None)), items)
        if kind == 5:
            return deque((below() for _ in range(count)), maxlen=rng.choice((None, 3, 9)))
        if kind == 6:
            return Counter(rng.choices("abc", k=count))
        if kind == 7:
            return set(rng.sample(range(50), count))
        return rng.choice(PLAIN)

    def test_the_encoding_does_not_touch_the_state(self) -> None:
        state = {"a": [1, {"b": (2, deque([3], maxlen=2))}]}
        before = copy.deepcopy(state)
        tree.encode(state, no_leaf)
        same(self, state, before)


class Leaves(unittest.TestCase):
    """What goes to the callback, and comes back through one."""

    def test_tensors_keep_their_places(self) -> None:
        tensors = [torch.zeros(1), torch.nn.Parameter(torch.zeros(2))]
        state = {"a": tensors[0], "b": [tensors[1], {1: tensors[0]}]}
        seen = []

        def leaf(obj: Any, path: Any) -> Any:
            seen.append(tree.show_path(path))
            return ["t", next(i for i, t in enumerate(tensors) if t is obj)]

        node = over_the_wire(tree.encode(state, leaf))
        self.assertEqual(seen, ["['a']", "['b'][0]", "['b'][1][1]"])
        out = tree.build(node, lambda tag, number: (tag, number), tree.MISSING)
        self.assertEqual(out, {"a": ("t", 0), "b": [("t", 1), {1: ("t", 0)}]})

    def test_what_is_not_plain_is_left_to_the_callback(self) -> None:
        others = [Colour.RED, Text("a"), datetime.date(2024, 1, 2), lambda: 0, object(), Moments(1, 2), int, {}.keys()]
        others += [
            defaultdict(lambda: 0),
            UserDict(),
            torch.Generator(),
            range(3),
            memoryview(b"a"),
            type("D", (dict,), {})(),
        ]
        if numpy is not None:
            others += [numpy.float64(1.0), numpy.int64(1), numpy.zeros(2), numpy.bool_(True), numpy.str_("a")]
        for obj in others:
            with self.subTest(type(obj).__name__):
                leaf = mock.Mock(return_value=["p", 0])
                self.assertEqual(tree.encode({"k": obj}, leaf), ["d", {"k": ["p", 0]}])
                leaf.assert_called_once()
                self.assertIs(leaf.call_args.args[0], obj)
                self.assertEqual(tree.show_path(leaf.call_args.args[1]), "['k']")

    def test_keys_that_cannot_be_carried_are_refused(self) -> None:
        for key in (Colour.RED, Text("a"), datetime.date(2024, 1, 2), object(), (1, object()), torch.zeros(1)):
            for kind in (dict, OrderedDict, Counter):
                with self.subTest(repr(key)), self.assertRaisesRegex(errors.LayoutError, r"^\['outer'\].* key of type"):
                    tree.encode({"outer": kind({key: 1})}, no_leaf)

    def test_paths_name_the_fields_of_a_namedtuple(self) -> None:
        seen = []
        tree.encode({"p": Point(1, torch.zeros(1))}, lambda _, path: seen.append(tree.show_path(path)) or ["t", 0])
        self.assertEqual(seen, ["['p'].y"])
        self.assertEqual(tree.show_path(None), "the state itself")


class Registered(unittest.TestCase):
    """Nodes that pytree knows: from the receiver's own, or from a class that it has allowed; never by name."""

    @classmethod
    def setUpClass(cls) -> None:
        pytree.register_pytree_node(
            Moments, lambda m: ([m.mean, m.spread], "context"), lambda children, _: Moments(*children)
        )
        cls.addClassCleanup(pytree.SUPPORTED_NODES.pop, Moments)
        for registry in ("SERIALIZED_TYPE_TO_PYTHON_TYPE", "SUPPORTED_SERIALIZED_TYPES"):
            kept = getattr(pytree, registry, None)
            if kept is not None:
                cls.addClassCleanup(
                    lambda kept=kept: [kept.pop(k) for k in [*kept] if k is Moments or kept[k] is Moments]
                )

    def test_rebuilt_from_the_receivers_own(self) -> None:
        for obj, own in (
            (Point(1, [2]), Point(None, None)),
            (Moments([1], {"a": Point(1, 2)}), Moments(0, {"a": Point(0, 0)})),
            (torch.return_types.max((torch.tensor(1), torch.tensor(2))), torch.max(torch.zeros(1, 1), 0)),
        ):
            node = over_the_wire(tree.encode({"k": obj}, lambda leaf, _: ["t", int(leaf)]))
            out = tree.build(node, lambda _, number: torch.tensor(number), {"k": own})
            self.assertIs(type(out["k"]), type(obj))
            self.assertEqual(out["k"], obj)

    def test_a_namedtuple_that_was_allowed(self) -> None:
        with torch.serialization.safe_globals([Point]):
            same(self, trip({"k": Point(1, (2,))}), {"k": Point(1, (2,))})
            same(self, trip({Point(1, 2): 3}), {Point(1, 2): 3})

    def test_otherwise_refused_by_key(self) -> None:
        for obj, own in (
            (Point(1, 2), tree.MISSING),
            (Point(1, 2), (1, 2)),
            (Point(1, 2), Moments(1, 2)),
            (Moments(1, 2), Point(1, 2)),
            (Moments(1, 2), tree.MISSING),
        ):
            given = own if own is tree.MISSING else {"k": own}
            with self.assertRaisesRegex(errors.LayoutError, r"^\['k'\].*(Point|Moments)"):
                trip({"k": obj}, given)
        with torch.serialization.safe_globals([Moments]), self.assertRaises(errors.LayoutError):
            trip(Moments(1, 2))  # allowed, and still no namedtuple: its constructor may do anything

    def test_another_number_of_fields(self) -> None:
        node = over_the_wire(tree.encode({"k": Point(1, 2)}, no_leaf))
        node[1]["k"][2].append(3)
        with self.assertRaisesRegex(errors.LayoutError, "3 fields, the receiver's 2"):
            tree.build(node, None, {"k": Point(0, 0)})

    def test_a_name_in_the_text_imports_and_calls_nothing(self) -> None:
        name = "this_module_is_never_imported.Class"
        for text in (name, "os.system", "builtins.eval", "antigravity.x", ""):
            before = set(sys.modules)
            with self.assertRaises(errors.LayoutError):
                tree.build(["n", text, ["echo"]], None, tree.MISSING)
            self.assertEqual(set(sys.modules) - before, set())


class Depth(unittest.TestCase):
    def nested(self, depth: int, wrap: Any) -> Any:
        obj: Any = 1
        for _ in range(depth):
            obj = wrap(obj)
        return obj

    WRAPS = (
        lambda obj: [obj], lambda obj: (obj,), lambda obj: {"k": obj}, lambda obj: {1: obj},
        lambda obj: OrderedDict(k=obj), lambda obj: deque([obj]), lambda obj: defaultdict(list, k=obj),
    )  # fmt: skip

    def test_as_deep_as_the_limit_on_both_sides(self) -> None:
        for wrap in self.WRAPS:
            obj = self.nested(tree.MAX_DEPTH, wrap)
            self.assertEqual(trip(obj), obj)
            with self.assertRaisesRegex(errors.LayoutError, "nested more than"):
                tree.encode(wrap(obj), no_leaf)

    def test_keys_count_as_well(self) -> None:
        key = self.nested(tree.MAX_DEPTH + 5, lambda obj: (obj,))
        with self.assertRaises(errors.LayoutError):
            tree.encode({key: 1}, no_leaf)

    def test_a_state_that_contains_itself(self) -> None:
        for obj in ([], {}, deque(), OrderedDict()):
            obj.append(obj) if isinstance(obj, (list, deque)) else obj.update(k=obj)
            with self.assertRaisesRegex(errors.LayoutError, "contain themselves"):
                tree.encode(obj, no_leaf)
            obj.clear()

    def test_deeper_json_is_refused(self) -> None:
        for depth in (tree.MAX_DEPTH + 2, 500):
            for wrap in (
                lambda node: ["l", [node]], lambda node: ["d", {"k": node}], lambda node: ["map", [[1, node]]],
                lambda node: ["map", [[node, 1]]], lambda node: ["n", "x", [node]],
            ):  # fmt: skip
                with self.assertRaises((tree.Malformed, errors.LayoutError, RecursionError)):
                    tree.build(self.nested(depth, wrap), None, tree.MISSING)


class Hostile(unittest.TestCase):
    """Whatever JSON arrives: ``build``, ``check`` and ``children`` give something or one of the documented errors."""

    ALLOWED = (*tree.BUILD_ERRORS, errors.LayoutError)

    def visit(self, node: Any, own: Any) -> None:
        def tensor(tag: str, number: Any) -> Any:
            if type(number) is not int:
                raise tree.Malformed("a number")
            return torch.zeros(1)

        with contextlib.suppress(*self.ALLOWED):
            tree.build(node, tensor, own)
        with contextlib.suppress(*self.ALLOWED):
            self.walk(node, own)

    def walk(self, node: Any, own: Any, depth: int = 0) -> None:
        if type(node) is list and node and node[0] not in ("t", "p"):
            tree.check(node, own, None)
        mine = None if own is tree.MISSING else tree.own_children(own)
        for key, child in tree.children(node):
            self.walk(child, tree.MISSING if mine is None else mine.get(key, tree.MISSING), depth + 1)

    def test_mutations_of_a_good_one(self) -> None:
        state = {
            "plain": PLAIN[:35], "containers": CONTAINERS, "point": Point(1, torch.zeros(1)),
            "dtypes": [torch.float32, torch.device("cpu")], "tensors": [torch.zeros(1)] * 3, 5: {(1, "x"): b"y"},
        }  # fmt: skip
        good = json.dumps(tree.encode(state, lambda *_: ["t", 0]))
        rng = random.Random(11)
        before = set(sys.modules)
        parts = [json.dumps(found) for found, _, _ in self.slots([json.loads(good)])]
        for _ in range(10_000):
            # mostly a subtree, so that the mutation hits close to the root
            node = self.mutated(rng, json.loads(good if rng.random() < 0.02 else rng.choice(parts)))
            self.visit(node, state if rng.random() < 0.5 else tree.MISSING)
        self.assertEqual(set(sys.modules) - before, set())

    def slots(self, node: Any) -> list[tuple[Any, Any, Any]]:
        """Every value below ``node`` with the container and the key that it has there."""
        out = []
        stack = [node]
        while stack:
            at = stack.pop()
            pairs = enumerate(at) if type(at) is list else at.items() if type(at) is dict else ()
            for key, value in pairs:
                out.append((value, at, key))
                stack.append(value)
        return out

    def mutated(self, rng: random.Random, node: Any) -> Any:
        holder = [node]
        for _ in range(rng.randint(1, 3)):
            slots = self.slots(holder)
            value, at, key = rng.choice(slots)
            kind = rng.randrange(4)
            if kind == 0:
                at[key] = copy.deepcopy(rng.choice(JUNK))
            elif kind == 1:
                at[key] = copy.deepcopy(rng.choice(slots)[0])
            elif kind == 2 and at is not holder:
                del at[key]
            elif type(value) is list:
                value.insert(rng.randint(0, len(value)), copy.deepcopy(rng.choice(JUNK)))
        return holder[0]

    def test_odd_nodes(self) -> None:
        for tag in (
            "t",
            "p",
            "n",
            "l",
            "d",
            "dq",
            "map",
            "od",
            "dd",
            "count",
            "int",
            "f",
            "c",
            "b",
            "dtype",
            "dev",
            "x",
        ):
            for body in ([], [None], [[]], [{}], ["x"], [1], [[1]], [[[1]]], [["a", "b"]], [1, 2, 3], [None, [], {}]):
                self.visit([tag, *body], tree.MISSING)
        for node in ([], [[]], [{}], [None], [["t", 0]], {}, ["dq", -1, []], ["size", ["x"]], ["set", [["l", []]]]):
            self.visit(node, tree.MISSING)

    def test_unknown_names(self) -> None:
        for node in (["dtype", "float1024"], ["dtype", 3], ["dtype", "nn"]):
            with self.assertRaisesRegex(errors.LayoutError, "torch .* here does not know"):
                tree.build(node, None, tree.MISSING)
        with self.assertRaises(tree.Malformed):
            tree.build(["t", 0], None, tree.MISSING)  # a tensor where none may be


JUNK = [
    None, True, 0, -1, 2**70, 1.5, "", "x", "0x", "ff" * 8, "list", "float32", "cpu", "cuda:99", [], {}, [[]], [None],
    ["t", 0], ["t", "0"], ["n", "os.system", ["x"]], ["dd", "eval", []], ["map", [[["l", []], 1]]], ["dq", -5, []],
    ["int", "9" * 9000], ["dev", "evil"], ["f", "00"], ["b", "*"], {"a": ["t"]}, "t", "p", "n", "map", "d", "dq",
]  # fmt: skip


class OwnChildren(unittest.TestCase):
    """The receiver's children have the keys that the donor's node gives."""

    def test_alike(self) -> None:
        for obj in (
            {"a": 1, 2: 3, (1, 2): 4}, OrderedDict(a=1), defaultdict(list, a=[1]), [1, 2], (1, 2), deque([1, 2], 5),
            Point(1, 2), Counter("aab"), torch.Size([1, 2]),
        ):  # fmt: skip
            with self.subTest(repr(obj)):
                node = over_the_wire(tree.encode(obj, no_leaf))
                own = tree.own_children(obj)
                self.assertEqual([key for key, _ in tree.children(node)], list(own))

    def test_leaves_have_none(self) -> None:
        for obj in (None, 1, "text", b"b", torch.zeros(2), {1, 2}, object()):
            self.assertIsNone(tree.own_children(obj))
        for node in (None, 1, "text", ["f", "00"], ["int", "0x1"], []):
            self.assertEqual(list(tree.children(node)), [])
