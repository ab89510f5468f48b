# SPDX-License-Identifier: BSD-3-Clause
"""Segments of memory that two processes map, and tensors over them.

Rules of this file: a mapping is never closed or shrunk under a tensor, which would be a segmentation fault. torch
keeps the object that a tensor was made from alive, but gives its buffer back at once: over an mmap itself close()
would succeed under the tensor. So every tensor here is made from a memoryview, which holds the mmap's buffer as long
as anything holds the memoryview, and close() is then refused; and that memoryview is never released, only dropped.
Any thread may call.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import tempfile

import torch

from .._errors import ProtocolError, StateError, UnsupportedOp

__all__ = ["Mapping", "dtype_code", "dtype_from_code", "new_segment_file"]

# The dtypes that cross, by their place in this list: append only. A torch that lacks one has no code for it. The
# quantized dtypes are not among them: their tensors are more than their bytes.
_NAMES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool",
    "complex32", "complex64", "complex128", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
)  # fmt: skip
_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _NAMES)
_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


def dtype_code(dtype: torch.dtype) -> int:
    """The number of ``dtype`` on the pipe.

    Raises:
        UnsupportedOp: its tensors are more than their bytes (quantized), or it is unknown here.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise UnsupportedOp(f"tensors of {dtype} cannot be handed to a child process; convert them first")
    return code


def dtype_from_code(code: int) -> torch.dtype:
    """The dtype that :func:`dtype_code` gave ``code`` for.

    Raises:
        ProtocolError: there is none.
    """
    dtype = _DTYPES[code] if 0 <= code < len(_DTYPES) else None
    if dtype is None:
        raise ProtocolError(f"dtype number {code} is unknown to torch {torch.__version__}")
    return dtype


def new_segment_file(nbytes: int) -> int:
    """A descriptor of ``nbytes`` bytes of fresh zeros that has no name, so that nothing is left behind by a kill.

    A memfd, sealed against any change of its size; where there is none, an unlinked file in the folder for temporary
    files (TMPDIR), its blocks reserved at once: a full disk is an error here, not a SIGBUS later. /dev/shm, which
    may be of 1 MB, is not used.

    Raises:
        OSError: no descriptor, memory or disk space is left.
    """
    try:
        # the name shows in /proc/PID/maps, for whoever asks where the memory went
        fd = os.memfd_create("process-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or denied in a sandbox
        return _unlinked_file(nbytes)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlinked_file(nbytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            where = tempfile.gettempdir()
            raise OSError(
                error.errno, f"{where} has no room for {nbytes} bytes; let TMPDIR name a larger disk"
            ) from error
        return os.dup(file.fileno())


class Mapping:
    """``nbytes`` bytes of a segment's file, mapped for reading and writing, in either process.

    ``address`` is that of the first byte. The mapping keeps a duplicate of ``fd``: the caller may close its own.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mmap = mmap.mmap(fd, nbytes)
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor over the memory from byte ``offset`` on; it keeps the mapping open.

        Args:
            offset: a multiple of the size of ``dtype``.
            dtype: one that has a code.
            shape: any; () is one element.

        Raises:
            ValueError: it would not lie inside.
            StateError: the mapping is closed.
        """
        base = self._bases.get(dtype)
        if base is None:
            base = self._base(dtype)
        at, rest = divmod(offset, dtype.itemsize)
        # 1 us, a half of what frombuffer and view take
        if len(shape) == 1:
            count = shape[0]
            strides: tuple[int, ...] = (1,)
        else:
            count = math.prod(shape)
            strides = _strides(shape)
        if rest or offset < 0 or offset + count * dtype.itemsize > self.nbytes:
            raise ValueError(
                f"{dtype} of shape {shape} at byte {offset} is not aligned, or not in a segment of {self.nbytes} bytes"
            )
        return base.as_strided(shape, strides, at)

    def close(self) -> bool:
        """Unmap the memory, unless a tensor over it lives: then nothing happens, and it is False. True when closed."""
        # the bases are views of the memory as well; tensor() makes them anew
        self._bases.clear()
        try:
            self._mmap.close()
        except BufferError:
            return False
        return True

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """The bytes from ``offset`` on. It keeps the mapping open; it must not be released, only dropped."""
        return memoryview(self._mmap)[offset : offset + nbytes]

    def _base(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the memory as one tensor of ``dtype``."""
        if self._mmap.closed:
            raise StateError("the segment is unmapped", state="closed", attempted="tensor")
        # not an inference tensor, which nobody could write to later
        with torch.inference_mode(False):
            base = torch.frombuffer(memoryview(self._mmap), dtype=dtype)
        self._bases[dtype] = base
        return base


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of ``shape``."""
    step = 1
    strides = []
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    strides.reverse()
    return tuple(strides)
