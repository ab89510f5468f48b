# SPDX-License-Identifier: BSD-3-Clause
"""One template process, from its start to its end, as the trainer sees it.

Rules of this file:
- One daemon thread ("forks children") per process starts it, reads what it says and reaps it. It must be the one
  that starts it: until the template is ready, the kernel ties its life to that thread (see ``_boot``).
- What every waiter learns comes from that thread, and one function of it, ``_gone``, fails everything that waits.
- What the two sides say to each other stands in ``_template_main``.

``fork``, ``kill`` and ``end`` may be called from any thread but that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from typing import Any

from .._deadline import Deadline
from .._errors import ChildStartFailed, ProtocolError
from ._forked_child import Death, ForkedChild
from ._pipe import Pipe, PipeBroken

__all__ = ["TemplateProcess"]

# The template reads requests within milliseconds, between forks. One that does not is stopped or lost.
_WRITE_LIMIT_S = 5.0
# A fork takes milliseconds, and some tens more on a busy machine. A template that has not answered for so long when a
# caller's time is over is stopped or hangs. It is put down, and its children with it: no later call would fare better.
_ANSWER_S = 2.0
# How long it may take to kill its children and end; it waits for them for a second.
_END_S = 2.0
# Its descriptors are closed some milliseconds before it can be reaped: the kernel unmaps hundreds of MB between.
_REAP_S = 1.0
# Of its stderr, as much as of a child's (TAIL_BYTES in _template_main, which imports more than is wanted here).
_TAIL_BYTES = 8192
# Set for the template: OpenBLAS, which numpy brings, starts its threads at import, and no thread survives a fork.
# The children have the trainer's values in their environment, and torch is told its number of threads.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class _Request:
    """A fork that somebody waits for."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.child: ForkedChild | None = None
        self.failure = ""


class _State(Enum):
    STARTING = "starting"
    UP = "up"
    GONE = "gone"


class TemplateProcess:
    """A template process that runs ``entry``; made, it is on its way, and what fails is told by ``fork``."""

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._changed = threading.Condition()  # guards all below
        self._state = _State.STARTING
        self._why_gone = "the template process was ended by the last release()"
        self._ending = False
        self._reaping = False  # from here on its number may be another's, and only the thread may kill it
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: dict[int, _Request] = {}
        self._children: dict[int, ForkedChild] = {}
        self._number = 0
        self._tail = bytearray()
        self._pipe, self._far_end = Pipe.pair(_WRITE_LIMIT_S)
        self._thread = threading.Thread(target=self._serve, name="forks children", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is left
            self._pipe.close()
            self._far_end.close()
            raise

    # --- for callers -----------------------------------------------------------------------------------

    def gone(self) -> bool:
        """Whether its end is known."""
        with self._changed:
            return self._state is _State.GONE

    def is_up(self) -> bool:
        """Whether it is ready, and no end of it is known."""
        with self._changed:
            return self._state is _State.UP

    def pid(self) -> int | None:
        """The pid of the template process, once it is started."""
        with self._changed:
            return self._process.pid if self._process else None

    def fork(self, deadline: Deadline, end: socket.socket, present: dict[str, Any]) -> ForkedChild:
        """See ``Template.fork``; ``present`` are the fields of the request."""
        with self._changed:
            while self._state is _State.STARTING:
                if not self._changed.wait(deadline.remaining_s()):
                    hint = "it imports torch, which a cold disk makes slow: give a longer timeout"
                    raise deadline.exceeded("waiting for the template process to start", hint)
            if self._state is _State.GONE:
                raise ChildStartFailed(self._why_gone)
            self._number += 1
            number, request = self._number, _Request()
            self._requests[number] = request
        asked = Deadline(_ANSWER_S)
        try:
            self._pipe.send(json.dumps({"kind": "fork", "request": number, **present}).encode(), [end.fileno()])
        except PipeBroken:
            self._put_down()  # if it still lives, it does not listen; the thread finds its end and tells us why
        if not request.answered.wait(deadline.remaining_s()):
            with self._changed:
                is_late = self._requests.pop(number, None) is not None
            if is_late:
                hint = "call again"
                if asked.expired():
                    self._put_down()
                    hint = "it did not answer and was killed; the next call starts another"
                raise deadline.exceeded("waiting for the template process to fork a child", hint)
        if request.child is None:
            raise ChildStartFailed(request.failure)
        return request.child

    def kill(self, pid: int) -> None:
        """Have the template kill its child ``pid``; if it is gone, the child is as well."""
        with contextlib.suppress(PipeBroken):
            self._pipe.send(json.dumps({"kind": "kill", "pid": pid}).encode())

    def end(self) -> None:
        """End the template and its children, and wait for that."""
        with self._changed:
            self._ending = True
            up = self._state is _State.UP
        if up:
            with contextlib.suppress(PipeBroken):
                self._pipe.send(json.dumps({"kind": "end"}).encode())
            self._thread.join(_END_S)
        if self._thread.is_alive():
            self._put_down()
            self._thread.join(_END_S)

    def _put_down(self) -> None:
        with self._changed:
            if self._process is not None and not self._reaping:
                self._process.kill()

    # --- the thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        errors = -1
        try:
            with self._changed:
                if self._ending:
                    return
                try:
                    errors, self._process = self._start()
                except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
                    self._why_gone = f"the template process could not be started with {sys.executable!r}: {error}"
                    return
                finally:
                    self._far_end.close()
            try:
                self._read_until_end(errors)
            finally:
                self._why_gone = self._fate(self._process)
        finally:
            if errors >= 0:
                os.close(errors)
            self._gone()

    def _start(self) -> tuple[int, subprocess.Popen[bytes]]:
        """Start the process; a descriptor to read what it writes to stderr, and the process."""
        try:
            users_stderr = os.dup(2)
        except OSError:  # the trainer has none
            users_stderr = os.open(os.devnull, os.O_WRONLY)
        errors, far_errors = os.pipe()
        control = self._far_end.fileno()
        options = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "trainer": os.getpid(),
            "control": control,
            "stderr": users_stderr,
            "entry": self._entry,
        }
        boot = Path(__file__).with_name("_boot.py")
        try:
            # as multiprocessing does it: -O, -I, -E, -s, -W, -X, ...
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            process = subprocess.Popen(
                [sys.executable, *flags, str(boot), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stderr=far_errors,
                env={**os.environ, **_ONE_THREAD},
                pass_fds=(control, users_stderr),
            )
        except BaseException:
            os.close(errors)
            raise
        finally:
            os.close(users_stderr)
            os.close(far_errors)
        return errors, process

    def _read_until_end(self, errors: int) -> None:
        """Obey what the template says until its end; show what it writes before it has the user's stderr."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        poll.register(errors, select.POLLIN)
        with contextlib.suppress(PipeBroken, ProtocolError):
            while True:
                ready = [fd for fd, _ in poll.poll()]
                if errors in ready and not self._show(errors):
                    poll.unregister(errors)
                if self._pipe.fileno() in ready:
                    self._take(json.loads(self._pipe.receive()))
        # the rest; a grandchild may hold the pipe open
        os.set_blocking(errors, False)
        with contextlib.suppress(BlockingIOError):
            while self._show(errors):
                pass

    def _show(self, errors: int) -> bool:
        data = os.read(errors, 65536)
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        with contextlib.suppress(OSError):
            os.write(2, data)
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            with self._changed:
                self._state = _State.UP
                self._changed.notify_all()
        elif kind == "forked":
            pidfd = self._pipe.receive_fd() if message["pidfd"] else None
            child = ForkedChild(message["pid"], pidfd, self.kill)
            with self._changed:
                self._children[child.pid] = child
                request = self._requests.pop(message["request"], None)
            if request is None:  # whoever wanted it gave up
                child.kill()
                child.close()
            else:
                request.child = child
                request.answered.set()
        elif kind == "failed":
            with self._changed:
                request = self._requests.pop(message["request"], None)
            if request is not None:
                request.failure = f"the template process could not fork a child: {message['text']}"
                request.answered.set()
        elif kind == "died":
            with self._changed:
                dead = self._children.pop(message["pid"])
            dead.ended(Death.of(message["pid"], message["code"], message["stderr"]))

    def _fate(self, process: subprocess.Popen[bytes]) -> str:
        """Reap the template; how it ended, in words."""
        with self._changed:
            self._reaping = True
            asked, starting = self._ending, self._state is _State.STARTING
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if asked:
            return self._why_gone
        death = Death.of(process.pid, process.returncode)
        tail = self._tail.decode(errors="replace").strip()
        return (
            f"the template {death.text()}"
            + (" while it started" if starting else "")
            + (f"; the end of its stderr:\n{tail}" if tail else "")
        )

    def _gone(self) -> None:
        """The one place that fails everything that waits for this process."""
        self._pipe.close()
        with self._changed:
            self._state = _State.GONE
            requests, self._requests = self._requests, {}
            children, self._children = self._children, {}
            self._changed.notify_all()
        for request in requests.values():
            request.failure = self._why_gone
            request.answered.set()
        for child in children.values():
            child.kill()  # where the kernel has not done so
            child.ended(Death(child.pid))
