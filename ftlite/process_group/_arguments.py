# SPDX-License-Identifier: BSD-3-Clause
"""What may be asked of a group: the numbers that a backend takes for granted, looked at before anything is begun.

A rank that there is not ends Gloo's process by a segmentation fault, or leaves the ranks apart: for the one mistake of
a caller the group would be lost. So each is a plain ValueError or TypeError, after which everything is as it was.
Pure; any thread may call.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._net import split_store_address
from ._mapping import dtype_code
from ._ops import Op, Value

__all__ = ["require_peers", "require_sense", "require_shape"]

# What C++ on the other side takes as an int; and as an int64_t, for ranks of the whole job.
_INT_LIMIT = 1 << 31
_LONG_LIMIT = 1 << 63


def require_sense(op: Op, values: Sequence[Value], rank: int, size: int) -> None:
    """Check what of the normalised ``values`` is no tensor, for ``rank`` of ``size``. To be asked if it has numbers.

    Raises:
        ValueError: another rank, tag or split size has to be given; which is told.
    """
    tensors = iter(values)  # the split sizes of each follow, in the same order
    for param, value in zip(op.params, values):
        if param.kind == "ints":
            _require_splits(op, param.name, value, next(tensors), size)
        elif param.kind == "int" and param.name == "tag":
            if not 0 <= value < _INT_LIMIT:
                raise ValueError(
                    f"{op.name}() on rank {rank} of {size}: tag is {value}: give one from 0 to {_INT_LIMIT - 1}"
                )
        elif param.kind == "int" and (not 0 <= value < size or value == rank):
            raise ValueError(
                f"{op.name}() on rank {rank} of {size}: {param.name} is {value}: give a rank from 0 to {size - 1} "
                "other than its own"
            )


def _require_splits(op: Op, name: str, splits: Sequence[int], tensor: torch.Tensor, size: int) -> None:
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError(f"{op.name}(): the tensor that {name} is for has no dimension to split: give it one")
    if not splits:
        if shape[0] % size:
            raise ValueError(
                f"{op.name}(): {name} is empty and the tensor's shape {shape}, of which {size} ranks cannot have equal "
                "parts: give the sizes"
            )
    elif len(splits) != size or min(splits) < 0 or sum(splits) != shape[0]:
        raise ValueError(
            f"{op.name}(): {name} is {_short(splits)}: give {size} sizes, one for each rank, none negative, which add "
            f"up to the {shape[0]} of the tensor's shape {shape}"
        )


def require_peers(
    store_addr: object, rank: object, world_size: object, global_ranks: Iterable[object] | None
) -> tuple[int, int, tuple[int, ...]]:
    """Check the arguments of ``configure``; the rank, the size and the ranks in the whole job as plain ints.

    Raises:
        ValueError: one is out of its range, or the address has another form.
        TypeError: one is of a wrong type.
    """
    if not isinstance(store_addr, str):
        raise TypeError(f"store_addr is {store_addr!r} ({type(store_addr).__name__}): give 'host:port/prefix'")
    split_store_address(store_addr)
    size = _int("world_size", world_size, 1, _INT_LIMIT)
    own = _int("rank", rank, 0, size)
    ranks = () if global_ranks is None else global_ranks
    return own, size, tuple(_int("a rank in global_ranks", each, 0, _LONG_LIMIT) for each in ranks)


def require_shape(size: int | Iterable[int], dtype: object) -> tuple[tuple[int, ...], torch.dtype]:
    """Check the arguments of ``empty``; an int is the one size of a shape.

    Raises:
        UnsupportedOp: tensors of ``dtype`` are more than their bytes.
        ValueError: a size is negative.
        TypeError: one is of a wrong type.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r} ({type(dtype).__name__}): give a torch.dtype")
    dtype_code(dtype)
    sizes: Iterable[Any] = size if isinstance(size, Iterable) else (size,)
    return tuple(_int("a size", each, 0, _LONG_LIMIT) for each in sizes), dtype


def _int(name: str, value: Any, low: int, end: int) -> int:
    """``value``, which may be an integer of numpy's, as an int from ``low`` to before ``end``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): give an int")
    if not low <= number < end:
        raise ValueError(f"{name} is {number}: give one from {low} to {end - 1}")
    return number


def _short(numbers: Sequence[int]) -> str:
    """A list of numbers for a message, as far as it is short."""
    return str(list(numbers)) if len(numbers) <= 16 else f"{str(list(numbers[:16]))[:-1]}, ...], {len(numbers)} of them"
