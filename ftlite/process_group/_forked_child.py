# SPDX-License-Identifier: BSD-3-Clause
"""A child as the trainer holds it, and how a process ended, in words.

Rules of this file: a process is killed by its pidfd or by the template, whose child it is, never by its number. In
a fork of the trainer ``kill`` and ``close`` do nothing, so that the end of a data-loader worker ends nobody's
child; that is looked at before the lock, which the fork may have copied in a state that nobody will end.

Every method may be called from any thread, and from a destructor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Death", "ForkedChild"]


@dataclass(frozen=True)
class Death:
    """How a process ended: with ``exit_code``, or by the signal ``signal_name``.

    Both are None when the one who would have known, the template, is gone as well. ``stderr_tail`` is the end of
    what it wrote to stderr (8 KB at most, which the user's stderr got too).
    """

    pid: int
    exit_code: int | None = None
    signal_name: str | None = None
    stderr_tail: str = ""

    @classmethod
    def of(cls, pid: int, code: int, stderr_tail: str = "") -> Death:
        """From an exit code as ``subprocess`` gives it, where signals are below 0."""
        if code >= 0:
            return cls(pid, code, None, stderr_tail)
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal
            name = f"signal {-code}"
        return cls(pid, None, name, stderr_tail)

    def text(self) -> str:
        """In words, without the stderr: "process 4711 was killed by SIGSEGV"."""
        if self.signal_name is not None:
            return f"process {self.pid} was killed by {self.signal_name}"
        if self.exit_code is not None:
            return f"process {self.pid} exited with code {self.exit_code}"
        return f"process {self.pid} ended with the template process that it was forked from"


class ForkedChild:
    """One child; made by ``Template.fork``. Whoever has it calls ``close`` in the end."""

    def __init__(self, pid: int, pidfd: int | None, kill_through: Callable[[int], None]) -> None:
        """``pidfd`` is owned from now on; where the kernel has none, ``kill_through`` is given the pid instead."""
        self.pid = pid
        self._pidfd = pidfd
        self._kill_through = kill_through
        self._owner = os.getpid()
        self._lock = threading.Lock()  # or the descriptor could be another's between the look and its use
        self._ended = threading.Event()
        self._death: Death | None = None

    def fileno(self) -> int:
        """Its pidfd, which is readable once it has ended; -1 where the kernel has none, and once it is closed."""
        return -1 if self._pidfd is None else self._pidfd

    def kill(self) -> None:
        """Kill it (SIGKILL), if it lives. Never raises; does not wait."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._pidfd is not None:
                with contextlib.suppress(OSError):  # it has ended
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                return
        if not self._ended.is_set():
            self._kill_through(self.pid)

    def wait(self, timeout_s: float) -> Death | None:
        """How it ended; None if it has not, or nobody has said so, within ``timeout_s`` seconds."""
        return self._death if self._ended.wait(timeout_s) else None

    def close(self) -> None:
        """Give the pidfd back. The child is not touched, and can still be killed and waited for. Again is a no-op."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def ended(self, death: Death) -> None:
        """Note how it ended; for the thread that reads the template's messages."""
        self._death = death
        self._ended.set()
