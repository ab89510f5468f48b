# SPDX-License-Identifier: BSD-3-Clause
"""ProcessGroupGloo passes the contract."""

from __future__ import annotations

import unittest
from datetime import timedelta
from typing import Any

import torch

from tests import load
from tests._support import LONG_S, GuardedTestCase
from tests.process_group._contract import ProcessGroupContract

ProcessGroupGloo = load("process_group").ProcessGroupGloo


class GlooContract(ProcessGroupContract, GuardedTestCase):
    limit_s = LONG_S

    def make_group(self, timeout: timedelta) -> Any:
        return ProcessGroupGloo(timeout=timeout)

    def drivers(self, part: float) -> list[Any]:
        """The threads that waited for a send and a receive, of which ``part`` of the limit is waited for."""
        with self.team(2) as team:

            def body(group: Any, rank: int) -> Any:
                tensor = torch.full((4,), float(rank))
                work = group.send([tensor], 1, 1) if rank == 0 else group.recv([tensor], 0, 1)
                work.wait(timedelta(seconds=part * team.timeout_s))
                self.assertEqual(tensor.tolist(), [0.0] * 4)
                return work._driver

            return team.run(body)

    def test_who_waits_for_nearly_the_whole_time_needs_no_thread(self) -> None:
        self.assertEqual(self.drivers(0.99), [None, None])
        self.assertNotIn(None, self.drivers(0.9))


del ProcessGroupContract

if __name__ == "__main__":
    unittest.main()
