# SPDX-License-Identifier: BSD-3-Clause
"""Bytes are copied, all of them and no others, below and above the size that lets go of the GIL."""

from __future__ import annotations

import unittest

import torch

from tests import load
from tests._support import GuardedTestCase

copy = load("_copy")


class Bytes(GuardedTestCase):
    def test_copied(self) -> None:
        for nbytes in (0, 1, 4, 65_536, 65_537, 1_000_000):
            with self.subTest(nbytes=nbytes):
                source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
                target = torch.full((nbytes + 2,), 7, dtype=torch.uint8)
                copy.copy_bytes(target.data_ptr() + 1, source.data_ptr(), nbytes)
                self.assertTrue(torch.equal(target[1:-1], source))
                self.assertEqual((int(target[0]), int(target[-1])), (7, 7))


if __name__ == "__main__":
    unittest.main()
