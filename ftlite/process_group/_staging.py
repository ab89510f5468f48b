# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of any strides to contiguous memory and back to exactly the elements of a view.

Rules of this file: autograd never hears of what is done here, and no version counter moves, just as with a
backend that writes to memory by itself; a user's storage stays where it is; memory that is no longer there is a
StateError, never a crash. Gloo reads and writes a view as if it were contiguous, without an error, so both the
groups in the process and the child's parent go through here. Any thread may call; what two threads do to
overlapping memory at the same time is theirs to order.
"""

from __future__ import annotations

import torch

from .._errors import StateError, UnsupportedOp

__all__ = ["alias", "overwrite", "pack", "plain", "require_memory", "stageable", "unpack"]


def stageable(tensor: torch.Tensor) -> bool:
    """Whether :func:`pack` and :func:`unpack` take ``tensor``: strided, in host memory, not quantized."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


def plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is its value: on the host, contiguous, no conj or neg bit."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as it is now: the same memory, shape and strides, outside autograd, for an op to hold on to.

    It keeps the storage alive and its shape through a later ``tensor.resize_(0)`` or ``tensor.set_(...)``, and
    sees what is written to the memory meanwhile, as the user's own views do.
    """
    return tensor.data


def require_memory(tensor: torch.Tensor, what: str = "use") -> None:
    """Check that the storage of ``tensor`` still reaches to its last element, to be asked before each use of a pointer.

    Raises:
        StateError: it does not (``untyped_storage().resize_(0)``); ``what`` was attempted.
    """
    if tensor.is_contiguous():
        elements = tensor.numel()
    else:  # no dimension is empty, or it would be contiguous
        elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    if elements == 0:
        return
    needed = (tensor.storage_offset() + elements) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if there < needed:
        raise StateError(
            f"cannot {what} a {tensor.dtype} tensor of shape {tuple(tensor.shape)}: its storage was resized to "
            f"{there} bytes and {needed} are needed; keep the storage until the operation is done",
            state="freed",
            attempted=what,
        )


def pack(view: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the elements of ``view``, in the order of its shape, to contiguous memory.

    Args:
        view: strided, on the host, any dtype and strides; expanded, conjugate or negative views too.
        into: a contiguous tensor of the same dtype and shape, on the host; None makes a new one.

    Returns:
        The contiguous tensor, which shares nothing with ``view`` and has no gradient.

    Raises:
        StateError: the memory of ``view``, or of ``into``, is gone.
        UnsupportedOp: ``view`` is not :func:`stageable`.
        ValueError: ``into`` does not fit.
    """
    _require_host(view, "read")
    if into is None:
        # a normal tensor, whatever mode the thread is in: the op that it is for may end in another thread
        with torch.inference_mode(False):
            into = torch.empty(view.shape, dtype=view.dtype, device="cpu")
    else:
        _require_fit(into, view)
        require_memory(into, "write")
    _copy(into.data, view.data)
    return into


def unpack(contiguous: torch.Tensor, view: torch.Tensor) -> None:
    """Write ``contiguous`` back to exactly the elements of ``view``; nothing else in its storage changes.

    Where several elements of ``view`` are one place in memory (an expanded view), the first of them counts.

    Args:
        contiguous: dtype and shape of ``view``, on the host.
        view: what :func:`pack` takes; also a leaf that requires a gradient, or an inference tensor.

    Raises:
        StateError: the memory of ``view``, or of ``contiguous``, is gone.
        UnsupportedOp: ``view`` is not :func:`stageable`.
        ValueError: ``contiguous`` does not fit.
    """
    _require_host(view, "write")
    _require_fit(contiguous, view)
    require_memory(contiguous, "read")
    overwrite(view, contiguous)


def overwrite(view: torch.Tensor, source: torch.Tensor) -> None:
    """What :func:`unpack` does, unchecked and on any device, where it is queued on the current stream."""
    target, source = view.data, source.data
    for d, (size, step) in enumerate(zip(target.shape, target.stride())):
        if step == 0 and size > 1:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    _copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for two tensors of equal dtype and shape that autograd does not know."""
    if target.dtype.itemsize == 1 and not (target.is_neg() or source.is_neg()):
        # of some dtypes of one byte (uint1 to uint7, float8_e8m0fnu) a torch may know no more than the size
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    if target.is_inference():
        # refused outside of the mode that made it; inside, a write is a write
        with torch.inference_mode():
            target.copy_(source)
    else:
        target.copy_(source)


def _require_host(view: torch.Tensor, what: str) -> None:
    if not stageable(view):
        kind = f"{view.layout} {view.dtype} {view.device}"
        raise UnsupportedOp(
            f"cannot {what} a {kind} tensor through host memory; give a strided CPU tensor, not quantized", op=what
        )
    require_memory(view, what)


def _require_fit(contiguous: torch.Tensor, view: torch.Tensor) -> None:
    if contiguous.dtype != view.dtype or contiguous.shape != view.shape:
        raise ValueError(
            f"{contiguous.dtype} of shape {tuple(contiguous.shape)} does not fit "
            f"{view.dtype} of shape {tuple(view.shape)}"
        )
