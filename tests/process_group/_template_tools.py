# SPDX-License-Identifier: BSD-3-Clause
"""For the tests of the template: a template whose children do what they are told, and talk with one of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import load
from tests._support import LONG_S

template = load("process_group._template")
deadline = load("_deadline")

ENTRY = str(Path(__file__).with_name("_template_entry.py"))
# A template imports torch; on a cold, busy disk that takes its time.
START_S = LONG_S / 4


def soon(limit_s: float = START_S) -> Any:
    """A deadline."""
    return deadline.Deadline(limit_s)


class Talk:
    """A new child of ``source`` and the way to it. A context manager that ends it."""

    def __init__(self, source: Any, limit_s: float = START_S) -> None:
        here, there = socket.socketpair()
        try:
            self.child = source.fork(soon(limit_s), there)
        except BaseException:
            here.close()
            raise
        self.end = here
        self.end.settimeout(limit_s)
        self._stream = here.makefile("rw")
        self.first = int(self._stream.readline())

    def order(self, code: str) -> None:
        """Have the child run ``code``; its answer is not waited for."""
        self._stream.write(json.dumps(code) + "\n")
        self._stream.flush()

    def ask(self, code: str) -> Any:
        """Have the child run ``code``; what that calls ``result``."""
        self.order(code)
        return json.loads(self._stream.readline())

    def at_end(self) -> bool:
        """Wait for the end of file; whether the next thing was that."""
        try:
            return self._stream.readline() == ""
        except ConnectionResetError:  # it died with an order unread
            return True

    def hang_up(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):  # what was written and not sent has nobody to go to
            self._stream.close()
        self.end.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.child.kill()
        self.hang_up()
        self.child.close()


def lives(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not, whoever has yet to reap it."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ended(pidfd: int, limit_s: float) -> bool:
    """Wait for the process behind ``pidfd`` to end; whether it did."""
    return bool(select.select([pidfd], [], [], limit_s)[0])


@contextlib.contextmanager
def caught_stderr() -> Iterator[Path]:
    """Descriptor 2 of this process goes to a file meanwhile, for what is started to inherit."""
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stderr")
        kept = os.dup(2)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
        os.close(file)
        try:
            yield path
        finally:
            os.dup2(kept, 2)
            os.close(kept)
