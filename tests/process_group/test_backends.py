# SPDX-License-Identifier: BSD-3-Clause
"""What is done around a backend when it is made."""

from __future__ import annotations

import os
import socket
import unittest
from unittest import mock

from torch.distributed import HashStore

from tests import load
from tests._support import GuardedTestCase, wait_until

backends = load("process_group._backends")
child = load("process_group._child")


def policies() -> dict[int, int]:
    """The scheduling policy of each thread of this process."""
    return {int(task): os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")}


class Poller(GuardedTestCase):
    def made(self) -> dict[int, int]:
        """The threads that a Gloo group of one brings, and the policy of each."""
        before = policies()
        made = backends.new_gloo(HashStore(), 0, 1, 30.0, (), ("cpu",))
        after = policies()
        del made
        wait_until(lambda: policies().keys() <= before.keys(), "the threads of the group end")
        return {task: policy for task, policy in after.items() if task not in before}

    def test_it_interrupts_nobody(self) -> None:
        mine = os.sched_getscheduler(0)
        self.assertEqual(mine, os.SCHED_OTHER)
        found = sorted(self.made().values())
        self.assertEqual(found.count(os.SCHED_BATCH), 1, found)  # the others run the ops
        self.assertGreater(found.count(os.SCHED_OTHER), 0, found)
        self.assertEqual(os.sched_getscheduler(0), mine)

    def test_where_it_may_not_be_set(self) -> None:
        with mock.patch.object(os, "sched_setscheduler", side_effect=PermissionError):
            self.assertEqual(set(self.made().values()), {os.SCHED_OTHER})

    def test_what_was_chosen_stays(self) -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            self.made()
            self.assertEqual(os.sched_getscheduler(0), os.SCHED_BATCH)
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def test_when_the_device_cannot_be_made(self) -> None:
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nosuchif0"), self.assertRaises(Exception) as caught:
            backends.new_gloo(HashStore(), 0, 1, 30.0, (), ("cpu",))
        self.assertIn("nosuchif0", str(caught.exception))
        self.assertEqual(os.sched_getscheduler(0), os.SCHED_OTHER)


class Resolver(GuardedTestCase):
    def options_of(self, **given: str) -> str | None:
        """What the C library is told in a child whose trainer has ``given``."""
        ours, theirs = socket.socketpair()
        ours.close()
        self.addCleanup(theirs.close)
        with mock.patch.dict(os.environ):
            os.environ.pop("RES_OPTIONS", None)
            os.environ.update(given)
            self.assertEqual(child.main(theirs), 0)
            return os.environ.get("RES_OPTIONS")

    def test_it_asks_again_soon(self) -> None:
        self.assertEqual(self.options_of(), "timeout:1 attempts:5")

    def test_what_the_user_has_set_stays(self) -> None:
        self.assertEqual(self.options_of(RES_OPTIONS="ndots:2"), "ndots:2")


if __name__ == "__main__":
    unittest.main()
