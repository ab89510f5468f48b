# SPDX-License-Identifier: BSD-3-Clause
"""The table of collectives agrees with torch; arguments of any overload come out in one form."""

from __future__ import annotations

import inspect
import re
import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import load

ops = load("process_group._ops")
errors = load("_errors")

# What torch's ProcessGroup has beside collectives; a name that is in neither place makes a test fail, so that the
# table is looked at when a later torch brings something new.
NO_COLLECTIVE = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "abort", "bound_device_id", "boxed",
    "get_group_store", "group_desc", "group_name", "merge_remote_group", "monitored_barrier", "name", "rank",
    "set_timeout", "shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


class Table(unittest.TestCase):
    def test_every_collective_of_torch_is_in_it(self) -> None:
        public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
        self.assertEqual(public - set(ops.OPS) - set(ops.ALIASES) - NO_COLLECTIVE, set())

    def test_every_op_is_in_torch(self) -> None:
        for op in ops.BY_NUMBER:
            self.assertTrue(hasattr(dist.ProcessGroup, op.name), op.name)

    def test_numbers_are_places(self) -> None:
        self.assertEqual([op.number for op in ops.BY_NUMBER], list(range(len(ops.OPS))))
        self.assertEqual([ops.OPS[op.name] for op in ops.BY_NUMBER], list(ops.BY_NUMBER))

    def test_parameters_are_those_of_torch(self) -> None:
        for op in ops.BY_NUMBER:
            first = re.search(
                rf"(?:1\. )?{op.name}\(self: [^,)]*(.*)\) ->", getattr(dist.ProcessGroup, op.name).__doc__
            )
            self.assertIsNotNone(first)
            names = [name for name in re.findall(r"(\w+): ", first[1]) if name not in ("opts",)]
            if "arg0" not in names:  # torch does not say
                self.assertEqual([param.name for param in op.params], names, op.name)

    def test_the_fields_are_all_that_torch_has(self) -> None:
        for name, fields in ops.FIELDS.items():
            there = {field for field in dir(getattr(ops.c10d, name)) if not field.startswith("_")}
            self.assertEqual(there - set(fields), set(), name)

    def test_the_interface_has_a_method_for_each(self) -> None:
        group = load("process_group").ProcessGroup
        for name in [*ops.OPS, *ops.ALIASES]:
            method = vars(group)[name]
            self.assertEqual(method.__name__, name)
            self.assertIn("Returns a Work", inspect.getdoc(method) or "")


class Arguments(unittest.TestCase):
    def normal(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return ops.normalise(ops.OPS[name], args, kwargs)

    def test_a_tensor_for_a_list(self) -> None:
        t = torch.ones(2)
        self.assertIs(self.normal("allreduce", t)[0][0][0], t)
        self.assertIs(self.normal("allreduce", tensor=t)[0][0][0], t)
        values, _ = self.normal("allgather", [t, t], t)
        self.assertEqual((len(values[0]), len(values[0][0]), len(values[1])), (1, 2, 1))
        self.assertEqual(self.normal("gather", [], [t])[0][0], [])

    def test_options_in_any_form(self) -> None:
        t = torch.ones(2)
        own = ops.c10d.AllreduceOptions()
        self.assertIs(self.normal("allreduce", [t], own)[1], own)
        self.assertIs(self.normal("allreduce", [t], opts=own)[1], own)
        for args, kwargs in (
            ((dist.ReduceOp.MAX,), {}),
            ((), {"op": dist.ReduceOp.MAX}),
            ((), {"opts": dist.ReduceOp.MAX}),
        ):
            self.assertEqual(self.normal("allreduce", [t], *args, **kwargs)[1].reduceOp, dist.ReduceOp.MAX)
        made = self.normal("reduce", t, 2, dist.ReduceOp.MIN, timedelta(seconds=3))[1]
        self.assertEqual((made.rootRank, made.reduceOp, made.timeout), (2, dist.ReduceOp.MIN, timedelta(seconds=3)))
        own.reduceOp = dist.ReduceOp.MIN
        other = self.normal("allreduce_coalesced", [t], own)[1]
        self.assertEqual((type(other).__name__, other.reduceOp), ("AllreduceCoalescedOptions", dist.ReduceOp.MIN))

    def test_the_callers_options_stay_as_they_are(self) -> None:
        own = ops.c10d.AllreduceOptions()
        made = self.normal("allreduce", [torch.ones(1)], own, timeout=timedelta(seconds=9))[1]
        self.assertEqual(made.timeout, timedelta(seconds=9))
        self.assertLess(own.timeout, timedelta(0))

    def test_what_is_refused(self) -> None:
        t = torch.ones(1)
        for name, args, kwargs in (
            ("allreduce", (), {}), ("allreduce", (3,), {}), ("allreduce", ([t, 3],), {}),
            ("allreduce", ([t],), {"root": 1}),
            ("allreduce", ([t], "sum"), {}), ("broadcast", ([t], True), {}), ("send", ([t], 1), {}),
            ("send", ([t], 1, 2, 3), {}), ("send", ([t], True, 2), {}), ("allgather", ([[t], t], [t]), {}),
            ("barrier", (), {"nonsense": 1}), ("allreduce", ([t],), {"opts": 3}),
        ):  # fmt: skip
            with self.subTest(name=name, args=args, kwargs=kwargs), self.assertRaises(TypeError) as caught:
                self.normal(name, *args, **kwargs)
            self.assertIn(name, str(caught.exception))

    def test_walk_and_arrange_agree(self) -> None:
        a, b, c = (torch.full((1,), float(index)) for index in range(3))
        op = ops.OPS["scatter"]
        values = [[a], [[b, c]]]
        self.assertEqual([(d, t.item()) for d, t in ops.walk(op, values)], [("out", 0.0), ("in", 1.0), ("in", 2.0)])
        numbers = [t.item() for _, t in ops.walk(op, values)]
        self.assertEqual(ops.arrange(op, values, iter(numbers)), [[0.0], [[1.0, 2.0]]])
        self.assertEqual(ops.arrange(op, values, iter(numbers), tuple), [(0.0,), ((1.0, 2.0),)])
        self.assertEqual(
            ops.arrange(ops.OPS["alltoall_base"], [a, b, [1], []], iter("xy"), tuple), ["x", "y", (1,), ()]
        )
        self.assertEqual(ops.arrange(ops.OPS["send"], [[a], 1, 0], iter("x")), [["x"], 1, 0])

    def test_results(self) -> None:
        t = [torch.full((1,), float(index)) for index in range(3)]
        self.assertEqual(ops.results(ops.OPS["allreduce"], [t]), t)
        self.assertEqual(ops.results(ops.OPS["allgather"], [[t], t[:1]]), t)
        self.assertEqual(ops.results(ops.OPS["_allgather_base"], [t[0], t[1]]), t[:1])
        self.assertEqual(ops.results(ops.OPS["send"], [t, 0, 0]), [])
        self.assertEqual(ops.results(ops.OPS["barrier"], []), [])


if __name__ == "__main__":
    unittest.main()
