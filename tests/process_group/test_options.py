# SPDX-License-Identifier: BSD-3-Clause
"""The options of collectives come out of a pipe as they went in."""

from __future__ import annotations

import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

from tests import load

errors = load("_errors")
ops = load("process_group._ops")
options = load("process_group._options")


class Crossing(unittest.TestCase):
    def test_fields_and_back(self) -> None:
        made = ops.c10d.ReduceOptions()
        made.reduceOp, made.rootRank, made.rootTensor, made.timeout = dist.ReduceOp.BXOR, 3, 1, timedelta(seconds=1.5)
        barrier = ops.c10d.BarrierOptions()
        barrier.device_ids, barrier.device = [1, 2], torch.device("cpu")
        for one in (made, barrier, *(getattr(ops.c10d, name)() for name in ops.FIELDS)):
            fields = options.options_to_fields(one)
            self.assertTrue(all(type(each) in (int, bool, str, tuple, type(None)) for each in fields), fields)
            again = options.options_from_fields(type(one).__name__, fields)
            self.assertEqual(type(again), type(one))
            self.assertEqual(options.options_to_fields(again), fields)
        self.assertEqual(options.options_to_fields(made)[:4], (int(dist.ReduceOp.BXOR), 3, 1, 1500))
        self.assertEqual((options.options_to_fields(None), options.options_from_fields(None, ())), ((), None))

    def test_a_factor(self) -> None:
        made = ops.c10d.AllreduceOptions()
        made.reduceOp = ops.c10d._make_nccl_premul_sum(2.5)
        try:
            fields = options.options_to_fields(made)
        except errors.UnsupportedOp as error:
            self.assertFalse(hasattr(made.reduceOp, "factor"))
            self.assertIn("multiply", str(error))
            return
        self.assertEqual(options.options_from_fields("AllreduceOptions", fields).reduceOp.factor, 2.5)
        made.reduceOp = ops.c10d._make_nccl_premul_sum(torch.tensor([1.0]))
        with self.assertRaises(errors.UnsupportedOp):
            options.options_to_fields(made)

    def test_the_time_of_an_op(self) -> None:
        made = ops.c10d.ReduceOptions()
        op = ops.OPS["reduce"]
        self.assertEqual(options.timeout_in(op, options.options_to_fields(made)), 0)
        made.timeout = timedelta(seconds=1.5)
        self.assertEqual(options.timeout_in(op, options.options_to_fields(made)), 1.5)
        self.assertEqual(options.timeout_in(ops.OPS["send"], ()), 0)


if __name__ == "__main__":
    unittest.main()
