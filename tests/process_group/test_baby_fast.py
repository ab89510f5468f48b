# SPDX-License-Identifier: BSD-3-Clause
"""How fast a group in a child is configured again. Run when no other tests take the cores; see ``tests._run``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import not_in_a_copy
from tests._support import LONG_S, SCALE, child_env
from tests.process_group._baby_tools import BabyCase, child_of, errors, gone
from tests.process_group._ranks import Team

not_in_a_copy()

# What configure() may take with a template that is warm, the wait for others left out.
CONFIGURE_S = 0.1 * SCALE

# Set where every address that the tests use has a name in /etc/hosts.
NAMES_ARE_KNOWN = "FTLITE_TEST_NAMES_ARE_KNOWN"


def slowest(times_s: list[float]) -> float:
    """The slowest of ``times_s``; the slowest of the fastest quarter where a name server has a say.

    torch's store asks for the name of whoever connects, at both ends, and waits for the answer.
    """
    return max(times_s) if os.environ.get(NAMES_ARE_KNOWN) else sorted(times_s)[len(times_s) // 4]


class Fast(BabyCase):
    def ten_times(self, spoil: Callable[[Team], list[Any]]) -> None:
        """Ten times ``spoil`` a team of two, and have rank 0 leave for a group of one; back again. All are fast."""
        alone_s, both_s = [], []
        with self.team(2) as team:
            group = team.groups[0]
            for _ in range(10):
                works = spoil(team)
                old = child_of(group)
                started_s = time.monotonic()
                group.configure(team.address(), "alone", 0, 1)
                alone_s.append(time.monotonic() - started_s)
                self.assertIsNone(group.errored())
                for work in works:
                    with self.assertRaisesRegex(errors.StateError, "stale"):
                        work.wait()
                started_s = time.monotonic()
                team.configure()
                both_s.append(time.monotonic() - started_s)
                self.works(team)
                gone(old)
        self.assertLess(slowest(alone_s), CONFIGURE_S, alone_s)
        # two trainers in one process, on a template that forks for one after the other
        self.assertLess(slowest(both_s), 2 * CONFIGURE_S, both_s)

    def test_idle(self) -> None:
        self.ten_times(lambda team: [])

    def test_with_ops_pending(self) -> None:
        def spoil(team: Team) -> list[Any]:
            group = team.groups[0]
            works = [group.allreduce([torch.ones(1000)]) for _ in range(20)]
            works[3].get_future()
            return [*works, group.recv([torch.ones(8)[::2]], 1, 4)]

        self.ten_times(spoil)

    def test_while_the_peer_is_dead(self) -> None:
        def spoil(team: Team) -> list[Any]:
            os.kill(child_of(team.groups[1]), signal.SIGKILL)
            # it stays pending, or fails: by then nobody has looked
            team.groups[0].allreduce([torch.ones(1000)])
            return []

        self.ten_times(spoil)

    def test_each_is_fast_where_names_are_known(self) -> None:
        if os.environ.get(NAMES_ARE_KNOWN):
            self.skipTest("this is there already")
        unshare = shutil.which("unshare")
        hosts = Path(self.stderr.parent, "hosts")
        # the form in which torch asks for it
        hosts.write_text(Path("/etc/hosts").read_text() + "\n::ffff:127.0.0.1 localhost\n")
        mount = f"mount --bind {hosts} /etc/hosts"
        if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
            self.skipTest("needs unshare -m and mount")
        names = ("test_idle", "test_with_ops_pending", "test_while_the_peer_is_dead")
        tests = [f"{__name__}.Fast.{name}" for name in names]
        done = subprocess.run(
            [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-m", "unittest", *tests],
            env={**child_env(), NAMES_ARE_KNOWN: "1"},
            timeout=LONG_S / 2,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"Ran 3 tests")
        self.assertNotIn("skipped", done.stderr)


if __name__ == "__main__":
    unittest.main()
