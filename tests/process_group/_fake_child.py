# SPDX-License-Identifier: BSD-3-Clause
"""A session whose child is a thread of this process, with the backend and the device of ``_fake_device``."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import WAIT_S, GuardedTestCase, wait_until
from tests.process_group._fake_device import KIND, FakeDevice, Group

arena = load("process_group._arena")
backends = load("process_group._backends")
child_module = load("process_group._child")
device_child = load("process_group._device_child")
deadlines = load("_deadline")
exports = load("process_group._exports")
forked = load("process_group._forked_child")
messages = load("process_group._messages")
ops = load("process_group._ops")
pipes = load("process_group._pipe")
sessions = load("process_group._session")


class ThreadChild:
    """Has the methods of ``ForkedChild``, and stands for the template as well."""

    pid = 4242

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._child: Any = None
        self._pipe: Any = None

    def is_up(self) -> bool:
        return True

    def let_exit(self) -> None:
        """What a template does for an exit of the trainer."""

    def fork(self, deadline: Any, end: socket.socket, device: Any = None) -> ThreadChild:
        self._pipe = pipes.Pipe(end, WAIT_S)
        self._child = child_module._Child(self._pipe, device_child.Devices(lambda kind: self._device))
        self._thread = threading.Thread(target=self._run, name="child", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._child.run()
        finally:
            self._stop()
            self._pipe.close()

    def _stop(self) -> None:
        overseer = self._child._overseer
        if overseer is not None and threading.current_thread() is not overseer._thread:
            overseer.stop()
        waiters = self._child._waiters
        for _ in range(waiters._idle):  # which end with a process otherwise
            waiters._jobs.put(sys.exit)

    def fileno(self) -> int:
        return -1

    def hesitate(self, delay_s: float) -> None:
        """It notices the end of its pipe that much later, as one does that has no core at the moment."""
        receive = self._pipe.receive

        def late() -> Any:
            try:
                return receive()
            except pipes.PipeBroken:
                time.sleep(delay_s)
                raise

        self._pipe.receive = late

    def kill(self) -> None:
        """As SIGKILL: nothing is done any more."""
        self._child._leave = lambda finish_s: None
        self._child._abort = lambda: None
        self._pipe.cut()

    def wait(self, timeout_s: float) -> Any:
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else forked.Death(self.pid, 0)

    def close(self) -> None:
        pass


class FakeCase(GuardedTestCase):
    """``self.start()`` makes the device, the session and the backend's group; ``issue`` is the group's hook."""

    timeout_s = WAIT_S

    def start(self, seed: int = 0) -> None:
        self.device = FakeDevice(seed)
        self.groups: list[Group] = []
        self.exports = exports.AllExports(lambda kind: self.device)
        self.arena = arena.Arena()
        self.addCleanup(self.arena.close)
        record = backends.Backend(
            "fake", (KIND,), self._make, True, frozenset({"scatter"}), lambda group: group.abort()
        )
        for patch in (
            mock.patch.dict(backends.BACKENDS, {"fake": record}),
            mock.patch.object(child_module, "create_store_client", lambda *args: None),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.child = ThreadChild(self.device)
        self.session = self.new_session(self.child)

    def new_session(self, child: ThreadChild) -> Any:
        configure = messages.Configure(1, "fake", "host:1/x", 0, 1, self.timeout_s, ())
        session = sessions.Session(child, self.arena, self.exports, configure)
        self.addCleanup(session.close)
        session.start(None, deadlines.Deadline(WAIT_S))
        return session

    def _make(self, *args: Any) -> Group:
        self.groups.append(Group(self.device))
        return self.groups[-1]

    @property
    def group(self) -> Group:
        return self.groups[-1]

    def issue(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        op = ops.OPS[name]
        values, options = ops.normalise(op, args, {})
        return self.session.issue(op, values, options, timeout_s or self.timeout_s)

    def tensor(self, *values: float) -> torch.Tensor:
        return self.device.tensor(torch.tensor(values))

    def values(self, tensor: torch.Tensor) -> Any:
        return self.device.host(tensor).tolist()

    def add(self, tensor: torch.Tensor, number: float) -> None:
        """Queue a kernel on the current stream."""
        host = self.device.host(tensor)
        self.device.launch(lambda: host.add_(number))

    def keep_stepping(self) -> None:
        """Have the device work by itself from now on."""
        over = threading.Event()

        def run() -> None:
            while not over.is_set():
                if not self.device.step():
                    over.wait(0.001)

        thread = threading.Thread(target=run, name="device", daemon=True)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(over.set)

    def broken(self) -> Exception:
        error = wait_until(lambda: self.session.error, "the group is broken")
        assert isinstance(error, Exception)
        return error
