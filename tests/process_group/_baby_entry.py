# SPDX-License-Identifier: BSD-3-Clause
"""What the children of the baby groups' tests run: the real child, made to misbehave.

In every child SIGUSR1 means: end with exit code 3; and SIGUSR2: ten minutes in native code with the GIL held. The
environment variable FTLITE_TEST_CHILD, read when a child begins, says what else is wrong with it, see ``_FAULTS``.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from typing import Any

# under whichever name the template has made the package again
_child: Any = importlib.import_module(f"{__package__}._child")


class _TwoArguments(Exception):
    """Cannot be made again from its text alone, nor pickled."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code
        self.hook = lambda: code


def _obey_signals() -> None:
    # a handler in Python runs in the main thread, which may be in native code; the number is in the pipe at once
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)

    def obey() -> None:
        if os.read(reader, 1)[0] == signal.SIGUSR1:
            os._exit(3)
        ctypes.PyDLL(None).sleep(600)

    threading.Thread(target=obey, name="obeys signals", daemon=True).start()


def _every_op(do: Any) -> None:
    """``do`` comes before every op."""
    call = _child.call

    def instead(*args: Any) -> Any:
        do()
        return call(*args)

    _child.call = instead


def _raise(error: BaseException) -> None:
    raise error


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _exit_while_it_starts() -> None:
    _say("no room in the inn\n")
    sys.exit(3)


_FAULTS = {
    "op sits in native code": lambda: _every_op(lambda: ctypes.CDLL(None).sleep(600)),
    "op sits in native code with the GIL": lambda: _every_op(lambda: ctypes.PyDLL(None).sleep(600)),
    "op raises what cannot be pickled": lambda: _every_op(lambda: _raise(_TwoArguments("two of them", 7))),
    "op raises SystemExit": lambda: _every_op(lambda: _raise(SystemExit("leave me alone"))),
    "exits": _exit_while_it_starts,
    "raises": lambda: _raise(ImportError("no module of that name")),
}


def main(end: socket.socket) -> int:
    _obey_signals()
    fault = os.environ.get("FTLITE_TEST_CHILD")
    if fault:
        _FAULTS[fault]()
    return int(_child.main(end))
