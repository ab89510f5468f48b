# SPDX-License-Identifier: BSD-3-Clause
"""For the tests of the groups in a child process: one template for a class, teams, and what is done to children."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from tests import load
from tests._support import LONG_S, SCALE, WAIT_S, GuardedTestCase, Holdings, leaks_since, wait_until
from tests.process_group._ranks import Team
from tests.process_group._template_tools import caught_stderr, lives, soon

errors = load("_errors")
template = load("process_group._template")
ProcessGroupBabyGloo = load("process_group").ProcessGroupBabyGloo

ENTRY = str(Path(__file__).with_name("_baby_entry.py"))
FAULT = "FTLITE_TEST_CHILD"
# From a failure until everybody who waits knows of it.
SOON_S = 1.0 * SCALE


class BabyCase(GuardedTestCase):
    """One template for all tests of a class, whose children run ``_baby_entry``. stderr is the file ``stderr``."""

    limit_s = LONG_S
    stderr: ClassVar[Path]
    template: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv opens a pipe once, and keeps it
        before = Holdings.now()
        cls.addClassCleanup(cls.look, before)
        context = caught_stderr()
        cls.stderr = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.template = template.Template(ENTRY)
        # for the groups that are made meanwhile; others of this process keep theirs
        kept = template._templates.get(os.getpid())
        template._templates[os.getpid()] = cls.template
        cls.addClassCleanup(cls.put_back, kept)
        cls.template.hold()
        cls.addClassCleanup(cls.template.release)
        with Team(lambda timeout: ProcessGroupBabyGloo(timeout), 1, timeout_s=LONG_S / 4) as team:
            team.groups[0].allreduce([torch.ones(1)]).wait()
        # a child that is made to crash is to leave no core
        resource.prlimit(cls.template.pid(), resource.RLIMIT_CORE, (0, 0))

    @classmethod
    def put_back(cls, kept: Any) -> None:
        del template._templates[os.getpid()]
        if kept is not None:
            template._templates[os.getpid()] = kept

    @classmethod
    def look(cls, before: Holdings) -> None:
        left = leaks_since(before)
        if left:
            raise AssertionError("left behind:\n  " + "\n  ".join(left))

    def team(self, size: int = 2, timeout_s: float = LONG_S / 4) -> Team:
        made = Team(lambda timeout: ProcessGroupBabyGloo(timeout), size, timeout_s=timeout_s)
        self.addCleanup(made.close)
        return made

    def works(self, team: Team) -> None:
        """All ranks of ``team`` add something up."""

        def body(group: Any, rank: int) -> None:
            tensor = torch.full((3,), float(rank))
            group.allreduce([tensor]).wait()
            self.assertEqual(tensor.tolist(), [sum(range(group.size()))] * 3)
            self.assertIsNone(group.errored())

        team.run(body)

    def heals(self, team: Team) -> None:
        """``configure`` makes ``team`` work again."""
        team.configure()
        self.works(team)


@contextlib.contextmanager
def faulty(fault: str) -> Iterator[None]:
    """Children that begin meanwhile have ``fault``, see ``_baby_entry``."""
    os.environ[FAULT] = fault
    try:
        yield
    finally:
        del os.environ[FAULT]


def child_of(group: Any) -> int:
    """The pid of the child of ``group``."""
    pid: int = wait_until(lambda: getattr(group._held.session._child, "pid", 0), "the child is there")
    return pid


def gone(pid: int, limit_s: float = WAIT_S) -> None:
    """Wait until ``pid`` is dead and reaped."""
    wait_until(lambda: not Path("/proc", str(pid)).exists(), f"process {pid} is reaped", limit_s)


class Waiter:
    """``wait`` in a thread of its own: what it returned or raised, and from when to when it ran."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.started_s, self.over_s = time.monotonic(), 0.0
        self._wait = wait
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._wait()
        except BaseException as error:
            self.error = error
        self.over_s = time.monotonic()

    def join(self, limit_s: float = WAIT_S) -> BaseException | None:
        """What it raised, once it is over."""
        self.thread.join(limit_s)
        if self.thread.is_alive():
            raise AssertionError(f"still waiting after {limit_s:g} s")
        return self.error


__all__ = [
    "ENTRY", "FAULT", "SOON_S", "BabyCase", "ProcessGroupBabyGloo", "Waiter", "child_of", "errors", "faulty", "gone",
    "lives", "soon", "template",
]  # fmt: skip
