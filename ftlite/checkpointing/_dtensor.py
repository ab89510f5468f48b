# SPDX-License-Identifier: BSD-3-Clause
"""DTensors: the local shard travels, the receiver's own mesh stays.

The class is looked up in ``sys.modules``: who has a DTensor has imported it, and importing it here would
cost everybody else 0.6 s.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def dtensor_class() -> type | None:
    """torch's DTensor, or None in a process that cannot have one."""
    module = sys.modules.get("torch.distributed.tensor")
    found = getattr(module, "DTensor", None)
    return found if isinstance(found, type) else None


def is_dtensor(obj: object) -> bool:
    """Whether ``obj`` is a DTensor."""
    cls = dtensor_class()
    return cls is not None and type(obj) is cls


def local_shard(tensor: Any) -> torch.Tensor:
    """The shard that this process holds, sharing its memory and with no history."""
    shard: torch.Tensor = tensor._local_tensor  # to_local() would record an autograd step and sync a pending op
    return shard


def describe(tensor: Any) -> dict[str, Any]:
    """What must be equal on both sides for the shards to be the same part of the same whole, as JSON."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    return {
        "shape": list(tensor.shape),
        "placements": [str(p) for p in tensor.placements],
        "mesh": list(mesh.mesh.shape),
        "names": list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
        "coordinate": list(coordinate) if coordinate is not None else None,
    }
