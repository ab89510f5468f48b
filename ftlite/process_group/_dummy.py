# SPDX-License-Identifier: BSD-3-Clause
"""A group of one that talks to nobody: for code that insists on a group where there is nothing to share.

Every op is done when its call returns, so there is nothing to abort. Thread-safe as torch's copies are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Work

from ._handle import finished
from ._interface import ProcessGroup
from ._ops import Op, results, walk

__all__ = ["ProcessGroupDummy"]


class ProcessGroupDummy(ProcessGroup):
    """Rank 0 of 1: a reduction leaves its tensors as they are, a gathering copies its inputs to its outputs.

    ``configure`` may be called with anything and only counts (``configure_count``); the group stays of one.

    Raises:
        ValueError: another rank or size is asked for.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        if (rank, world) != (0, 1):
            raise ValueError(f"ProcessGroupDummy is rank 0 of 1, not {rank} of {world}: use another group for more")
        self.configure_count = 0

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Count the call; nobody is met."""
        self.configure_count += 1

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        tensors: dict[str, list[torch.Tensor]] = {"in": [], "out": [], "inout": []}
        for direction, tensor in walk(op, values):
            tensors[direction].append(tensor)
        _copy_each(tensors["out"], tensors["in"])
        return finished(op.name, results(op, values))

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0

    def getBackendName(self) -> str:
        """``dummy``."""
        return "dummy"


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy as a group of one would; a recv has no source and leaves its tensor as it is."""
    with torch.no_grad():
        for target, source in zip(targets, sources):
            target.detach().copy_(source.detach())
