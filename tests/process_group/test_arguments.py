# SPDX-License-Identifier: BSD-3-Clause
"""What may be asked of a group: numbers that make no sense are named, whatever stands for an int is one."""

from __future__ import annotations

import unittest
from typing import Any

import torch

from tests import load

arguments = load("process_group._arguments")
errors = load("_errors")
ops = load("process_group._ops")

HERE = "host:29500/x"


class Index:
    """As an integer of numpy's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Sense(unittest.TestCase):
    def test_what_makes_sense(self) -> None:
        t = torch.ones(4, 2)
        for name, values in (
            ("send", [[t], 0, 0]),
            ("recv", [[t], 2, 2**31 - 1]),
            ("recv_anysource", [[t], 0]),
            ("alltoall_base", [torch.ones(3), torch.ones(6), [], []]),
            ("alltoall_base", [t, torch.ones(0), [0, 4, 0], [0, 0, 0]]),
            ("alltoall_base", [torch.ones(0, 3), t, [], [1, 1, 2]]),
        ):
            with self.subTest(name, values=values[1:]):
                arguments.require_sense(ops.OPS[name], values, 1, 3)

    def test_only_ops_with_numbers_have_to_be_asked(self) -> None:
        asked = {op.name for op in ops.BY_NUMBER if op.has_numbers}
        self.assertEqual(asked, {"alltoall_base", "send", "recv", "recv_anysource"})

    def test_each_tensor_has_its_own_splits(self) -> None:
        values = [torch.ones(4), torch.ones(6), [1, 3], [2, 4]]
        arguments.require_sense(ops.OPS["alltoall_base"], values, 0, 2)
        values[2:] = values[:1:-1]
        with self.assertRaisesRegex(ValueError, r"output_split_sizes is \[2, 4\]"):
            arguments.require_sense(ops.OPS["alltoall_base"], values, 0, 2)

    def test_a_long_list_is_not_shown(self) -> None:
        values = [torch.ones(4), torch.ones(4), [1] * 10_000, []]
        with self.assertRaises(ValueError) as caught:
            arguments.require_sense(ops.OPS["alltoall_base"], values, 0, 2)
        self.assertIn("10000 of them", str(caught.exception))
        self.assertLess(len(str(caught.exception)), 400)


class Peers(unittest.TestCase):
    def test_whatever_is_an_int_becomes_one(self) -> None:
        made = arguments.require_peers(HERE, Index(1), Index(2), [Index(7), 0])
        self.assertEqual(made, (1, 2, (7, 0)))
        self.assertEqual({type(each) for each in (*made[:2], *made[2])}, {int})
        self.assertEqual(arguments.require_peers(HERE, 0, 1, None), (0, 1, ()))

    def test_what_is_refused(self) -> None:
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, "rank is 2", (HERE, Index(2), 2, None)),
            (TypeError, "rank is True", (HERE, True, 2, None)),
            (ValueError, "world_size is -1", (HERE, 0, -1, None)),
            (ValueError, "world_size is 2147483648", (HERE, 0, 2**31, None)),
            (TypeError, "store_addr is b'host:1'", (b"host:1", 0, 1, None)),
            (ValueError, "global_ranks is -1", (HERE, 0, 1, [-1])),
        ]
        for kind, text, args in wrong:
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                arguments.require_peers(*args)


class Shape(unittest.TestCase):
    def test_any_form(self) -> None:
        for size in (5, [5], (Index(5),), torch.Size([5])):
            self.assertEqual(arguments.require_shape(size, torch.int8), ((5,), torch.int8))
        self.assertEqual(arguments.require_shape((), torch.int8), ((), torch.int8))

    def test_what_is_refused(self) -> None:
        for kind, size, dtype in (
            (errors.UnsupportedOp, (3,), torch.quint8),
            (ValueError, (-3, 4), torch.int8),
            (ValueError, -1, torch.int8),
            (TypeError, (1.5,), torch.int8),
            (TypeError, (3,), int),
            (TypeError, (3,), "float32"),
        ):
            with self.subTest(size=size, dtype=dtype), self.assertRaises(kind):
                arguments.require_shape(size, dtype)


if __name__ == "__main__":
    unittest.main()
