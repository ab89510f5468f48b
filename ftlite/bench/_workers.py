# SPDX-License-Identifier: BSD-3-Clause
"""The parent's side of the child processes that the benches and the demo are made of.

Rules of this file: no torch; every wait has a deadline; a child's death ends every wait at once, with its exit
code; no child outlives the parent, whatever way the parent ends (it sees the end of its stdin). Messages are one
JSON object a line: to the child on its stdin, from it on its stdout. What a child writes to stderr is the user's.

Plain subprocesses and not multiprocessing: the same code starts another interpreter with another torch, and
nothing of the caller's ``__main__`` is imported.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .._deadline import Deadline
from .._errors import ChildDied, DeadlineExceeded, RemoteFailure

__all__ = ["Crew", "Worker", "module_command"]

Message = dict[str, Any]

# An end of the pipe seen but no exit status yet: the kernel closes a process's files before it can be reaped, by
# milliseconds; longer than this only when the child closed its stdout itself and lives on.
_REAP_S = 5.0
# A child that was told to end has a server to stop and memory to unmap; killed after this.
_END_S = 10.0

# The child's first lines. The package is loaded from its folder and nothing else in that folder becomes importable:
# a folder of site-packages on the path of another interpreter would bring the wrong torch with it.
_BOOT = """
import importlib.machinery, importlib.util, json, runpy, sys
folder, module, path = json.loads(sys.argv.pop(1))
sys.path[:] = path or [entry for entry in sys.path if entry]
top = module.partition(".")[0]
spec = importlib.machinery.PathFinder.find_spec(top, [folder])
package = sys.modules[top] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

# torch 2.6 says this once at import where numpy is not installed; it is no news here.
_QUIET = "ignore:Failed to initialize NumPy"


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """The command that runs ``module`` of this very copy of the package as a program.

    Args:
        module: its full name, beginning as ``__package__`` does.
        arguments: its command line.
        python: another interpreter; None is this one, with the same import path.
    """
    root = __package__ or ""
    # this file's folder is the package ``__package__``; one folder more per dot, and one for the top
    folder = Path(__file__).resolve().parents[root.count(".") + 1]
    boot = json.dumps([str(folder), module, None if python else sys.path])
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    return [python or sys.executable, *optimize, "-W", _QUIET, "-c", _BOOT, boot, *arguments]


class Worker:
    """One child process; made by ``Crew.start``."""

    def __init__(self, name: str, command: list[str], inbox: queue.SimpleQueue[tuple[Worker, Message | None]]):
        self.name = name
        self.waiting: deque[Message] = deque()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # a Ctrl-C of the terminal is the parent's to handle, or each child prints its own traceback
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(inbox,), name=f"reads {name}", daemon=True)
        self._reader.start()

    def send(self, command: str, **data: object) -> None:
        """Give the child a command. One that died is told by the next wait, with its exit code."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps({"command": command, **data}) + "\n")
                self._process.stdin.flush()

    def fate(self) -> str:
        """How it ended, in words."""
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "closed its stdout and runs on"
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def end(self, limit_s: float) -> None:
        """Close its stdin, which tells it to end, and kill it after ``limit_s`` seconds."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_REAP_S)
        # with the child its end of the pipe is gone and the reader ends, unless a grandchild holds the pipe
        self._reader.join(_REAP_S)
        if self._process.stdout and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self, inbox: queue.SimpleQueue[tuple[Worker, Message | None]]) -> None:
        stdout = self._process.stdout
        with contextlib.suppress(ValueError, OSError):
            for line in stdout or ():
                with contextlib.suppress(json.JSONDecodeError):  # an import that prints is not ours to forbid
                    message = json.loads(line)
                    if isinstance(message, dict):
                        inbox.put((self, message))
        inbox.put((self, None))


class Crew:
    """Some children that are waited for together. A context manager: at its end every child is gone."""

    def __init__(self, on_progress: Callable[[Worker, Message], None] | None = None) -> None:
        """``on_progress`` gets every message whose event is "progress", in the thread that waits."""
        self._on_progress = on_progress
        self._inbox: queue.SimpleQueue[tuple[Worker, Message | None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []

    def start(self, name: str, module: str, options: Message) -> Worker:
        """Start ``module`` as a child that is called ``name`` in messages; its ``serve`` gets ``options``."""
        worker = self.add(name, module_command(module))
        worker.send("options", **options)
        return worker

    def add(self, name: str, command: list[str]) -> Worker:
        """Start ``command`` as a child that is called ``name``, and give it no options yet."""
        worker = Worker(name, command, self._inbox)
        self._workers.append(worker)
        return worker

    def expect(self, worker: Worker, event: str, deadline: Deadline) -> Message:
        """Wait for ``event`` of ``worker``.

        Raises:
            ChildDied: any child of the crew is gone.
            RemoteFailure: any child reported an exception; its traceback is in the text.
            DeadlineExceeded: it took too long.
        """
        while True:
            for message in worker.waiting:
                if message.get("event") == event:
                    worker.waiting.remove(message)
                    return message
            try:
                sender, received = self._inbox.get(timeout=max(deadline.remaining_s(), 0.001))
            except queue.Empty:
                raise deadline.exceeded(f"waiting for {event!r} of the {worker.name} (pid {worker.pid})") from None
            if received is None:
                raise ChildDied(f"the {sender.name} (pid {sender.pid}) {sender.fate()}, while {event!r} was waited for")
            if received.get("event") == "failed":
                raise RemoteFailure(
                    f"the {sender.name} (pid {sender.pid}) failed:\n{str(received.get('traceback')).rstrip()}"
                )
            if received.get("event") != "progress":
                sender.waiting.append(received)
            elif self._on_progress:
                self._on_progress(sender, received)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # after a failure nobody cares how they end: a child in a long computation would only hold up the message
        limit_s = _END_S if kind is None else 0.0
        if isinstance(error, (ChildDied, RemoteFailure, DeadlineExceeded)):
            limit_s = 0.5  # long enough to let a traceback on stderr come out whole
        deadline = Deadline(limit_s)
        for worker in self._workers:
            worker.end(deadline.remaining_s())
