# SPDX-License-Identifier: BSD-3-Clause
"""Trainers that end in every way there is: fresh processes at the price of a fork.

One interpreter imports torch, and nothing that is tested. A fork of it becomes a trainer, which runs the code of an
order in ``__main__`` and then ends as every interpreter does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests._support import LONG_S, child_env, wait_until

FORKER = """
import json, os, sys
import torch.distributed
for order in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code, *files = json.loads(order)
        os.setsid()
        for number, path in enumerate(files, 1):
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        exec(compile(code, "<trainer>", "exec"), globals())
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Trainers:
    """What ``FORKER`` says; a trainer costs no import of torch, so that each test has fresh ones."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        flags = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", FORKER],
            env=child_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._count = 0

    def start(self, code: str) -> Trainer:
        """A new process, in a process group of its own. One at a time."""
        self._count += 1
        out, err = (Path(self._folder.name, f"{name}{self._count}") for name in ("out", "err"))
        out.touch()
        err.touch()
        self._process.stdin.write(json.dumps([code, str(out), str(err)]).encode() + b"\n")
        return Trainer(self, int(self.answer()), out, err)

    def answers(self, limit_s: float) -> bool:
        """Whether there is an answer within ``limit_s``."""
        return bool(select.select([self._process.stdout], [], [], limit_s)[0])

    def answer(self) -> bytes:
        """The next line of ``FORKER``'s."""
        if not self.answers(LONG_S / 2):
            raise AssertionError("the interpreter that forks the trainers does not answer")
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


class Trainer:
    """One of ``Trainers``. A context manager that kills it."""

    def __init__(self, trainers: Trainers, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._trainers = trainers
        self._out = out
        self._err = err
        self._code: int | None = None

    def lines(self, count: int = 1) -> list[str]:
        """The first lines of its output, as soon as there are so many; its stderr where it ends before."""

        def said() -> list[str]:
            over = self._code is not None or self._trainers.answers(0)
            lines = self._out.read_text().splitlines(keepends=True)
            found = [line for line in lines[:count] if line.endswith("\n")]
            if over and len(found) < count:
                raise AssertionError(f"it ended and had said {found}:\n{self._err.read_text()}")
            return found if len(found) == count else []

        return wait_until(said, f"{count} lines", LONG_S / 4)

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, limit_s: float = LONG_S / 4) -> tuple[int, str, str]:
        """Its exit code, what it has printed, and its stderr, once it has ended."""
        late = self._code is None and not self._trainers.answers(limit_s)
        if late:
            self.kill()
        if self._code is None:
            self._code = int(self._trainers.answer())
        out, err = self._out.read_text(), self._err.read_text()
        if late:
            raise AssertionError(f"it ran for longer than {limit_s:g} s:\n{out}\n{err}")
        return self._code, out, err

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.ended()
