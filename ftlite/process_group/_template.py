# SPDX-License-Identifier: BSD-3-Clause
"""The template of this process: the one door to children that start in milliseconds.

Starting an interpreter and importing torch costs seconds; a fork of a process that has done so costs
milliseconds. So there is one template process for all groups of a trainer, started in the background when the first
of them is made, ended with the last, and replaced when it has died.

    acquire() -> Template -> TemplateProcess -> the process: _boot, _template_main -> fork -> the child: ENTRY
                   fork() -> ForkedChild

Rules of this file: nothing of it is of use in a fork of the trainer. There ``fork`` raises StateError and
``release`` does nothing; that is looked at before the lock, which the fork may have copied in a state that nobody
will end. A fork that acquires gets a template of its own.

Everything here may be called from any thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from typing import Any

import torch

from .._deadline import Deadline
from .._errors import ChildStartFailed, StateError, UnsupportedOp
from ._forked_child import Death, ForkedChild
from ._template_process import TemplateProcess

__all__ = ["Death", "ForkedChild", "Template", "acquire"]

# What the children run: this module's ``main``.
ENTRY = "process_group._child"
# From the end of the children to that of the daemon threads, but for the exit hooks of others. A second is for those.
_EXIT_S = 1.0


class Template:
    """The template of this process, whichever process serves as such at the moment; made by ``acquire``."""

    def __init__(self, entry: str) -> None:
        """``entry``: see ``load_entry`` in ``_boot``."""
        self._entry = entry
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards the two below
        self._holders = 0
        self._process: TemplateProcess | None = None
        self._leaving = False

    def pid(self) -> int | None:
        """The pid of the process that serves as the template now, if one is started."""
        process = self._process
        return process.pid() if process else None

    def is_up(self) -> bool:
        """Whether that process is there, and ready, as far as is known."""
        process = self._process
        return process is not None and process.is_up()

    def hold(self) -> Template:
        """Count one holder more, and see that the process is there or on its way; for ``acquire``."""
        with self._lock:
            self._living()
            if not self._holders:
                atexit.register(self._at_exit)
            self._holders += 1
        return self

    def fork(self, deadline: Deadline, end: socket.socket, device: tuple[str, int] | None = None) -> ForkedChild:
        """Fork a child that has the present environment, folder, threads and log level of this process.

        Args:
            deadline: of the whole call; a template that is just starting needs a second or two.
            end: the child's end of a socketpair. It is closed here, whatever comes of the call.
            device: its current device, as ("cuda", 1); None leaves all devices alone, which saves memory on them.

        Raises:
            ChildStartFailed: the template could not be started, could not fork, or died. The next call tries anew.
            DeadlineExceeded: it took too long; a child that comes up later is killed.
            StateError: in a fork of the process that acquired it, or after the last release.
        """
        try:
            if os.getpid() != self._owner:
                raise StateError(
                    f"process {os.getpid()} is a fork of {self._owner}, whose child it cannot use: make a group here",
                    state="forked",
                    attempted="fork",
                )
            present = _present(device)
            with self._lock:
                if not self._holders:
                    raise StateError("fork() after the last release()", state="released", attempted="fork")
                process = self._living()
            return process.fork(deadline, end, present)
        finally:
            end.close()

    def release(self) -> None:
        """Give one ``acquire`` back. The last ends the process and what children it has, and waits for that."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._holders = max(0, self._holders - 1)
            if self._holders:
                return
            process, self._process = self._process, None
            atexit.unregister(self._at_exit)
        if process is not None:
            process.end()

    def let_exit(self) -> None:
        """To be called before anybody is told that a child has ended: it may be the trainer's own exit that ends it.

        Then daemon threads would raise, and print, in its last moments. The interpreter stops them, so they are told
        later.
        """
        if self._leaving and threading.current_thread() is not threading.main_thread():
            time.sleep(_EXIT_S)

    def _living(self) -> TemplateProcess:
        if self._process is None or self._process.gone():
            try:
                self._process = TemplateProcess(self._entry)
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                raise ChildStartFailed(f"the template process could not be started: {error}") from error
        return self._process

    def _at_exit(self) -> None:
        """The trainer ends without having released it: leave nothing behind for whoever started the trainer."""
        if os.getpid() == self._owner and self._process is not None:
            self._leaving = True
            self._process.end()


# By pid: a fork of this process begins with none of its own.
_templates: dict[int, Template] = {}


def acquire() -> Template:
    """The template of this process, started in the background if it is not there. One ``release`` for each call.

    Raises:
        ChildStartFailed: there is no descriptor or no thread to start it with. Other failures are told by ``fork``.
        UnsupportedOp: this is not Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedOp("a backend in a child process needs Linux: use a group in this process", op="fork")
    # setdefault is atomic, and a Template that is dropped has done nothing
    return _templates.setdefault(os.getpid(), Template(ENTRY)).hold()


def _present(device: tuple[str, int] | None) -> dict[str, Any]:
    """What of this process a child is to have; the fields are told in ``_template_main``."""
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = None
    # the logger of the package, and so of every module in it
    level = logging.getLogger((__package__ or "").rpartition(".")[0]).getEffectiveLevel()
    return {
        "env": dict(os.environ),
        "cwd": folder,
        "threads": torch.get_num_threads(),
        "log_level": level,
        "device": device,
    }
