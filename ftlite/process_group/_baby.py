# SPDX-License-Identifier: BSD-3-Clause
"""Groups whose backend runs in a child process: it may hang, crash or be killed, and the trainer goes on.

A group has one child at a time, for as long as it keeps its peers. ``configure`` leaves the old one behind, whatever
state it is in, and has the template fork a new one: milliseconds, where the start of a process costs seconds.

Threads: everything from any; two of ``configure`` take turns, and ``shutdown`` ends the one that is under way. A fork
of the trainer cannot use its groups, and leaves them alone when it ends.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import Work

from .._deadline import Deadline, Timeout
from .._errors import StateError, UnsupportedOp
from . import _messages as says
from ._accelerator import current_device
from ._arena import Arena
from ._arguments import require_peers, require_sense, require_shape
from ._backends import BABY, BACKENDS
from ._exports import AllExports
from ._interface import ProcessGroup
from ._ops import Op
from ._owner import Owner
from ._session import Session
from ._template import Template, acquire

__all__ = ["ProcessGroupBaby", "ProcessGroupBabyGloo", "ProcessGroupBabyNCCL", "ProcessGroupBabyXCCL"]


class _Holdings:
    """What a group has to give back, apart from it, so that its destructor can."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.template: Template | None = None
        self.session: Session | None = None
        self.arena = Arena()
        self.exports = AllExports()

    def drop(self) -> None:
        """The group was collected: in any thread, in the middle of anything, so nothing may wait here."""
        if not self.owner.is_here():
            return
        session, template = self.session, self.template
        if session is not None:
            session.cut()
        if template is not None:
            # the release waits for the end of the template process
            thread = threading.Thread(target=template.release, name="release the template", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and the template by its own exit hook
                thread.start()


class ProcessGroupBaby(ProcessGroup):
    """A group in a child process. A subclass names its backend.

    Args:
        timeout: a timedelta or seconds, for ``configure`` and for every op.

    Raises:
        UnsupportedOp: a subclass names a backend that there is not.
    """

    backend: ClassVar[str]

    def __init__(self, timeout: Timeout = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        if self.backend not in BACKENDS:
            raise UnsupportedOp(
                f"{type(self).__name__} is for {self.backend!r}: choose one of {', '.join(BACKENDS)}",
                backend=self.backend,
                op="configure",
            )
        self._turn = threading.RLock()  # one configure at a time; a callback of what one ends may call it again
        self._holding = threading.Lock()  # guards what is held; nothing waits under it
        self._epoch = 0
        self._rank = 0
        self._size = 1
        self._held = _Holdings()
        self._held.template = acquire()
        weakref.finalize(self, self._held.drop).atexit = False  # the template's own exit hook ends it all

    # --- its life ---------------------------------------------------------------------------------------

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
        """Meet new peers in a new child, as :meth:`ProcessGroup.configure`; what was pending fails as stale.

        Raises:
            ChildStartFailed: no child could be started; its exit code and the end of its stderr are told.
            RemoteFailure: the backend did not come up.
        """
        self._held.owner.require("configure")
        peers = require_peers(store_addr, rank, world_size, global_ranks)
        deadline = Deadline(self._timeout_s)
        if not self._turn.acquire(timeout=deadline.limit_s):
            raise deadline.exceeded("configure: waiting for another call of configure")
        try:
            session, old = self._begin(store_addr, *peers, deadline)
            if old is not None:
                old.supersede()
            session.start(current_device(BACKENDS[self.backend].devices[0]), deadline)
            if old is not None:
                old.until_dead()
        finally:
            self._turn.release()

    def _begin(
        self, store_addr: str, rank: int, world_size: int, global_ranks: tuple[int, ...], deadline: Deadline
    ) -> tuple[Session, Session | None]:
        with self._holding:
            held = self._held
            if held.template is None:  # after a shutdown
                held.template = acquire()
            self._epoch += 1
            message = says.Configure(
                self._epoch, self.backend, store_addr, rank, world_size, deadline.remaining_s(), global_ranks
            )
            session = Session(held.template, held.arena, held.exports, message)
            old, held.session = held.session, session
            self._rank, self._size = rank, world_size
            return session, old

    def abort(self, reason: Any = None) -> None:
        """Kill the child and fail everything pending with ``reason`` (an exception or a text), at once.

        During ``configure``, that raises. Before it and when called again, nothing happens. From any thread, but a
        signal handler may have interrupted whoever holds the locks: there, start a thread that calls it.
        """
        self._held.owner.require("abort")
        session = self._held.session
        if session is not None:
            session.abort(reason)

    def shutdown(self) -> None:
        """End the child and give everything back, within half a second; a ``configure`` under way raises.

        A tensor from :meth:`empty` stays what it is, and an op of a later configure copies it as any other.
        """
        held = self._held
        if self._is_unregistering() or not held.owner.is_here():
            return
        with self._holding:
            session, held.session = held.session, None
            template, held.template = held.template, None
            # The memory of the old one goes with the last who uses it: to unmap it here would be a segmentation
            # fault for a thread in the middle of an op.
            held.arena = Arena()
        if session is not None:
            session.close()
        if template is not None:
            template.release()

    def errored(self) -> Exception | None:
        """What broke the group since ``configure``, after which only another one helps; None while it works."""
        session = self._held.session
        return None if session is None else session.error

    # --- ops --------------------------------------------------------------------------------------------

    def _issue(self, op: Op, values: list[Any], options: Any) -> Work:
        session = self._held.session
        self._held.owner.require(op.name)
        if session is None:
            raise StateError(
                f"{op.name} on {self!r}, which has no peers: call configure() first",
                state="unconfigured",
                attempted=op.name,
            )
        if op.has_numbers:
            require_sense(op, values, session.rank, session.size)
        return session.issue(op, values, options, self._timeout_s)

    def empty(self, size: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A CPU tensor, its content undefined, in memory that the children see: its ops need no copy.

        Args:
            size: its shape; an int is the one size of a shape.
            dtype: its dtype.

        Its storage cannot be resized; it may outlive the group.

        Raises:
            UnsupportedOp: a child takes no tensors of ``dtype``, such as quantized ones.
            ValueError: a size is negative.
        """
        self._held.owner.require("empty")
        return self._held.arena.empty(*require_shape(size, dtype))

    # --- what it is -------------------------------------------------------------------------------------

    def size(self) -> int:
        """How many ranks the group has now; 1 before ``configure``."""
        return self._size

    def rank(self) -> int:
        """The rank of this process; 0 before ``configure``."""
        return self._rank

    def child_pid(self) -> int | None:
        """The process id of the child; None without one, also once it is known to be dead."""
        session = self._held.session
        return None if session is None else session.child_pid()

    def num_active_work(self) -> int:
        """How many ops have not settled."""
        session = self._held.session
        return 0 if session is None else session.active

    def getBackendName(self) -> str:
        """Under which name ``register_backend`` makes it known."""
        return f"{BABY}{self.backend}"

    def _devices(self) -> list[str]:
        return list(BACKENDS[self.backend].devices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank()} of {self.size()})"


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """Gloo in a child process, for CPU tensors of any strides, and CUDA tensors where this torch's Gloo takes them."""

    backend = "gloo"


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """NCCL in a child process, for CUDA tensors; ``wait()`` makes the current stream wait, not the host."""

    backend = "nccl"


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """XCCL in a child process, for XPU tensors."""

    backend = "xccl"
