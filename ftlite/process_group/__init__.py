# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that outlive their peers: collectives in this process, or in a child behind a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import open_door

if TYPE_CHECKING:
    from ._baby import ProcessGroupBabyGloo, ProcessGroupBabyNCCL, ProcessGroupBabyXCCL
    from ._dummy import ProcessGroupDummy
    from ._in_process import ProcessGroupGloo
    from ._interface import ProcessGroup
    from ._nccl import ProcessGroupNCCL
    from ._register import register_backend
    from ._store import create_store_client
    from ._wrapper import (
        ErrorSwallowingProcessGroupWrapper,
        FakeProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroupWrapper,
    )

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "create_store_client",
    "register_backend",
]

__getattr__, __dir__ = open_door(
    __name__,
    {
        "ErrorSwallowingProcessGroupWrapper": "._wrapper",
        "FakeProcessGroupWrapper": "._wrapper",
        "ManagedProcessGroup": "._wrapper",
        "ProcessGroup": "._interface",
        "ProcessGroupBabyGloo": "._baby",
        "ProcessGroupBabyNCCL": "._baby",
        "ProcessGroupBabyXCCL": "._baby",
        "ProcessGroupDummy": "._dummy",
        "ProcessGroupGloo": "._in_process",
        "ProcessGroupNCCL": "._nccl",
        "ProcessGroupWrapper": "._wrapper",
        "create_store_client": "._store",
        "register_backend": "._register",
    },
)
