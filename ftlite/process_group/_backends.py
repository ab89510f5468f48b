# SPDX-License-Identifier: BSD-3-Clause
"""The backends as records: what tells one from another, and nothing else.

A native group is torch's ProcessGroup with one backend in it: that has every method of torch's table, and says by
itself what its backend cannot do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from .._errors import StateError, UnsupportedOp
from ._ops import c10d

__all__ = ["BABY", "BACKENDS", "Backend", "new_gloo", "new_nccl"]

# Before a backend's name, that of its group in a child: documented, the same in a copy of this package.
BABY = "ftlite-baby-"
# Gloo takes whole milliseconds, and zero for "no limit".
_SHORTEST_S = 0.001
# torch reads these when it makes an NCCL group; whatever the user has set stays. By torch's documentation:
# no handling of errors by ending or cleaning up the process; no thread that ends it when the watchdog is stuck;
# no CUDA error thrown from a thread where nobody catches it; no dump.
_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
# How long torch polls a non-blocking communicator for, in seconds; 30 minutes where it is not set. Read once per
# process, so the timeout of the first group counts.
_NONBLOCKING = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
# With it, a wait of the child's would be for the device, and hold up every op after it.
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# torch's limit, beyond ours, so that the overseer is the first to act.
_FAR_S = 86_400.0
# Gloo hands the address of a tensor to the kernel here, whichever device it is on: an error, and a broken connection.
_GLOO_HOST_ONLY = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend.

    ``name`` is torch's for it, ``devices`` are those whose tensors it takes, and ``make(store, rank, size,
    timeout_s, global_ranks)`` meets the other ranks and returns the native group. ``queues``: an op is over for
    ``wait`` once it is queued on the device. ``host_only`` ops take no device tensors, though the backend does
    not say so. ``abort`` makes the device leave what is queued.
    """

    name: str
    devices: tuple[str, ...]
    make: Callable[[Store, int, int, float, Sequence[int]], Any]
    queues: bool = False
    host_only: frozenset[str] = frozenset()
    abort: Callable[[Any], None] | None = None


def new_gloo(
    store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int], devices: Sequence[str]
) -> tuple[Any, Any]:
    """torch's group with a Gloo backend for ``devices``, and that.

    Raises:
        StateError: GLOO_SOCKET_IFNAME names no interface that has an address.
    """
    limit = timedelta(seconds=max(timeout_s, _SHORTEST_S))
    try:
        backend = c10d.ProcessGroupGloo(store, rank, size, _gloo_options(limit))
    except RuntimeError as error:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface is None or "find address" not in str(error):
            raise
        raise StateError(
            f"GLOO_SOCKET_IFNAME is {interface!r}, for which Gloo finds no address on this machine: give the name of "
            f"an interface that has one, or unset it ({error})",
            state="unconnected",
            attempted="configure",
        ) from error
    backend._set_sequence_number_for_group()
    if global_ranks and hasattr(backend, "options"):
        backend.options.global_ranks_in_group = list(global_ranks)
    return _native(store, rank, size, dist.ProcessGroup.BackendType.GLOO, backend, devices), backend


def _gloo_options(limit: timedelta) -> Any:
    """What torch's other constructor makes of a timeout and the environment.

    That one enters its object into pybind's table without the GIL, in torch 2.6 at least: when another thread makes or
    drops any of torch's objects at that moment, the process aborts ("Tried to deallocate unregistered instance").
    """
    cls = c10d.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    made = cls._Options()
    with _threads_that_wait():
        made._devices = [cls.create_device(interface=name) for name in interfaces] or [cls.create_default_device()]
    made._threads = 2 * len(made._devices)  # torch's own number
    made._timeout = limit
    return made


@contextlib.contextmanager
def _threads_that_wait() -> Iterator[None]:
    """Threads started in here interrupt no other when they wake, but wait for a free core, or for their share of one.

    A device of Gloo's has a thread that polls its sockets, and one of the two holds the lock that the other needs
    while it writes. Where all cores are busy, the poller interrupts the very write that woke it, and polls in vain
    until that goes on: on two cores, two ranks and one float it had 43 % of a child's time. The scheduler's policy for
    batches is this and no more (sched(7)). A thread has the policy of the one that starts it.
    """
    changed = False
    with contextlib.suppress(OSError, AttributeError):  # a sandbox may refuse, and only Linux has it: slower, no more
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # of this thread; what somebody has chosen stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _make_gloo(store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]) -> Any:
    # it copies the tensors of a device to the host and back by itself, where this torch was built with it
    built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    devices = ("cpu", "cuda") if built else ("cpu",)
    return new_gloo(store, rank, size, timeout_s, global_ranks, devices)[0]


def new_nccl(store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]) -> tuple[Any, Any]:
    """torch's group with a non-blocking NCCL backend on the current device, and that; its watchdog touches nothing.

    Raises:
        UnsupportedOp: there is no NCCL here.
    """
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise UnsupportedOp(
            f"torch {torch.__version__} here has no NCCL or no CUDA device: use Gloo", backend="nccl", op="configure"
        )
    options = c10d.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=_FAR_S)
    options.global_ranks_in_group = list(global_ranks)
    with _watchdog_off(timeout_s):
        backend = c10d.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return _native(store, rank, size, dist.ProcessGroup.BackendType.NCCL, backend, ("cuda",)), backend


@contextlib.contextmanager
def _watchdog_off(timeout_s: float) -> Iterator[None]:
    """Set torch's variables where the user has not, while a group is made."""
    added = {name: value for name, value in _WATCHDOG_OFF.items() if name not in os.environ}
    os.environ.setdefault(_NONBLOCKING, str(max(1, round(timeout_s))))  # stays: torch reads it at the first wait
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _make_nccl(store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]) -> Any:
    os.environ[_BLOCKING_WAIT] = "0"  # of this process, which is a child
    return new_nccl(store, rank, size, timeout_s, global_ranks)[0]


def _abort_cuda(native: Any) -> None:
    native._get_backend(torch.device("cuda")).abort()


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
        Backend("gloo", ("cpu",), _make_gloo, host_only=_GLOO_HOST_ONLY),
        Backend("nccl", ("cuda",), _make_nccl, queues=True, abort=_abort_cuda),
        Backend("xccl", ("xpu",), _make_xccl, queues=True),
    )
}
