# SPDX-License-Identifier: BSD-3-Clause
"""The child's side of ``_workers``: commands come in, events go out, and the parent's end is the child's end.

Rules of this file: no torch; only events go to the parent's pipe (what is printed goes to stderr); the thread that
reads stdin ends the process as soon as the parent is gone, whatever the main thread is doing.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from .._deadline import Deadline

__all__ = ["Link", "serve"]

Message = dict[str, Any]

_STDIN, _STDOUT, _STDERR = 0, 1, 2
# The options are in the pipe before this process has imported anything.
_OPTIONS_S = 60.0
# How long a child whose work is done stays, for its parent to finish with the others: longer than any sane bench.
_STAY_S = 24 * 3600.0
# Twenty pictures a second look smooth, and cost nothing beside the work that they tell about.
_PROGRESS_S = 0.05


class Link:
    """The way to the parent. ``send`` and ``progress`` may be called from any thread."""

    def __init__(self) -> None:
        """Take over stdin and stdout; made once, at the start of the process."""
        self._out = os.fdopen(os.dup(_STDOUT), "w", encoding="utf-8")
        os.dup2(_STDERR, _STDOUT)
        self._lock = threading.Lock()
        self._progress_at = 0.0
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._finished = False
        self._reader = threading.Thread(target=self._read, name="reads the parent's commands", daemon=True)
        self._reader.start()

    def send(self, event: str, **data: object) -> None:
        """Tell the parent."""
        text = json.dumps({"event": event, **data}) + "\n"
        with self._lock:
            self._out.write(text)
            self._out.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """Tell how far ``what`` is; most calls are dropped, the last (``done == total``) never."""
        now_s = time.monotonic()
        if done < total and now_s - self._progress_at < _PROGRESS_S:
            return
        self._progress_at = now_s
        self.send("progress", what=what, done=done, total=total)

    def expect(self, command: str, limit_s: float) -> Message:
        """The parent's next command, which has to be ``command``.

        Raises:
            DeadlineExceeded: none came within ``limit_s`` seconds.
            ValueError: it was another one.
        """
        deadline = Deadline(limit_s)
        try:
            message = self._commands.get(timeout=max(limit_s, 0.001))
        except queue.Empty:
            raise deadline.exceeded(f"waiting for the parent's command {command!r}") from None
        if message.get("command") != command:
            raise ValueError(f"the parent's command is {message.get('command')!r}, not {command!r}")
        return message

    def stay(self) -> None:
        """Wait for the parent to end this process: while it needs the others, any child's death is a failure to it."""
        self._finished = True
        self._reader.join(_STAY_S)

    def _read(self) -> None:
        # os.read and not sys.stdin: a thread inside of a buffered reader aborts the interpreter at its end
        rest = b""
        while True:
            try:
                got = os.read(_STDIN, 1 << 16)
            except OSError:
                got = b""
            if not got:
                os._exit(0 if self._finished else 1)
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                self._commands.put(json.loads(line))


def serve(main: Callable[[Link, Message], None], link: Link | None = None) -> int:
    """Run ``main(link, options)`` as this process; returns the exit code."""
    link = link or Link()
    try:
        main(link, link.expect("options", _OPTIONS_S))
    except Exception:
        try:
            link.send("failed", traceback=traceback.format_exc())
        except OSError:  # the parent is gone: nobody is left to be told but the user
            sys.stderr.write(traceback.format_exc())
        return 1
    link.stay()
    return 0
