# SPDX-License-Identifier: BSD-3-Clause
"""The template process: torch imported and nothing of it used, it forks one child per request of the trainer.

Rules of this file: one thread, for a fork copies only the one that calls it; no torch op and no device before the
fork; nothing here waits for the trainer, for a child, or for who reads the user's stderr.

    trainer --- control socket ---> template --- fork ---> child --- its own socket ---> trainer

The template's contract
    descriptors   the control socket; 0 is /dev/null, 1 the user's stdout, 2 (once it is ready) the user's stderr
    messages      JSON objects in frames of ``Pipe``, ``kind`` first:
      to it       fork {request, env, cwd, threads, log_level, device} and the child's end of a socket
                  kill {pid}; end {}
      from it     ready {}, once, when all is imported
                  forked {request, pid, pidfd}, and, if ``pidfd`` is true, that descriptor
                  failed {request, text}
                  died {pid, code, stderr}: reaped; a code below 0 is a signal; the last 8 KB of the child's stderr
    its end       on ``end``, at the end of the control socket, when the trainer is gone: it kills its children, reaps
                  them and exits with 0. 1 is an import that failed, 71 a trainer that was gone before all began.

The child's contract
    function      ``main(end)`` of the entry module: a connected stream socket whose other end the trainer holds
    state         the trainer's present environment, folder, number of threads, log level and, if one was asked for,
                  device, all set before ``main`` is called; the modules that the template has imported
    descriptors   the socket; 0 is /dev/null, 1 the user's stdout, 2 a pipe that the template copies to the user's
                  stderr and whose last 8 KB it keeps; faulthandler writes there
    messages      none of the template's: the first and the last one are ``main``'s to send
    exit code     what ``main`` returns (None is 0) or gives to SystemExit; 70 after any other exception, whose
                  traceback is on stderr; 71 when the template was gone before the child began. stdout and stderr
                  are flushed; no exit hook and no destructor runs, for they would be the template's.
    its end       it is to return at the end of its socket. The kernel kills it when the template ends.
    signals       in both, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are ignored: terminals and schedulers
                  send them to all processes of a job, and what they mean is the trainer's to decide
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed

from .._errors import ChildError
from ._boot import PACKAGE, die_with_parent, live_on
from ._pipe import Pipe, PipeBroken

__all__ = ["EXIT_RAISED", "TAIL_BYTES", "main"]

EXIT_RAISED = 70  # EX_SOFTWARE of sysexits.h
# As much of a child's stderr as an error's text is to hold: a C++ exception with its stack and a Python traceback.
TAIL_BYTES = 8192
# What may wait for a user's stderr that nobody reads; then the children that write wait, as they would on it.
UNWRITTEN_BYTES = 64 * 1024
# A pipe that takes anything takes this much without waiting (PIPE_BUF).
_WRITE_BYTES = 4096
# The trainer reads as soon as it runs; one that is stopped in a debugger leaves room for hundreds of messages.
_CONTROL_LIMIT_S = 10.0
# Where the kernel has no pidfd, how often to look whether the trainer is still the parent; an orphan may live 2 s.
_LOOK_S = 0.2
# A killed process is gone in milliseconds, later only when it waits for a device that does not answer.
_REAP_S = 1.0

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(trainer: int, control: int, stderr: int, entry: Callable[[socket.socket], int | None]) -> NoReturn:
    """Serve the process ``trainer`` until it ends; the other arguments are those of ``_boot``."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # inherited from whichever thread has started this
    end = socket.socket(fileno=control)
    # a trainer that is killed halfway through a message, while a fork of it holds the socket open
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_CONTROL_LIMIT_S), 0))
    template = _Template(trainer, Pipe(end, _CONTROL_LIMIT_S), entry)
    # what a fork shares stays shared: a collection would write to every page that holds an object
    gc.collect()
    gc.disable()
    with contextlib.suppress(PipeBroken):
        template.tell("ready")
    os.dup2(stderr, 2)
    os.close(stderr)
    faulthandler.enable(2)
    live_on()
    try:
        template.serve()
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_RAISED)  # the kernel kills the children
    os._exit(0)


@dataclass
class _Child:
    """A child that has not been reaped."""

    pid: int
    stderr: int | None  # its other end is the child's; None once that is closed
    tail: bytearray = field(default_factory=bytearray)


class _Template:
    """The loop. Everything that it waits for is a descriptor, so one poll sees it all."""

    def __init__(self, trainer: int, control: Pipe, entry: Callable[[socket.socket], int | None]) -> None:
        self._trainer = trainer
        self._trainer_fd = _pidfd(trainer)
        self._control = control
        self._entry = entry
        self._children: dict[int, _Child] = {}
        self._unwritten = bytearray()
        self._ending = False
        # a child's death is a signal, and a signal is a byte in this pipe
        self._death_fd, self._signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._signal_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def tell(self, kind: str, *descriptors: int, **data: object) -> None:
        """Send one message to the trainer."""
        self._control.send(json.dumps({"kind": kind, **data}).encode(), descriptors)

    def serve(self) -> None:
        """Serve until the trainer is gone or says so; then no child is left."""
        try:
            # as long as it is the parent, its number is its own
            while not self._ending and os.getppid() == self._trainer:
                self._turn()
        except PipeBroken:
            pass  # the trainer is gone, or no longer reads
        finally:
            self._end()

    def _turn(self) -> None:
        # made afresh each time: a handful of descriptors, and nothing to be kept in step with the children
        poll = select.poll()
        for fd in (self._control.fileno(), self._death_fd, self._trainer_fd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        if self._unwritten:
            poll.register(2, select.POLLOUT)
        if len(self._unwritten) < UNWRITTEN_BYTES:
            for child in self._children.values():
                if child.stderr is not None:
                    poll.register(child.stderr, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if self._trainer_fd is not None else _LOOK_S * 1000)}
        if 2 in ready:
            self._write()
        for child in self._children.values():
            if child.stderr in ready:
                self._read(child)
        if self._death_fd in ready:
            self._reap()
        if self._control.fileno() in ready:
            self._obey(json.loads(self._control.receive()))

    def _obey(self, message: dict[str, Any]) -> None:
        if message["kind"] == "fork":
            self._fork(message, self._control.receive_fd())
        elif message["kind"] == "kill":
            if message["pid"] in self._children:  # not reaped, so the number is still its own
                os.kill(message["pid"], signal.SIGKILL)
        elif message["kind"] == "end":
            self._ending = True

    # --- forking ---------------------------------------------------------------------------------------

    def _fork(self, request: dict[str, Any], end: int) -> None:
        try:
            _check_alone()
            reader, writer = os.pipe2(os.O_CLOEXEC)
            try:
                gc.freeze()
                template = os.getpid()
                pid = os.fork()
                if pid == 0:
                    self._be_child(request, template, end, (reader, writer))
            except OSError:
                os.close(reader)
                raise
            finally:
                os.close(writer)
        except (OSError, ChildError) as error:
            self.tell("failed", request=request["request"], text=str(error))
            return
        finally:
            os.close(end)
        os.set_blocking(reader, False)
        self._children[pid] = _Child(pid, reader)
        handle = _pidfd(pid)
        if handle is None:
            self.tell("forked", request=request["request"], pid=pid, pidfd=False)
            return
        try:
            self.tell("forked", handle, request=request["request"], pid=pid, pidfd=True)
        finally:
            os.close(handle)

    def _be_child(self, request: dict[str, Any], template: int, end: int, stderr: tuple[int, int]) -> NoReturn:
        code = EXIT_RAISED
        try:
            die_with_parent(template)
            os.dup2(stderr[1], 2)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # by their numbers: closing the control pipe as such would end it for the template as well
            others = (child.stderr for child in self._children.values())
            mine = (self._control.fileno(), self._death_fd, self._signal_fd, self._trainer_fd)
            for fd in (*stderr, *mine, *others):
                if fd is not None:
                    os.close(fd)
            gc.enable()
            _apply(request)
            own = socket.socket(fileno=end)  # open until the process ends, so that the end of file is that
            code = self._entry(own) or 0
        except SystemExit as error:
            code = _exit_code(error)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or nobody reads it: the exit code still says how it was
                    stream.flush()
            os._exit(code & 0xFF)

    # --- what becomes of the children ------------------------------------------------------------------

    def _read(self, child: _Child) -> None:
        if child.stderr is None:
            return
        try:
            data = os.read(child.stderr, 65536)
        except BlockingIOError:
            return
        if not data:
            os.close(child.stderr)
            child.stderr = None
        child.tail += data
        del child.tail[:-TAIL_BYTES]
        self._unwritten += data

    def _write(self) -> None:
        try:
            done = os.write(2, self._unwritten[:_WRITE_BYTES])
        except OSError:
            done = len(self._unwritten)  # the user's stderr is gone, and what was meant for it as well
        del self._unwritten[:done]

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._death_fd, 4096)  # before the look, so that a death after it is not missed
        for pid, child in list(self._children.items()):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                del self._children[pid]
                self._read(child)  # as much as a pipe holds; a grandchild may go on writing for ever
                if child.stderr is not None:
                    os.close(child.stderr)
                text = child.tail.decode(errors="replace")
                self.tell("died", pid=pid, code=os.waitstatus_to_exitcode(status), stderr=text)

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + _REAP_S
        with contextlib.suppress(PipeBroken):
            while self._children and time.monotonic() < end_s:
                select.select([self._death_fd], [], [], max(0.0, end_s - time.monotonic()))
                self._reap()
        while self._unwritten and select.select([], [2], [], 0)[1]:
            self._write()


# --- pieces --------------------------------------------------------------------------------------------


def _pidfd(pid: int) -> int | None:
    """A descriptor of the process ``pid``, which is to be the parent or an unreaped child; None: no such thing here."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # a kernel before 5.3, a sandbox that forbids it, a Python built without it
        return None


def _check_alone() -> None:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            names.append((task / "comm").read_text().strip())
    if len(names) > 1:
        raise ChildError(
            f"the template process {os.getpid()} has {len(names)} threads ({', '.join(names)}), and a fork would copy "
            "one of them with the locks of all: keep what is imported with torch here from starting threads"
        )


def _apply(request: dict[str, Any]) -> None:
    """Make the trainer's present ours, which inherited the template's past."""
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    for name, value in request["env"].items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if request["cwd"] is not None:
        with contextlib.suppress(OSError):  # the folder may be gone by now; the trainer lives with that as well
            os.chdir(request["cwd"])
    # whoever logs in the child logs to its stderr, which goes to the user's
    logging.basicConfig(format="%(levelname)s %(name)s (pid %(process)d): %(message)s")
    logging.getLogger(PACKAGE).setLevel(request["log_level"])
    if torch.get_num_threads() != request["threads"]:  # torch 2.6 makes a pool of threads at once, in 3 to 8 ms
        # and waits for ever for those that there is no memory for: one that fails here is an error instead
        threading.Thread(target=int).start()
        torch.set_num_threads(request["threads"])
    # TORCH_DISTRIBUTED_DEBUG, which was read at import
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    if request["device"] is not None:
        kind, index = request["device"]
        getattr(torch, kind).set_device(index)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1
