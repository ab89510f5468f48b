# SPDX-License-Identifier: BSD-3-Clause
"""What every process group here is: torch's ProcessGroup, plus ``configure()`` and an end to every error.

The collectives are not written out. Each is made from its line in the table of ``_ops`` and hands what it was
called with, in one form, to the one hook that a group implements::

    _issue(op, values, options) -> Work

C++ (DistributedDataParallel's reducer, functional collectives) looks the same methods up by name, so a group in
Python may stand wherever torch's own may. It asks for ``getSize`` and ``getRank`` where Python asks for ``size``
and ``rank``, and for its name by four more, which the base class answers only with a native backend behind it.

Threads: any method may be called from any thread; what may run at the same time is for each group to say.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Work

from .._compat import WORK_LOSES_ITS_PYTHON_HALF
from .._deadline import Timeout, seconds
from .._errors import StateError, UnsupportedOp
from ._handle import OpWork
from ._ops import BY_NUMBER, Op, normalise

__all__ = ["ProcessGroup"]

# torch asks for a time when a group is registered, and nothing waits for anybody there: only this rank takes part.
_REGISTER_LIMIT = timedelta(seconds=60)

Group = TypeVar("Group", bound="ProcessGroup")


class ProcessGroup(dist.ProcessGroup):
    """The base of every group. A subclass has ``configure``, ``_issue``, ``size``, ``rank`` and ``getBackendName``.

    Args:
        timeout: the group's timeout, a timedelta or seconds: the limit of ``configure`` and of every op.
    """

    # what devices the group takes tensors of; None: the CPU, and CUDA or XPU where torch has one
    devices: ClassVar[Sequence[str] | None] = None

    def __init__(self, timeout: Timeout = 60.0) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # for groups without a native backend
        self._timeout_s = seconds(timeout)
        self._name: str | None = None
        self._desc = "undefined"  # torch's own word for none
        self._registered: set[str] = set()
        self._unregistering = threading.local()
        self._kept: dict[int, OpWork] = {}

    # --- for a group to implement -----------------------------------------------------------------------

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
        """Leave the present peers, if any, and meet new ones; return when all ranks are there.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore, with a prefix that was never used before.
            replica_id: who this is, for logs.
            rank: of this process among the new peers.
            world_size: how many they are.
            quorum_id: number of the decision that brought them together, for logs.
            group_rank: rank of this process within its replica, for logs.
            group_world_size: how many ranks a replica has, for logs.
            global_ranks: the ranks of the peers in the whole job, for torch's flight recorder.

        Raises:
            DeadlineExceeded: not all ranks came within the group's timeout.
            ValueError, TypeError: an argument makes no sense; the present peers stay.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure()")

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        """Start ``op``.

        Args:
            op: its line in the table.
            values: one per parameter, as ``_ops.normalise`` gives them; the lists are the callee's.
            options: an object of torch's class ``op.options`` that may be the caller's own, so not to be changed,
                or None.
        """
        raise UnsupportedOp(f"{type(self).__name__} has no {op.name}", backend=type(self).__name__, op=op.name)

    def size(self) -> int:
        """How many ranks the group has now."""
        raise NotImplementedError(f"{type(self).__name__} has no size()")

    def rank(self) -> int:
        """The rank of this process in the group."""
        raise NotImplementedError(f"{type(self).__name__} has no rank()")

    def getBackendName(self) -> str:
        """The name by which torch knows the kind of this group."""
        raise NotImplementedError(f"{type(self).__name__} has no getBackendName()")

    def abort(self, reason: Any = None) -> None:
        """End everything pending with ``reason`` (an exception or a text); ``configure`` heals. From any thread.

        A signal handler may have interrupted whoever holds the locks: there, start a thread that calls it.
        """

    def shutdown(self) -> None:
        """Give everything back. Again is a no-op; ``configure`` makes the group usable again."""

    def errored(self) -> Exception | None:
        """The first failure since ``configure``, after which only another ``configure`` helps; None without one."""
        return None

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the group's timeout for what is called from now on; a timedelta or seconds."""
        self._timeout_s = seconds(timeout)

    def num_active_work(self) -> int:
        """How many ops are not finished."""
        return 0

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Gloo's barrier that names the ranks that are missing, where the group has it.

        Raises:
            UnsupportedOp: it has not.
        """
        backend = self.getBackendName()
        raise UnsupportedOp(
            f"{backend} has no monitored_barrier: use barrier(), whose error names what is known",
            backend=backend,
            op="monitored_barrier",
        )

    # --- what C++ asks ----------------------------------------------------------------------------------

    def getSize(self) -> int:
        """``size()``, for C++."""
        return self.size()

    def getRank(self) -> int:
        """``rank()``, for C++."""
        return self.rank()

    def name(self) -> str:
        """``getBackendName()``, as torch's ProcessGroup has it."""
        return self.getBackendName()

    def getGroupName(self) -> str:
        """``group_name``, for C++."""
        return self.group_name

    def setGroupName(self, name: str) -> None:
        """Set ``group_name``, for C++."""
        self._name = name

    def getGroupDesc(self) -> str:
        """``group_desc``, for C++."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set ``group_desc``, for C++."""
        self._desc = desc

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's NewType over str is newer than 2.6
        """The name under which torch registered this group.

        Raises:
            ValueError: it has not.
        """
        if self._name is None:
            raise ValueError(f"{self!r} has no name: it gets one by register() or from torch's new_group()")
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for, in words."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # --- torch's registry -------------------------------------------------------------------------------

    def register(self: Group, name: str) -> Group:
        """Make the group known to torch, so that functional collectives and DeviceMesh take it.

        torch has to be initialised, over whatever backend. For torch's tables the group has one rank, this one,
        because they cannot follow a group that changes; the collectives follow it.

        Args:
            name: a word that no other group is registered under in this process.

        Returns:
            This group.

        Raises:
            StateError: torch is not initialised, or the group is registered already.
        """
        if not dist.is_initialized():
            raise StateError(
                f"{self!r} cannot be registered before torch.distributed is initialised: call init_process_group() "
                "first, for example over gloo with a world size of 1",
                state="uninitialised",
                attempted="register",
            )
        if self._name is not None:
            raise StateError(
                f"{self!r} is registered as {self._name!r}: call unregister() first",
                state="registered",
                attempted="register",
            )
        backend = f"{self.getBackendName()}-{name}".lower()
        if backend not in self._registered:
            if backend in dist.Backend.backend_list:
                raise StateError(
                    f"another group was registered as {name!r} in this process: choose another name",
                    state="registered",
                    attempted="register",
                )
            dist.Backend.register_backend(backend, _Same(self), devices=self._devices())
            self._registered.add(backend)
        # local: only this rank takes part, so no other has to call new_group at the same time
        made = dist.new_group(
            [dist.get_rank()],
            backend=backend,
            group_desc=name,
            timeout=_REGISTER_LIMIT,
            use_local_synchronization=True,
        )
        if made is not self:
            raise StateError(f"torch registered {made!r} in the place of {self!r}", attempted="register")
        return self

    def unregister(self) -> None:
        """Take the group out of torch's registry; the group itself goes on. Without ``register`` a no-op."""
        if self._name is None:
            return
        self._unregistering.now = True  # destroying a group shuts it down in later torch
        try:
            dist.destroy_process_group(self)
        finally:
            self._unregistering.now = False
            self._name = None

    def _is_unregistering(self) -> bool:
        """Whether this very call of ``shutdown`` comes from torch, in the middle of ``unregister``."""
        return getattr(self._unregistering, "now", False)

    def _devices(self) -> list[str]:
        if self.devices is not None:
            return list(self.devices)
        found = ["cpu"]
        found += ["cuda"] if torch.cuda.is_available() else []
        found += ["xpu"] if torch.xpu.is_available() else []
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Same:
    """What torch calls to make a registered group: gives the one there is, without keeping it alive."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self, *_: Any) -> ProcessGroup | None:
        return self._group()


def _collective(op: Op, name: str) -> Callable[..., Work]:
    """The method of ``op`` under ``name``."""

    def method(self: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
        values, options = normalise(op, args, kwargs)
        work = self._issue(op, values, options)
        if WORK_LOSES_ITS_PYTHON_HALF and isinstance(work, OpWork):
            # C++ notes it for each output of such an op, and waits for each
            work.keep_in(self._kept, len(values[0]) if op.name.endswith("_coalesced") else 1)
        return work

    method.__name__ = name
    method.__qualname__ = f"ProcessGroup.{name}"
    takes = ", ".join(f"{param.name} ({param.kind}, {param.direction or 'no tensor'})" for param in op.params)
    method.__doc__ = (
        f"Issue {op.name}: {takes or 'nothing'}; options {op.options or 'none'}. Returns a Work.\n\n"
        "        A lone tensor stands for a list of one; the fields of the options may be given in their place, by\n"
        "        position or as ``op``, ``root``, ``timeout``, as with torch's own overloads.\n"
    )
    return method


for _op in BY_NUMBER:
    setattr(ProcessGroup, _op.name, _collective(_op, _op.name))
    if _op.newer is not None:  # also before torch has the name: a script may be written for a later one
        setattr(ProcessGroup, _op.newer, _collective(_op, _op.newer))
