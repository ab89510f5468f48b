# SPDX-License-Identifier: BSD-3-Clause
"""Segments and tensors over them: no size changes, nothing is unmapped under a tensor, every dtype."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import tempfile
import unittest
from unittest import mock

import torch

from tests import load
from tests._support import GuardedTestCase, run_python

mapping = load("process_group._mapping")
errors = load("_errors")

PAGE = mmap.PAGESIZE
QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


def known_dtypes() -> dict[str, torch.dtype]:
    """Every dtype of this torch, by its name; those with two names once."""
    found = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return {str(dtype).rpartition(".")[2]: dtype for dtype in found.values()}


class Files(GuardedTestCase):
    def test_sealed(self) -> None:
        fd = mapping.new_segment_file(4 * PAGE)
        self.addCleanup(os.close, fd)
        self.assertEqual(os.fstat(fd).st_size, 4 * PAGE)
        self.assertEqual(os.fstat(fd).st_nlink, 0)
        self.assertFalse(os.get_inheritable(fd))
        if not hasattr(os, "memfd_create"):
            self.skipTest("no memfd here")
        for nbytes in (0, PAGE, 5 * PAGE):
            with self.assertRaises(PermissionError):
                os.ftruncate(fd, nbytes)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        self.assertEqual(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted, wanted)

    def test_without_memfd(self) -> None:
        for failure in (AttributeError, PermissionError):
            with (
                self.subTest(failure=failure),
                tempfile.TemporaryDirectory() as folder,
                mock.patch.object(tempfile, "tempdir", folder),
                mock.patch.object(os, "memfd_create", side_effect=failure),
            ):
                fd = mapping.new_segment_file(4 * PAGE)
                self.addCleanup(os.close, fd)
                self.assertEqual(os.listdir(folder), [])
                self.assertTrue(os.readlink(f"/proc/self/fd/{fd}").startswith(folder))
                status = os.fstat(fd)
                self.assertEqual((status.st_size, status.st_nlink), (4 * PAGE, 0))
                # its blocks are there: no SIGBUS when the disk is full by then
                self.assertGreaterEqual(status.st_blocks * 512, 4 * PAGE)
                self.assertFalse(os.get_inheritable(fd))
                one, other = mapping.Mapping(fd, 4 * PAGE), mapping.Mapping(fd, 4 * PAGE)
                one.tensor(64, torch.int32, (3,)).copy_(torch.tensor([1, 2, 3]))
                self.assertEqual(other.tensor(64, torch.int32, (3,)).tolist(), [1, 2, 3])
                self.assertTrue(one.close() and other.close())

    def test_without_memfd_and_without_room(self) -> None:
        with (
            mock.patch.object(os, "memfd_create", side_effect=AttributeError),
            mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")),
            self.assertRaisesRegex(OSError, r"has no room for 4096 bytes; let TMPDIR name a larger disk") as caught,
        ):
            mapping.new_segment_file(4096)
        self.assertEqual(caught.exception.errno, 28)

    def test_no_size_leaves_no_descriptor(self) -> None:
        with mock.patch.object(os, "ftruncate", side_effect=OSError(12, "no")), self.assertRaises(OSError):
            mapping.new_segment_file(4096)


class Codes(unittest.TestCase):
    def test_every_dtype(self) -> None:
        codes = {}
        for name, dtype in known_dtypes().items():
            with self.subTest(name):
                if name in QUANTIZED:
                    with self.assertRaisesRegex(errors.UnsupportedOp, f"torch.{name} cannot be handed to a child"):
                        mapping.dtype_code(dtype)
                    continue
                code = mapping.dtype_code(dtype)
                self.assertIs(mapping.dtype_from_code(code), dtype)
                codes[code] = dtype
        self.assertEqual(len(codes), len(known_dtypes().keys() - QUANTIZED))

    def test_numbers_stay(self) -> None:
        for dtype, code in ((torch.uint8, 0), (torch.float32, 6), (torch.bfloat16, 8), (torch.float8_e5m2, 18)):
            self.assertEqual(mapping.dtype_code(dtype), code)

    def test_unknown(self) -> None:
        for code in (-1, 1000):
            with self.assertRaisesRegex(errors.ProtocolError, f"dtype number {code} is unknown"):
                mapping.dtype_from_code(code)
        with mock.patch.object(mapping, "_DTYPES", (None,)), self.assertRaises(errors.ProtocolError):
            mapping.dtype_from_code(0)


class Tensors(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.fd = mapping.new_segment_file(4 * PAGE)
        self.addCleanup(os.close, self.fd)
        self.one = mapping.Mapping(self.fd, 4 * PAGE)
        self.addCleanup(self.one.close)

    def test_two_processes_worth_of_mappings(self) -> None:
        other = mapping.Mapping(self.fd, 4 * PAGE)
        self.addCleanup(other.close)
        self.one.tensor(256, torch.float32, (2, 3)).copy_(torch.arange(6.0).reshape(2, 3))
        self.assertEqual(other.tensor(256, torch.float32, (3, 2)).tolist(), [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        self.assertNotEqual(other.address, self.one.address)
        self.assertEqual(self.one.tensor(256, torch.uint8, (1,)).data_ptr(), self.one.address + 256)

    def test_shapes(self) -> None:
        for shape in ((), (1,), (5,), (2, 3), (2, 1, 4), (3, 0, 2), (0,), (1, 1, 1, 1), (2, 3, 4, 5)):
            with self.subTest(shape=shape):
                tensor = self.one.tensor(128, torch.float64, shape)
                like = torch.empty(shape, dtype=torch.float64)
                self.assertEqual((tensor.shape, tensor.stride()), (like.shape, like.stride()))
                self.assertTrue(tensor.is_contiguous())
                self.assertFalse(tensor.requires_grad or tensor.is_inference())
                if tensor.numel():
                    self.assertEqual(tensor.data_ptr(), self.one.address + 128)

    def test_dtypes(self) -> None:
        for name, dtype in known_dtypes().items():
            if name in QUANTIZED:
                continue
            with self.subTest(name):
                for shape in ((), (2, 3), (0,)):
                    tensor = self.one.tensor(64, dtype, shape)
                    self.assertEqual((tensor.dtype, tuple(tensor.shape)), (dtype, shape))
                bytes_ = self.one.tensor(64, torch.uint8, (dtype.itemsize,))
                bytes_.fill_(1)
                self.assertEqual(self.one.tensor(64, dtype, (1,)).view(torch.uint8).tolist(), [1] * dtype.itemsize)

    def test_inside_only(self) -> None:
        self.one.tensor(4 * PAGE - 8, torch.int64, (1,))
        for offset, dtype, shape in (
            (4 * PAGE, torch.uint8, (1,)), (4 * PAGE - 8, torch.int64, (2,)), (-8, torch.int64, (1,)),
            (0, torch.uint8, (1 << 62,)), (4, torch.int64, (1,)), (0, torch.int64, (PAGE, 2, 3)),
        ):  # fmt: skip
            with self.subTest(offset=offset, shape=shape), self.assertRaisesRegex(ValueError, "not in a segment"):
                self.one.tensor(offset, dtype, shape)

    def test_made_in_a_mode_of_the_thread(self) -> None:
        with torch.inference_mode(), torch.device("meta"):
            tensor = self.one.tensor(0, torch.int32, (3,))
        self.assertEqual(tensor.device.type, "cpu")
        tensor.fill_(4)
        self.assertEqual(self.one.tensor(0, torch.int32, (2,)).tolist(), [4, 4])

    def test_not_closed_under_a_tensor(self) -> None:
        tensor = self.one.tensor(64, torch.float32, (2, 3))
        holders = [tensor.t()[1:], tensor.untyped_storage(), tensor.detach(), self.one.memory(0, 64)]
        del tensor
        while holders:
            self.assertFalse(self.one.close())
            # and it is still as good as before
            self.one.tensor(64, torch.uint8, (4,)).fill_(1)
            holders.pop()
            gc.collect()
        self.assertTrue(self.one.close())
        self.assertTrue(self.one.close())
        with self.assertRaisesRegex(errors.StateError, "unmapped"):
            self.one.tensor(0, torch.uint8, (1,))

    def test_the_memory_outlives_the_mapping(self) -> None:
        code = f"""
import os, torch
from tests import load
mapping = load("process_group._mapping")
fd = mapping.new_segment_file({PAGE})
one = mapping.Mapping(fd, {PAGE})
tensor = one.tensor(0, torch.int32, (3,))
os.close(fd)
one.close()
del one
import gc
gc.collect()
tensor.fill_(5)
assert tensor.tolist() == [5, 5, 5]
"""
        done = run_python("-c", code, check=True)
        self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    unittest.main()
