# SPDX-License-Identifier: BSD-3-Clause
"""Ask a backend what it can do, on a group of one, before the real group is touched.

Which dtypes and reductions a backend takes differs by torch version, and it says so in its own thread, after the
op was issued: Gloo's next barrier then fails with the error of the op before it, on the ranks where that was
slower to be cleared away, and the others wait for them. So what is not sure to be taken is tried first with one
element and one rank. Answers are kept. Any thread may ask; two that ask at once may both try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._ops import Op, Param, c10d, call

__all__ = ["Probe"]


class Probe:
    """What the backend of ``make()`` refuses. ``make`` returns one of torch's groups, of one rank, and its backend."""

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        self._make = make
        self._answers: dict[tuple[str, torch.dtype, Any], Exception | None] = {}

    def refusal(self, op: Op, dtype: torch.dtype, options: Any) -> Exception | None:
        """The backend's error for ``op`` on ``dtype`` with the reduction of ``options``; None where it takes them."""
        if options is None:  # send and receive carry bytes
            return None
        reduction = getattr(options, "reduceOp", None)
        key = (op.name, dtype, None if reduction is None else reduction.op)
        if key not in self._answers:
            self._answers[key] = self._try(op, dtype, reduction)
        return self._answers[key]

    def _try(self, op: Op, dtype: torch.dtype, reduction: Any) -> Exception | None:
        options = getattr(c10d, str(op.options))()
        if reduction is not None:
            options.reduceOp = reduction
        group, backend = self._make()
        try:
            call(op, group, [_smallest(param, dtype) for param in op.params], options).wait()
        except Exception as error:
            return error.with_traceback(None)  # which would keep the group
        finally:
            # in this order: the group's destructor waits with the GIL on torch 2.6, the backend's without
            del group
            del backend
        return None


def _smallest(param: Param, dtype: torch.dtype) -> Any:
    """An argument for a group of one: a tensor of one element, alone in its lists; even splits."""
    if param.kind in ("int", "ints"):
        return [] if param.kind == "ints" else 0
    tensor = torch.zeros(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
    return {"tensor": tensor, "tensors": [tensor], "tensor_lists": [[tensor]]}[param.kind]
