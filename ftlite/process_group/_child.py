# SPDX-License-Identifier: BSD-3-Clause
"""What a child runs: it makes the backend, starts the ops that the trainer sends, and says when each is done.

The contract
    descriptors   ``end``, the socket to the trainer, in frames of ``Pipe``
    first         Hello; then Configure is awaited, and answered by Ready or ConfigureFailed
    then          each Run by Done, OpFailed or Unsupported, in whatever order the ops end; each RunOnDevice likewise,
                  but once it is queued on the device
    last          nothing: the trainer sends Bye, or closes the socket, or kills this process
    exit code     0 after Bye, and when the trainer has closed the socket; 70 and a traceback otherwise

Ops are started in the order of their messages, for that is how a backend pairs them with those of the other ranks;
one with ``after`` waits here for that op, and whatever follows waits with it, as it would on a device's stream.

Threads: the main one reads and starts. Done is sent by whoever notices the end: a thread of the backend's in the
callback of a future, or, for Works that have none, one of ours that waits for it. What fails on the device, or never
ends, the overseer notices: then it says Broken, since that op is done for the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from .._deadline import LONGEST_S, Deadline
from .._errors import ProtocolError, UnsupportedOp
from . import _messages as says
from ._backends import BACKENDS, Backend
from ._device_child import Devices, Queued
from ._mapping import Mapping, dtype_from_code
from ._native import explained, future_of, source_of
from ._ops import BY_NUMBER, Op, c10d, call, walk
from ._options import options_from_fields
from ._overseer import Overseer
from ._pipe import Pipe, PipeBroken
from ._probe import Probe
from ._store import create_store_client
from ._waiters import Waiters

__all__ = ["main"]

_logger = logging.getLogger(__name__)

# The trainer may be stopped in a debugger for as long as somebody looks at it; one that is gone is an end of file.
_WRITE_LIMIT_S = LONGEST_S
# As much of a text as an error is to repeat: a message of NCCL's with its stack, and not a dump of a tensor.
_TEXT_CHARS = 20_000
# How many different calls are remembered: some steps of a model with hundreds of parameters, at 1 KB each.
_KNOWN = 1024
# What every torch since 2.6 reduces over every backend, and how; anything else is tried first.
_SURE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_SURE_REDUCTIONS = frozenset({c10d.ReduceOp.SUM, c10d.ReduceOp.PRODUCT, c10d.ReduceOp.MIN, c10d.ReduceOp.MAX})
# That is with one element and one rank: there is nobody to wait for.
_PROBE_S = 10.0
# torch looks up the name of every address that it connects to, and the C library asks again after 5 s, twice. On a
# network that loses packets that is a group's whole limit; sooner and more often takes no longer in all.
_RESOLVER = "timeout:1 attempts:5"
# A shutdown lets the device finish: so long, of the 0.25 s that the trainer gives it.
_FINISH_S = 0.1


def main(end: socket.socket) -> int:
    """Serve the trainer at the other side of ``end`` until it has no more to say; the exit code."""
    os.environ.setdefault("RES_OPTIONS", _RESOLVER)
    return _Child(Pipe(end, _WRITE_LIMIT_S, is_greedy=True)).run()


@dataclass(slots=True)
class _Running:
    """An op that was started, with what has to live until it is done."""

    op: Op
    work: Any
    values: list[Any]
    options: Any


class _Child:
    """The one trainer, the one backend and the ops that run."""

    def __init__(self, pipe: Pipe, devices: Devices | None = None) -> None:
        self._pipe = pipe
        self._devices = devices or Devices()
        self._overseer: Overseer | None = None
        self._probe: Probe | None = None  # for a backend that says what it takes only once it has been tried
        self._segments: dict[int, Mapping] = {}
        self._backend: Backend | None = None
        self._group: Any = None
        self._timeout_s = 0.0
        self._changed = threading.Condition()
        self._awaited = -1  # the op that the main thread waits for
        self._running: dict[int, _Running] = {}
        self._known: dict[tuple[Any, ...], tuple[list[Any], Any]] = {}
        self._waiters = Waiters()

    def run(self) -> int:
        try:
            self._say(says.Hello(os.getpid()))
            while True:
                message = says.decode(self._pipe.receive())
                if isinstance(message, says.Bye):
                    self._leave(_FINISH_S)
                    return 0
                self._obey(message)
        except PipeBroken:  # the trainer is gone, or has no use for this process any more
            self._leave(0.0)
            return 0
        except Exception as error:
            self._say(says.Broken(*_told(error)))
            raise

    def _say(self, message: says.Message) -> None:
        self._pipe.send(says.encode(message))

    def _obey(self, message: says.Message) -> None:
        if isinstance(message, says.Run):
            self._start(message)
        elif isinstance(message, says.Segment):
            fd = self._pipe.receive_fd()
            try:
                self._segments[message.number] = Mapping(fd, message.nbytes)
            finally:
                os.close(fd)
        elif isinstance(message, says.DropSegment):
            self._known.clear()  # tensors there may lie in it
            self._segments.pop(message.number).close()
        elif isinstance(message, says.Configure):
            self._configure(message)
        elif isinstance(message, says.RunOnDevice):
            self._start_on_device(message)
        elif isinstance(message, (says.DeviceMemory, says.DropMemory, says.DeviceEvents)):
            if self._overseer is None:
                self._overseer = Overseer(self._is_late, self._has_ended, self._tell_dropped)
            if isinstance(message, says.DropMemory):
                self._known.clear()  # tensors there may lie in it
            self._devices.obey(message)
        else:
            raise ProtocolError(f"the trainer sent {type(message).__name__}, which is the child's to say")

    def _configure(self, message: says.Configure) -> None:
        self._timeout_s = message.timeout_s
        try:
            backend = self._backend = BACKENDS[message.backend]
            self._say(says.Phase(f"connecting to the store at {message.store_addr}"))
            store = create_store_client(message.store_addr, message.timeout_s)
            self._say(says.Phase(f"meeting the other {message.world_size - 1} ranks at {message.store_addr}"))
            ranks = message.global_ranks
            self._group = backend.make(store, message.rank, message.world_size, message.timeout_s, ranks)
        except PipeBroken:
            raise
        except BaseException as error:  # SystemExit of a library as well: the trainer has to be told
            self._say(says.ConfigureFailed(*_told(error)))
            return
        if not backend.queues:
            self._probe = Probe(lambda: _group_of_one(backend))
        self._say(says.Ready(message.epoch))

    # --- ops --------------------------------------------------------------------------------------------

    def _start(self, message: says.Run) -> None:
        (op, _), op_id = self._op(message), message.op_id
        if message.after >= 0:
            self._await(message.after)
        values: list[Any] = []
        options = None
        try:
            values, options = self._arguments(op, message)
            work = call(op, self._group, values, options)
        except ProtocolError:
            raise
        except BaseException as error:
            self._failed(op_id, _Running(op, None, values, options), error)
            return
        self._running[op_id] = _Running(op, work, values, options)
        future = future_of(work)
        if future is not None:
            future.add_done_callback(lambda future: self._ended(op_id, future))
        else:
            # never a shorter time than the op's: Gloo closes the connection for good when such a wait ends
            limit = timedelta(seconds=message.timeout_s)
            self._waiters.run(lambda: self._wait(op_id, lambda: work.wait(limit)))

    def _await(self, op_id: int) -> None:
        """Wait for an op that the next one follows; the trainer's own limit ends this process if it takes too long."""
        with self._changed:
            self._awaited = op_id
            self._changed.wait_for(lambda: op_id not in self._running, LONGEST_S)
            self._awaited = -1

    def _start_on_device(self, message: says.RunOnDevice) -> None:
        (op, backend), op_id = self._op(message), message.op_id
        running = _Running(op, None, [], None)
        queued = None
        try:
            pair = self._devices.pair(message.pair)
            with self._devices.entered(pair):
                running.values, running.options = self._arguments(op, message, pair)
                tensors = walk(op, running.values)
                if tensors and op.name in backend.host_only:
                    raise UnsupportedOp(
                        f"{backend.name} can {op.name} tensors on the CPU only", backend=backend.name, op=op.name
                    )
                running.work = call(op, self._group, running.values, running.options)
            if backend.queues and tensors:  # without any it is a barrier, which is for the host
                self._devices.finish(running.work, pair, None)
                queued = Queued(running.work, pair)
        except ProtocolError:
            raise
        except BaseException as error:
            self._failed(op_id, running, error)
            return
        if queued is not None:
            if self._overseer is not None:
                self._overseer.watch(message.timeout_s, f"{op.name} (op {op_id}) on {backend.name}", queued)
            self._say(says.Done(op_id))
            return
        self._running[op_id] = running
        self._waiters.run(
            lambda: self._wait(op_id, lambda: self._devices.finish(running.work, pair, message.timeout_s))
        )

    def _op(self, message: says.Run | says.RunOnDevice) -> tuple[Op, Backend]:
        backend = self._backend
        if backend is None or not 0 <= message.op < len(BY_NUMBER):
            raise ProtocolError(f"op number {message.op} before Configure, or not in the table of {len(BY_NUMBER)}")
        return BY_NUMBER[message.op], backend

    def _arguments(self, op: Op, message: says.Run | says.RunOnDevice, pair: Any = None) -> tuple[list[Any], Any]:
        """The tensors and the options of an op. A training step is like the one before: they are made once."""
        key = (message.op, message.args, message.options, message.timeout_s)
        known = self._known.get(key)
        if known is None:
            options = options_from_fields(op.options, message.options)
            if options is not None and message.timeout_s != self._timeout_s:
                options.timeout = timedelta(seconds=message.timeout_s)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            values = [self._value(arg, pair) for arg in message.args]
            if pair is None:
                self._require_taken(op, values, options)
            known = self._known[key] = (values, options)
        return known

    def _require_taken(self, op: Op, values: list[Any], options: Any) -> None:
        """Raise what the backend has against the op, which it may say too late: to the op after it."""
        probe, backend = self._probe, self._backend
        if probe is None or backend is None:
            return
        reduction = getattr(options, "reduceOp", None)
        is_sure = reduction is None or reduction.op in _SURE_REDUCTIONS
        tensors = [tensor for _, tensor in walk(op, values)]
        for dtype in {tensor.dtype for tensor in tensors if not (is_sure and tensor.dtype in _SURE_DTYPES)}:
            refusal = probe.refusal(op, dtype, options)
            if refusal is not None:
                raise explained(refusal, op, tensors, options, backend.name)

    def _value(self, arg: Any, pair: Any) -> Any:
        """An argument as the backend takes it: references become tensors, tuples lists."""
        if not isinstance(arg, tuple):
            return arg
        if arg and arg[0] == "t":
            _, segment, offset, code, shape = arg
            mapping = self._segments.get(segment)
            if mapping is None:
                raise ProtocolError(f"a tensor lies in segment {segment}, which the trainer has not sent")
            return mapping.tensor(offset, dtype_from_code(code), shape)
        if arg and arg[0] == "d":
            if pair is None:
                raise ProtocolError("a tensor on a device in an op that is not")
            return self._devices.tensor(arg, pair)
        return [self._value(each, pair) for each in arg]

    def _wait(self, op_id: int, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:
            self._over(op_id, error)
        else:
            self._over(op_id, None)

    def _ended(self, op_id: int, future: Any) -> None:
        try:
            future.value()  # raises what the op failed with
        except BaseException as error:
            self._over(op_id, error)
        else:
            self._over(op_id, None)

    def _over(self, op_id: int, error: BaseException | None) -> None:
        """An op that was started has ended; from any thread."""
        running = self._running.pop(op_id)
        if self._awaited == op_id:  # it was set before the main thread looked whether the op runs
            with self._changed:
                self._changed.notify_all()
        try:
            if error is None:
                self._say(says.Done(op_id, source_of(running.op, running.work)))
            else:
                self._failed(op_id, running, error)
        except PipeBroken:
            pass  # the main thread sees it as well, and ends the process

    def _failed(self, op_id: int, running: _Running, error: BaseException) -> None:
        backend = self._backend
        if backend is not None and isinstance(error, Exception):
            tensors = [tensor for _, tensor in walk(running.op, running.values)]
            error = explained(error, running.op, tensors, running.options, backend.name)
        if isinstance(error, UnsupportedOp):
            self._say(says.Unsupported(op_id, str(error)))
            return
        # one that had begun has left the ranks apart, and Gloo closes its connections
        self._say(says.OpFailed(op_id, *_told(error), running.work is not None))

    # --- on a device, when it is done for the trainer -----------------------------------------------------

    def _is_late(self, deadline: Deadline, what: str) -> None:
        self._give_up(deadline.exceeded(what, "the device is not done with it"), what)

    def _has_ended(self, what: str, queued: Any) -> None:
        error = queued.failure()
        if error is not None:
            self._give_up(error, what)

    def _tell_dropped(self) -> None:
        with contextlib.suppress(PipeBroken):  # the main thread sees it as well
            for number in self._devices.closed():
                self._say(says.Dropped(number))

    def _give_up(self, error: Exception, what: str) -> None:
        """Have the device leave what is queued, for the trainer's streams wait for it, and tell."""
        self._abort()
        self._devices.settle()
        kind, text, trace = _told(error)
        with contextlib.suppress(PipeBroken):  # the main thread sees it as well
            self._say(says.Broken(kind, text if what in text else f"{what}: {text}", trace))

    def _leave(self, finish_s: float) -> None:
        """Before the end of this process: events that have not fired by then may never do so."""
        if not self._devices.settle(finish_s):
            self._abort()
            self._devices.settle()

    def _abort(self) -> None:
        backend = self._backend
        if backend is not None and backend.abort is not None and self._group is not None:
            try:
                backend.abort(self._group)
            except Exception:
                _logger.debug("the backend does not abort", exc_info=True)


def _group_of_one(backend: Backend) -> tuple[Any, Any]:
    """For the probe: a group, and its backend."""
    group = backend.make(c10d.HashStore(), 0, 1, _PROBE_S, ())
    return group, group._get_backend(torch.device(backend.devices[0]))


def _told(error: BaseException) -> tuple[str, str, str]:
    """An exception as text: its type, what it says, its traceback."""
    try:
        text = str(error)
        trace = "".join(traceback.format_exception(error))
    except Exception as worse:  # an exception of a user's hook may not even be printable
        text, trace = f"(its text could not be made: {type(worse).__name__})", ""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name, text[:_TEXT_CHARS], trace[-_TEXT_CHARS:]
