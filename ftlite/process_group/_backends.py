# SPDX-License-Identifier: BSD-3-Clause
"""The backends as records: what tells one from another, and nothing else.

A native group is torch's ProcessGroup with one backend in it: that has every method of torch's table, and says by
itself what its backend cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .._errors import UnsupportedOp
from ._ops import c10d

__all__ = ["BACKENDS", "Backend"]

# Gloo takes whole milliseconds, and zero for "no limit".
_SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend.

    ``name`` is torch's for it, ``devices`` are those whose tensors it takes, and ``make(store, rank, size,
    timeout_s, global_ranks)`` meets the other ranks and returns the native group.
    """

    name: str
    devices: tuple[str, ...]
    make: Callable[[Store, int, int, float, Sequence[int]], Any]


def _make_gloo(store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]) -> Any:
    backend = c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=max(timeout_s, _SHORTEST_S)))
    backend._set_sequence_number_for_group()
    if global_ranks and hasattr(backend, "options"):
        backend.options.global_ranks_in_group = list(global_ranks)
    return _native(store, rank, size, dist.ProcessGroup.BackendType.GLOO, backend, BACKENDS["gloo"].devices)


def _make_xccl(store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]) -> Any:
    cls = getattr(c10d, "ProcessGroupXCCL", None)
    kind = getattr(dist.ProcessGroup.BackendType, "XCCL", None)
    if cls is None or kind is None:
        raise UnsupportedOp(f"this torch ({torch.__version__}) was built without XCCL", backend="xccl", op="configure")
    options = cls.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(global_ranks)
    return _native(store, rank, size, kind, cls(store, rank, size, options), BACKENDS["xccl"].devices)


def _native(store: Store, rank: int, size: int, kind: Any, backend: Any, devices: Sequence[str]) -> Any:
    native: Any = dist.ProcessGroup(store, rank, size)
    native._set_default_backend(kind)
    for device in devices:
        native._register_backend(torch.device(device), kind, backend)
    return native


BACKENDS = {
    each.name: each
    for each in (
        Backend("gloo", ("cpu",), _make_gloo),
        Backend("xccl", ("xpu",), _make_xccl),
    )
}
