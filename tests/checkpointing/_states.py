# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the transports' parts share: a strict comparison, and a heal without sockets."""

from __future__ import annotations

import contextlib
import io
import struct
import unittest
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch

from tests import load

errors = load("_errors")
_device = load("checkpointing._device")
_manifest = load("checkpointing._manifest")
_memory = load("checkpointing._memory")
_plan = load("checkpointing._plan")
_snapshot = load("checkpointing._snapshot")
_tree = load("checkpointing._tree")

MISSING = _tree.MISSING


# --- comparing -----------------------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements of ``tensor``, in the order of its indices; no value is interpreted."""
    size = tensor.dtype.itemsize
    view = torch.empty(0, dtype=torch.uint8)
    stride = (*(step * size for step in tensor.stride()), 1)
    view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), stride)
    flat = view.contiguous()
    return bytes(_memory.view_of(flat))


def same(test: unittest.TestCase, got: Any, wanted: Any, where: str = "state") -> None:
    """Fail unless both are equal to the last bit, in value and in type, all the way down."""
    test.assertIs(type(got), type(wanted), where)
    if isinstance(wanted, torch.Tensor):
        for name in ("dtype", "shape", "requires_grad"):
            test.assertEqual(getattr(got, name), getattr(wanted, name), f"{where}: {name}")
        for name in ("stride", "is_conj", "is_neg"):
            test.assertEqual(getattr(got, name)(), getattr(wanted, name)(), f"{where}: {name}")
        test.assertTrue(raw(got) == raw(wanted), f"{where}: the bits differ")
    elif isinstance(wanted, dict):
        if isinstance(wanted, defaultdict):
            test.assertIs(got.default_factory, wanted.default_factory, where)
        test.assertEqual(len(got), len(wanted), where)
        for i, (got_item, wanted_item) in enumerate(zip(got.items(), wanted.items())):
            same(test, got_item[0], wanted_item[0], f"{where}: key {i}")
            same(test, got_item[1], wanted_item[1], f"{where}[{wanted_item[0]!r}]")
    elif isinstance(wanted, (list, tuple, deque)):
        test.assertEqual(len(got), len(wanted), where)
        test.assertEqual(getattr(got, "maxlen", None), getattr(wanted, "maxlen", None), where)
        for i, pair in enumerate(zip(got, wanted)):
            same(test, *pair, f"{where}[{i}]")
    elif isinstance(wanted, (float, complex)):
        numbers = [(x.real, x.imag) if isinstance(x, complex) else (x, 0.0) for x in (got, wanted)]
        test.assertEqual(struct.pack(">2d", *numbers[0]), struct.pack(">2d", *numbers[1]), where)
    else:
        test.assertEqual(got, wanted, where)


# --- healing -------------------------------------------------------------------------------------------


def publish(state: Any, **options: Any) -> Any:
    """A snapshot of ``state``, with the transport's defaults."""
    defaults = {"weights_only": True, "snapshot": "small", "num_chunks": None, "stage": _device.HostStage()}
    return _snapshot.publish(state, 7, **{**defaults, **options})


def plan(snapshot: Any, own: Any = MISSING, **options: Any) -> Any:
    """The receiver's plan for ``snapshot``, whose document has gone over the wire."""
    return _plan.Plan(_manifest.parse(snapshot.document), own, **options)


def flat_bytes(snapshot: Any) -> bytes:
    """The whole flat space, as it is served."""
    return b"".join(bytes(view) for view, _ in snapshot.blocks(0, snapshot.flat.total))


def load_blob(data: bytes, _path: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def heal(state: Any, own: Any = MISSING, *, options: dict[str, Any] | None = None, **planned: Any) -> Any:
    """What a receiver gets of ``state``: fresh, or in place into ``own``."""
    snapshot = publish(state, **(options or {}))
    made = plan(snapshot, own, **planned)
    snapshot.copy_to(made.intervals)
    return made.finish(load_blob)


# --- making --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks on kinds of tensors that a test makes on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes, NaN payloads and all; for bool of true and false."""
    count = 1
    for size in shape:
        count *= size
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [t for value in state for t in tensors(value)] if isinstance(state, (list, tuple)) else []


# --- checking ------------------------------------------------------------------------------------------


class Case(unittest.TestCase):
    def refused(self, state: Any, own: Any, *words: str, **options: Any) -> Exception:
        """The plan refuses, naming ``words``, and leaves the receiver as it was."""
        before = [raw(t) for t in tensors(own)]
        with self.assertRaises(errors.LayoutError) as caught:
            heal(state, own, **options)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertTrue(before == [raw(t) for t in tensors(own)], "bytes were written")
        self.assertFalse(caught.exception.destination_dirty)
        return caught.exception

    def healed(self, state: Any, own: Any) -> Any:
        """The result of a heal in place, whose tensors are the receiver's own."""
        mine = {t.data_ptr() for t in tensors(own) if t.numel()}
        out = heal(state, own)
        for t in tensors(out):
            if t.numel():
                self.assertIn(t.data_ptr(), mine)
        return out
