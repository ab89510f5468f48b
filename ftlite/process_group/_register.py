# SPDX-License-Identifier: BSD-3-Clause
"""The groups as backends of torch: ``init_process_group(backend=...)`` and ``new_group`` make them.

torch hands a backend a store, and the groups here want the address of one, since a child process has to connect by
itself. So rank 0 hosts a TCPStore of its own for as long as the group lives, and publishes through torch's store
where it is. Nothing is registered before ``register_backend`` is called. Called from the thread that calls torch.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .._deadline import Deadline
from .._errors import StateError
from .._interfaces import choose_address
from .._net import url_host
from ._backends import BABY
from ._interface import ProcessGroup

__all__ = ["register_backend"]


@dataclass(frozen=True, slots=True)
class Backend:
    """What a backend's name stands for: a group class of this package's door, and the devices of its tensors."""

    group: str
    devices: tuple[str, ...]


BACKENDS = {
    f"{BABY}gloo": Backend("ProcessGroupBabyGloo", ("cpu",)),
    f"{BABY}nccl": Backend("ProcessGroupBabyNCCL", ("cuda",)),
    f"{BABY}xccl": Backend("ProcessGroupBabyXCCL", ("xpu",)),
}


def register_backend(
    name: str = f"{BABY}gloo",
    group: Callable[..., ProcessGroup] | None = None,
    devices: Sequence[str] | None = None,
) -> None:
    """Make ``name`` a backend for ``init_process_group`` and ``new_group``; again with the same name is a no-op.

    Args:
        name: what ``backend=`` will be; lower case.
        group: a group class, or a function, that takes ``timeout=``; None for what the name stands for here.
        devices: the device types that torch is to use it for; None for those of the name, else the CPU.

    Raises:
        ValueError: the name stands for nothing here and no group is given, or torch has a backend of that name.
    """
    if name in dist.Backend.backend_list:
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is not None and isinstance(plugin.creator_fn, _Creator):
            return
        raise ValueError(f"torch has a backend {name!r} already: give another name")
    known = BACKENDS.get(name)
    if group is None:
        if known is None:
            raise ValueError(f"the backend name {name!r} stands for nothing here: give group=, or one of {[*BACKENDS]}")
        # the door opens the room of the child groups only when one is asked for
        group = getattr(sys.modules[str(__package__)], known.group)
    found = devices if devices is not None else known.devices if known is not None else ("cpu",)
    dist.Backend.register_backend(name, _Creator(name, group), devices=list(found))


class _Creator:
    """What torch calls for each new group: ``creator(store, rank, size, timeout)``."""

    def __init__(self, name: str, make: Callable[..., ProcessGroup]) -> None:
        self.name = name
        self.make = make

    def __call__(self, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
        group = self.make(timeout=timeout)
        deadline = Deadline(timeout.total_seconds())
        try:
            # The same store and prefix serve again when torch's groups are destroyed and made once more. A
            # group comes up on all ranks or on none, so arrivals count generations.
            generation = (store.add("arrived", 1) - 1) // size
            key = f"address/{generation}"
            address = self._host(group, store, key, timeout) if rank == 0 else _read(store, key)
            group.configure(address, f"{self.name}/{rank}", rank, size)
        except BaseException as error:
            group.shutdown()
            if isinstance(error, RuntimeError) and not isinstance(error, StateError) and deadline.expired():
                raise deadline.exceeded(f"meeting at torch's store as rank {rank} of {size}") from error
            raise
        return group

    def _host(self, group: Any, store: Store, key: str, timeout: timedelta) -> str:
        address = choose_address()
        # as many connections as there are ranks; it lives and ends with the group
        group.hosted_store = TCPStore(address.ip, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        where = f"{url_host(address.ip)}:{group.hosted_store.port}/{secrets.token_hex(8)}"
        store.set(key, where)
        return where


def _read(store: Store, key: str) -> str:
    return store.get(key).decode()  # waits for the store's own timeout, which torch has set
