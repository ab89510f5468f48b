# SPDX-License-Identifier: BSD-3-Clause
"""Exports: one for each storage, released once, whatever dies first. On a stand-in for a device."""

from __future__ import annotations

import gc
import os
import random
import unittest
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import GuardedTestCase
from tests.process_group._fake_device import FakeDevice

errors = load("_errors")
module = load("process_group._exports")


class Exports(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.device = FakeDevice()
        self.exports = module.AllExports(lambda kind: self.device).of("meta")

    def new(self, *shape: int) -> torch.Tensor:
        return self.device.tensor(torch.zeros(shape or (4,)))

    def find(self, tensor: torch.Tensor) -> Any:
        return self.exports.find(tensor.untyped_storage())

    def test_a_storage_is_exported_once(self) -> None:
        tensor = self.new(4, 4)
        self.assertIs(self.find(tensor), self.find(tensor[1:]))
        self.assertIs(self.find(tensor), self.find(tensor.data))
        self.assertEqual(self.device.log, ["share"])
        self.assertIsNot(self.find(tensor), self.find(self.new()))

    def test_it_is_released_when_the_storage_has_died_and_nobody_holds_it(self) -> None:
        for dies_first in (True, False):
            with self.subTest(dies_first=dies_first):
                tensor = self.new()
                export = self.find(tensor)
                self.exports.hold(export)
                self.assertEqual(sum(self.device.counters.values()), 1)
                if dies_first:
                    del tensor
                    self.assertEqual(sum(self.device.counters.values()), 1, "while a child has it open")
                    self.exports.let_go(export)
                else:
                    self.exports.let_go(export)
                    self.assertEqual(sum(self.device.counters.values()), 1, "it can be told to the next child")
                    del tensor
                self.assertEqual(set(self.device.counters.values()), {0})

    def test_also_when_the_exports_are_gone(self) -> None:
        tensor = self.new()
        self.find(tensor)
        del self.exports
        gc.collect()
        del tensor
        self.assertEqual(set(self.device.counters.values()), {0})

    def test_listeners_hear_of_it(self) -> None:
        queue = self.exports.listen()
        tensor, other = self.new(), self.new()
        export = self.find(tensor)
        self.find(other)
        del tensor
        self.exports.sweep()
        self.assertEqual(list(queue), [export])
        del queue, other
        self.exports.sweep()

    def test_a_resized_storage_is_another(self) -> None:
        tensor = self.new()
        queue = self.exports.listen()
        export = self.find(tensor)
        self.exports.hold(export)
        key = tensor.untyped_storage()._cdata
        self.device._memory[key] = bytearray(16)
        self.exports.sweep()
        self.assertEqual(list(queue), [export])
        self.assertEqual(sum(self.device.counters.values()), 1, "a child has the old memory open")
        self.assertIsNot(self.find(tensor), export)
        self.exports.let_go(export)
        self.assertEqual(self.device.counters[1], 0)

    def test_a_refusal_names_the_setting(self) -> None:
        self.device.refuses = True
        with (
            mock.patch.dict(os.environ, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
            self.assertRaises(errors.UnsupportedOp) as caught,
        ):
            self.find(self.new())
        for text in ("PYTORCH_CUDA_ALLOC_CONF", "'expandable_segments:True'", "cudaIpcGetMemHandle", "cloned"):
            self.assertIn(text, str(caught.exception))
        self.assertNotIn("stack", str(caught.exception))

    def test_any_order_of_deaths(self) -> None:
        for seed in range(300):
            random_ = random.Random(seed)
            tensors, held = [self.new() for _ in range(4)], []
            for _ in range(30):
                action = random_.randrange(4)
                if action == 0 and tensors:
                    export = self.find(random_.choice(tensors))
                    self.exports.hold(export)
                    held.append(export)
                elif action == 1 and held:
                    self.exports.let_go(held.pop(random_.randrange(len(held))))
                elif action == 2 and tensors:
                    del tensors[random_.randrange(len(tensors))]
                else:
                    self.exports.sweep()
                self.assertTrue(set(self.device.counters.values()) <= {0, 1}, seed)
            tensors.clear()
            for export in held:
                self.exports.let_go(export)
            self.assertEqual(set(self.device.counters.values()) or {0}, {0}, seed)


class Kinds(unittest.TestCase):
    def test_a_kind_that_torch_cannot_export_is_refused(self) -> None:
        for kind in ("xpu", "mps", "meta", "cpu"):
            with self.subTest(kind), self.assertRaises(errors.UnsupportedOp) as caught:
                module.AllExports().of(kind)
            self.assertIn(kind, str(caught.exception))

    @unittest.skipUnless(torch.backends.cuda.is_built(), "needs a torch with CUDA, not a device")
    def test_a_counter_of_no_name_is_let_be(self) -> None:
        """What the child opens memory with: it has no share in the counter."""
        torch.UntypedStorage._release_ipc_counter_cuda(b"", 0)

    def test_cuda_is_known_to_every_torch(self) -> None:
        self.assertEqual(module.AllExports().of("cuda").accelerator.kind, "cuda")


if __name__ == "__main__":
    unittest.main()
