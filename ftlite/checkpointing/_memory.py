# SPDX-License-Identifier: BSD-3-Clause
"""Memory of tensors as memoryviews, without numpy and without a copy.

A view made here does not keep its tensor alive: whoever makes one keeps the tensor beside it. The views
come from ``PyMemoryView_FromMemory``, which costs 1 us whatever the dtype (bfloat16 and float8 included);
a ctypes array type per size costs ten times that, and ``bytes(storage)`` a second per megabyte.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ._layout import span

_PYBUF_WRITE = 0x200  # from CPython's object.h; the same since 3.3

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE in Linux's mman.h, since 5.14; older ones refuse it
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running in a ``with`` block that makes many objects and no cycle.

    Among torch's 400,000 objects one of its full passes takes 0.1 s, as long as the transfer of half a gigabyte,
    and the objects of a plan for some thousand tensors are enough to set one off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def view_at(address: int, nbytes: int) -> memoryview:
    """A writable view of ``nbytes`` bytes at ``address`` (host memory)."""
    if nbytes == 0:
        return memoryview(bytearray())  # a null pointer is no memory to CPython
    view: memoryview = _from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def view_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of the bytes of a contiguous CPU ``tensor``."""
    return view_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def populate(address: int, nbytes: int) -> None:
    """Have the kernel bring the pages of new memory, which is about to be written, unless the first is there.

    In one call, and just before: a fault for each of 4 KB takes as long as what is received into it, and pages that
    were just cleared are still in the cache. Memory that the allocator has used before has its pages; to have them
    all looked at would cost a third of that. Where the kernel refuses, the faults do the same.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if _libc is None or size <= 0:
        return
    there = ctypes.create_string_buffer(1)
    if _libc.mincore(first, mmap.PAGESIZE, there) == 0 and there.raw == b"\0":
        _libc.madvise(first, size, _POPULATE_WRITE)


def offset_bytes(tensor: torch.Tensor) -> int:
    """Where ``tensor`` begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def byte_tensor(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """A 1-D uint8 tensor over bytes ``start`` to ``start + nbytes`` of ``storage``, on its device."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (nbytes,), (1,))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of ``tensor`` reaches to its last element; one that was freed (``resize_(0)``) does not."""
    elements = tensor.numel() if tensor.is_contiguous() else span(tensor.shape, tensor.stride())
    end = (tensor.storage_offset() + elements) * tensor.element_size()
    return elements == 0 or end <= tensor.untyped_storage().nbytes()


def tensor_in(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset_bytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor of ``dtype``, ``shape`` and ``stride`` (elements) at ``offset_bytes`` of ``storage``."""
    out = torch.empty(0, dtype=dtype, device=storage.device)
    return out.set_(storage, offset_bytes // dtype.itemsize, shape, stride)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, also where that is refused: an expanded ``target`` (``source`` is expanded alike),
    and dtypes of one byte of which torch knows no more than the size (uint1 to uint7, ...)."""
    for d, (size, step) in enumerate(zip(target.shape, target.stride())):
        if step == 0 and size > 1:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    if target.dtype.itemsize == 1 and not target.is_neg() and not source.is_neg():
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    # to an inference tensor torch writes in that mode alone; inference_mode(False) would bring gradients back instead
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        target.copy_(source)


def memory_at_hand() -> int | None:
    """Bytes of host memory that can still be allocated, the container's limit included; None where unknown."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            found.append(int(limit) - used + _cached_bytes())
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or an older kernel: what was found so far is what is known
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def _cached_bytes() -> int:
    """What the container holds of files and the kernel gives back when it is asked: data sets that were read."""
    try:
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().split()
    except OSError:
        return 0
    return int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, part of its stable interface."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


def unlocked(data: bytes | bytearray | memoryview) -> memoryview:
    """A view of ``data`` that torch takes without its warning about memory it must not write.

    For reading only. ``data`` must outlive the view.
    """
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    try:
        return view_at(buffer.buf or 0, buffer.len)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
