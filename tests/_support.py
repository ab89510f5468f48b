# SPDX-License-Identifier: BSD-3-Clause
"""What the tests share: the leak guard, the watchdog, waiting for a fact, child interpreters, skips.

Nothing here imports torch before a test asks for it, so that the tests of pure modules run without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from tests import NO_NUMPY, PACKAGE, load

# A slow or emulated machine multiplies every limit below by this.
SCALE = float(os.environ.get("FTLITE_TEST_TIMEOUT_SCALE") or 1)

# One test in one process: the slowest here take a second or two; 60 is for a loaded machine.
SHORT_S = 60 * SCALE
# A test that starts interpreters which import torch (1-10 s each on a cold, busy disk) or moves much data.
LONG_S = 300 * SCALE
# What a test waits for a fact that should hold at once: threads switch within milliseconds.
WAIT_S = 10 * SCALE
# Closing is asynchronous: a handler thread still has to notice that its socket was closed.
GRACE_S = 5 * SCALE

_POLL_S = 0.005

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    """Return the first true value of ``predicate``; fail with ``what`` when there is none in ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= end_s:
            raise AssertionError(f"did not come true within {limit_s:g} s: {what}")
        time.sleep(_POLL_S)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of ``host`` that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


# --- the leak guard ------------------------------------------------------------------------------------


def children() -> dict[int, str]:
    """The child processes of this one, not yet reaped ones included: pid -> state and command line."""
    found = {}
    tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
    for entry in os.listdir("/proc"):
        # multiprocessing's resource tracker is started once and meant to stay until the interpreter ends
        if not entry.isdigit() or int(entry) == tracker:
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
            # "pid (name) state ppid ...", where the name may hold spaces and brackets
            state, parent = stat.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry)] = f"state {state}: {command.decode(errors='replace').strip()[:200]}"
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
    return found


def descriptors() -> dict[int, str]:
    """The open descriptors of this process and what they stand for."""
    found = {}
    tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None)
    for entry in os.listdir("/proc/self/fd"):
        # the listing's own descriptor is closed by now
        with contextlib.suppress(OSError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    found.pop(tracker, None)
    return found


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one moment."""

    threads: frozenset[threading.Thread]
    children: Mapping[int, str]
    descriptors: Mapping[int, str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(frozenset(threading.enumerate()), children(), descriptors())

    def beyond(self, before: Holdings, ignored: tuple[str, ...] = ()) -> list[str]:
        """What is held here and was not held ``before``, one line each."""
        return [
            *(f"thread {thread.name} ({thread!r})" for thread in self.threads - before.threads),
            *(f"child {pid}: {text}" for pid, text in self.children.items() if pid not in before.children),
            *(
                f"descriptor {number}: {target}"
                for number, target in self.descriptors.items()
                if before.descriptors.get(number) != target and not target.startswith(ignored)
            ),
        ]


def leaks_since(before: Holdings, limit_s: float = GRACE_S, ignored: tuple[str, ...] = ()) -> list[str]:
    """What was added since ``before`` and does not go away within ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while True:
        left = Holdings.now().beyond(before, ignored)
        if not left or time.monotonic() >= end_s:
            return left
        gc.collect()  # cycles of the test itself (a caught exception and its frames) are no leak
        time.sleep(_POLL_S)


class GuardedTestCase(unittest.TestCase):
    """A test that may not hang and may leave no thread, child process or descriptor behind.

    The guard's look comes after tearDown and every other cleanup. A class that overrides ``setUp`` calls
    ``super().setUp()`` first.
    """

    # when the watchdog dumps all stacks and ends the interpreter: SHORT_S or LONG_S
    limit_s = SHORT_S
    # beginnings of descriptor targets that a driver opens once and keeps
    ignored_descriptors: tuple[str, ...] = ("/dev/nvidia",)

    def setUp(self) -> None:
        super().setUp()
        # the real stderr: a test that captures sys.stderr must not swallow the stacks
        faulthandler.dump_traceback_later(self.limit_s, exit=True, file=sys.__stderr__)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)
        self.addCleanup(self._look, Holdings.now())

    def _look(self, before: Holdings) -> None:
        left = leaks_since(before, ignored=self.ignored_descriptors)
        if left:
            self.fail("left behind:\n  " + "\n  ".join(left))


# --- logs ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured_logs(level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """Collect the package's log records of ``level`` and above; they go nowhere else meanwhile."""
    records: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger(PACKAGE)
    handler = Collect()
    old = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = old


# --- child interpreters --------------------------------------------------------------------------------


def import_roots() -> list[str]:
    """The folders a child needs on its path to import the package under test and the tests."""
    package = Path(str(load().__file__)).parents[PACKAGE.count(".") + 1]
    return list(dict.fromkeys([str(package), str(Path(__file__).parents[1])]))


def child_env(env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment of a child interpreter: ours, the path it needs, ``env`` on top (None removes)."""
    wanted = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(import_roots()),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONWARNINGS": f"ignore:{NO_NUMPY}",
        **(env or {}),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def run_python(
    *args: str,
    env: Mapping[str, str | None] | None = None,
    limit_s: float = SHORT_S / 2,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a child Python to its end: ``run_python("-c", code)``, ``run_python("-m", PACKAGE, "demo")``.

    Args:
        args: what follows the interpreter; the parent's -O is passed on.
        env: on top of the environment; None as a value removes a variable.
        limit_s: seconds after which the child is killed and TimeoutExpired raised.
        check: fail, with the child's output, unless it ends with 0.
        options: for ``subprocess.run`` (cwd, input, ...).
    """
    done = subprocess.run(
        [sys.executable, *_interpreter_flags(), *args],
        env=child_env(env),
        timeout=limit_s,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"the child ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def _interpreter_flags() -> list[str]:
    # -O has to reach the children, or the optimized environment would test half of it
    return ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []


# --- skips ---------------------------------------------------------------------------------------------


def requires_root(test: T) -> T:
    """Skip unless run as root."""
    return unittest.skipUnless(os.geteuid() == 0, "needs root")(test)  # type: ignore[type-var]


def requires_netns(test: T) -> T:
    """Skip unless a network namespace can be made (``unshare --net`` as this user)."""
    return unittest.skipUnless(_can_unshare_net(), "needs unshare --net")(test)  # type: ignore[type-var]


def requires_cuda(test: T) -> T:
    """Skip without a CUDA device; where FTLITE_TEST_CUDA=1 promises one, let the test fail instead."""
    promised = os.environ.get("FTLITE_TEST_CUDA") == "1"
    return unittest.skipUnless(promised or _has_cuda(), "needs a CUDA device")(test)  # type: ignore[type-var]


def _can_unshare_net() -> bool:
    tool = shutil.which("unshare")
    if tool is None:
        return False
    return subprocess.run([tool, "--net", "true"], capture_output=True, check=False).returncode == 0


def _has_cuda() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
