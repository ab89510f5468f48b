# SPDX-License-Identifier: BSD-3-Clause
"""Any view to contiguous memory and back: exactly its elements, and nothing that autograd could notice."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import unittest
import warnings
from collections.abc import Callable

import torch

from tests import load
from tests._support import GuardedTestCase

staging = load("process_group._staging")
errors = load("_errors")

GUARD = 977.0


def values(shape: torch.Size | tuple[int, ...], start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def from_numpy() -> torch.Tensor:
    numpy = importlib.import_module("numpy")
    return torch.from_numpy(numpy.arange(12, dtype="float32").reshape(3, 4).copy())


def from_numpy_transposed() -> torch.Tensor:
    numpy = importlib.import_module("numpy")
    return torch.from_numpy(numpy.arange(60, dtype="float32").reshape(6, 10)[1:5, ::3].T)


def inference(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def made() -> torch.Tensor:
        with torch.inference_mode():
            return make()

    return made


def flagged(part: str) -> torch.Tensor:
    return getattr(torch.complex(values((2, 3)), values((2, 3), 40)).conj(), part)


# name -> what makes a view; the memory around it is compared byte by byte
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: values((3, 4)),
    "slice [2:5,3:8]": lambda: values((7, 11))[2:5, 3:8],
    "slice [::2]": lambda: values((9,))[::2],
    "slice of columns": lambda: values((6, 6))[:, 2],
    "at an offset": lambda: values((20,))[7:13],
    "transposed": lambda: values((3, 5)).t(),
    "permuted": lambda: values((2, 3, 4)).permute(2, 0, 1),
    "channels_last": lambda: values((2, 3, 4, 5)).contiguous(memory_format=torch.channels_last),
    "unfolded, windows that overlap": lambda: values((9,)).unfold(0, 4, 2),
    "0-dim": lambda: values((5,))[3],
    "one element": lambda: values((1, 1, 1)),
    "empty": lambda: values((4, 5))[:, 2:2],
    "empty, transposed": lambda: torch.empty(3, 0).t(),
    "leaf": lambda: values((3, 4)).requires_grad_(),
    "slice of a leaf": lambda: values((3, 4)).requires_grad_()[:, 1:3],
    "parameter": lambda: torch.nn.Parameter(values((3, 4)).t()),
    "non-leaf": lambda: values((3, 4)).requires_grad_() * 2,
    "non-leaf, transposed": lambda: (values((3, 4)).requires_grad_() * 2).t(),
    "inference": inference(lambda: values((3, 4))),
    "inference, transposed": inference(lambda: values((3, 4)).t()),
    "inference, slice": inference(lambda: values((5, 4))[1:4, ::2]),
    "conj": lambda: torch.complex(values((2, 3)), values((2, 3), 40)).conj(),
    "conj, transposed": lambda: torch.complex(values((2, 3)), values((2, 3), 40)).conj().t(),
    "neg": lambda: flagged("imag"),
    "half of a complex": lambda: torch.complex(values((2, 3)), values((2, 3), 40)).real,
    "bool, slice": lambda: (values((4, 4)) > 7)[:, 1:3],
    "int64, slice": lambda: values((4, 4)).long()[1:, ::3],
}
if importlib.util.find_spec("numpy"):
    VIEWS["numpy"] = from_numpy
    VIEWS["numpy, strided"] = from_numpy_transposed

EXPANDED: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: values((3,)).expand(4, 3),
    "columns": lambda: values((4, 1)).expand(4, 3),
    "all": lambda: values((1,)).expand(2, 3, 2),
    "a slice in the middle": lambda: values((2, 1, 5))[:, :, 1:4].expand(2, 4, 3),
    "inference": inference(lambda: values((3,)).expand(4, 3)),
}


def memory(tensor: torch.Tensor) -> list[int]:
    """Every byte of the storage, read without torch's idea of the tensor."""
    storage = tensor.untyped_storage()
    return list(ctypes.string_at(storage.data_ptr(), storage.nbytes())) if storage.nbytes() else []


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    """The elements by indexing alone."""
    flat = [tensor.detach()[index].item() for index in indices(tensor)]
    return torch.tensor(flat, dtype=tensor.dtype).reshape(tensor.shape)


def indices(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in tensor.shape:
        found = [(*index, i) for index in found for i in range(size)]
    return found


def version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Views(GuardedTestCase):
    def test_packed(self) -> None:
        for name, make in {**VIEWS, **EXPANDED}.items():
            with self.subTest(name):
                view = make()
                before, wanted = memory(view), plainly(view)
                packed = staging.pack(view)
                self.assertTrue(torch.equal(packed, wanted))
                self.assertTrue(staging.plain(packed))
                self.assertFalse(packed.requires_grad or packed.is_inference())
                self.assertIsNone(packed.grad_fn)
                if view.numel():
                    self.assertNotEqual(packed.untyped_storage().data_ptr(), view.untyped_storage().data_ptr())
                self.assertEqual(memory(view), before)

    def test_packed_into_memory_that_is_there(self) -> None:
        for name, make in {**VIEWS, **EXPANDED}.items():
            with self.subTest(name):
                view = make()
                into = torch.zeros(view.shape, dtype=view.dtype)
                self.assertIs(staging.pack(view, into), into)
                self.assertTrue(torch.equal(into, plainly(view)))
                self.assertEqual(version(into), 0)

    def test_unpacked(self) -> None:
        for name, make in VIEWS.items():
            with self.subTest(name):
                view, twin = make(), make()
                # what plain assignment, element by element, makes of the same memory
                elements = plainly(view)
                # equal where the memory is, as a collective gives it: one view overlaps itself
                result = ~elements if elements.dtype == torch.bool else elements * 2 + 3
                with torch.inference_mode():
                    for index in indices(twin):
                        twin.data[index] = result[index]
                state = version(view), view.requires_grad, view.is_leaf, view.grad_fn, view.untyped_storage().data_ptr()
                staging.unpack(result, view)
                self.assertTrue(torch.equal(plainly(view), result))
                # the bytes around the view included
                self.assertEqual(memory(view), memory(twin))
                now = version(view), view.requires_grad, view.is_leaf, view.grad_fn, view.untyped_storage().data_ptr()
                self.assertEqual(now, state)

    def test_expanded_targets(self) -> None:
        for name, make in EXPANDED.items():
            with self.subTest(name):
                view = make()
                before = memory(view)
                result = plainly(view) * 2
                staging.unpack(result, view)
                self.assertTrue(torch.equal(plainly(view), result))
                staging.unpack(plainly(view) / 2, view)
                self.assertEqual(memory(view), before)

    def test_of_an_expanded_target_the_first_counts(self) -> None:
        view = torch.zeros(1).expand(3)
        staging.unpack(torch.tensor([5.0, 6.0, 7.0]), view)
        self.assertEqual(view.tolist(), [5.0, 5.0, 5.0])

    def test_guards_stay(self) -> None:
        whole = torch.full((9, 13), GUARD)
        view = whole[2:5, 3:8]
        view.zero_()
        staging.unpack(values((3, 5)), view)
        self.assertTrue(torch.equal(view, values((3, 5))))
        self.assertEqual(int((whole == GUARD).sum()), whole.numel() - 15)

    def test_aliases_see_it(self) -> None:
        base = torch.zeros(4, 6)
        view, other = base.t()[1:3], base[:, 1:3]
        staging.unpack(values((2, 4)), view)
        self.assertTrue(torch.equal(other, values((2, 4)).t()))
        self.assertEqual(float(base.sum()), 36.0)

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "needs numpy")
    def test_numpy_sees_it(self) -> None:
        numpy = importlib.import_module("numpy")
        array = numpy.zeros((4, 6), dtype="float32")
        staging.unpack(values((6, 4)), torch.from_numpy(array.T))
        self.assertTrue((values((6, 4)).numpy() == array.T).all())

    def test_dtypes(self) -> None:
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "bool", "uint8",
                     "int16", "uint16", "float8_e8m0fnu", "uint4", "int3", "float4_e2m1fn_x2", "bits8"):  # fmt: skip
            dtype = getattr(torch, name, None)
            if dtype is None:
                continue
            with self.subTest(name):
                raw = torch.arange(6 * 8 * dtype.itemsize, dtype=torch.uint8)
                raw = raw % 2 if dtype == torch.bool else raw
                view = raw.view(dtype).reshape(6, 8)[1:5, ::2]
                packed = staging.pack(view)
                target = torch.zeros_like(raw).view(dtype).reshape(6, 8)
                staging.unpack(packed, target[1:5, ::2])
                rows, size = raw.reshape(6, 8, dtype.itemsize), dtype.itemsize
                wanted = torch.zeros_like(rows)
                wanted[1:5, ::2] = rows[1:5, ::2]
                self.assertEqual(memory(target), wanted.flatten().tolist())
                self.assertEqual(memory(packed), rows[1:5, ::2].reshape(-1).tolist())
                self.assertEqual(packed.element_size(), size)

    def test_backward_after_it(self) -> None:
        # as with a collective that writes to memory by itself: no error, the graph is as it was
        leaf = values((3, 4)).requires_grad_()
        out = leaf.t() * 2
        staging.unpack(torch.ones(4, 3), out)
        staging.pack(leaf.t())
        out.sum().backward()
        self.assertTrue(torch.equal(leaf.grad, torch.full((3, 4), 2.0)))

    def test_under_the_modes_of_a_thread(self) -> None:
        view = values((3, 4)).t()
        with torch.inference_mode():
            packed = staging.pack(view)
            staging.unpack(packed + 1, view)
        self.assertFalse(packed.is_inference())
        self.assertTrue(torch.equal(view, values((3, 4)).t() + 1))
        with torch.device("meta"):
            self.assertEqual(staging.pack(view).device.type, "cpu")

    def test_inference_tensors_in_another_thread(self) -> None:
        view = VIEWS["inference, slice"]()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                staging.unpack(values(view.shape), view)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(failed, [])
        self.assertTrue(torch.equal(plainly(view), values(view.shape)))


class Plain(GuardedTestCase):
    def test_plain(self) -> None:
        plain = {"contiguous", "slice of columns", "at an offset", "0-dim", "one element", "empty", "empty, transposed",
                 "leaf", "non-leaf", "inference", "numpy"} - {"slice of columns"}  # fmt: skip
        for name, make in VIEWS.items():
            with self.subTest(name):
                self.assertEqual(staging.plain(make()), name in plain)
        for name, make in EXPANDED.items():
            with self.subTest(name):
                self.assertFalse(staging.plain(make()))

    def test_not_in_host_memory(self) -> None:
        sparse = torch.eye(3).to_sparse()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are deprecated
            quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        for tensor in (sparse, torch.empty(3, device="meta"), quantized):
            with self.subTest(layout=tensor.layout, device=tensor.device, dtype=tensor.dtype):
                self.assertFalse(staging.stageable(tensor))
                with self.assertRaisesRegex(errors.UnsupportedOp, "cannot read a torch"):
                    staging.pack(tensor)
                with self.assertRaisesRegex(errors.UnsupportedOp, "cannot write a torch"):
                    staging.unpack(torch.ones(3), tensor)
        self.assertFalse(staging.plain(sparse))

    def test_what_does_not_fit(self) -> None:
        for other in (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64), torch.ones(6)):
            with self.subTest(shape=other.shape, dtype=other.dtype):
                with self.assertRaisesRegex(ValueError, "does not fit"):
                    staging.pack(torch.ones(3, 2), other)
                with self.assertRaisesRegex(ValueError, "does not fit"):
                    staging.unpack(other, torch.ones(3, 2))


class Resized(GuardedTestCase):
    """What the user does to a tensor while an op holds its alias."""

    def test_the_tensor(self) -> None:
        whole = torch.zeros(4, 6)
        for change in (lambda t: t.resize_(0), lambda t: t.set_()):
            with self.subTest(change):
                tensor = whole.t()[1:4]
                held = staging.alias(tensor)
                change(tensor)
                # what was issued with this memory ends in this memory
                staging.unpack(values((3, 4)), held)
                self.assertTrue(torch.equal(whole[:, 1:4], values((3, 4)).t()))

    def test_an_alias_is_outside_of_autograd(self) -> None:
        for name in ("leaf", "non-leaf", "parameter", "inference"):
            with self.subTest(name):
                tensor = VIEWS[name]()
                held = staging.alias(tensor)
                self.assertFalse(held.requires_grad)
                self.assertEqual(held.data_ptr(), tensor.data_ptr())
                self.assertEqual((held.shape, held.stride()), (tensor.shape, tensor.stride()))

    def test_its_storage(self) -> None:
        for left in (0, 4):
            for name in ("contiguous", "transposed", "at an offset", "channels_last", "0-dim"):
                with self.subTest(name, left=left):
                    view = VIEWS[name]()
                    result = torch.zeros(view.shape)
                    view.untyped_storage().resize_(left)
                    with self.assertRaisesRegex(errors.StateError, f"storage was resized to {left} bytes") as caught:
                        staging.unpack(result, view)
                    self.assertEqual((caught.exception.state, caught.exception.attempted), ("freed", "write"))
                    with self.assertRaisesRegex(errors.StateError, "cannot read"):
                        staging.pack(view)
                    with self.assertRaises(errors.StateError):
                        staging.require_memory(view)

    def test_the_storage_of_the_result(self) -> None:
        for call in (staging.unpack, staging.pack):
            gone = torch.zeros(3)
            gone.untyped_storage().resize_(0)
            with self.subTest(call), self.assertRaises(errors.StateError):
                call(*((gone, torch.ones(3)) if call is staging.unpack else (torch.ones(3), gone)))

    def test_enough_is_enough(self) -> None:
        view = values((20,))[3:7]
        view.untyped_storage().resize_(28)
        staging.require_memory(view)
        self.assertEqual(staging.pack(view).tolist(), [4.0, 5.0, 6.0, 7.0])
        view.untyped_storage().resize_(27)
        with self.assertRaises(errors.StateError):
            staging.require_memory(view)
        empty = torch.empty(0, 3)
        empty.untyped_storage().resize_(0)
        staging.require_memory(empty)
        staging.require_memory(torch.empty(0, 3).t())


if __name__ == "__main__":
    unittest.main()
