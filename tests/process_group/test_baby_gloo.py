# SPDX-License-Identifier: BSD-3-Clause
"""ProcessGroupBabyGloo passes the contract."""

from __future__ import annotations

import unittest
from datetime import timedelta
from typing import Any

from tests import load
from tests._support import LONG_S, GuardedTestCase
from tests.process_group._contract import ProcessGroupContract

ProcessGroupBabyGloo = load("process_group").ProcessGroupBabyGloo
template = load("process_group._template")


class BabyGlooContract(ProcessGroupContract, GuardedTestCase):
    limit_s = LONG_S

    @classmethod
    def setUpClass(cls) -> None:
        # one template for all tests, up before the first of them
        cls.addClassCleanup(template.acquire().release)
        super().setUpClass()

    def make_group(self, timeout: timedelta) -> Any:
        return ProcessGroupBabyGloo(timeout=timeout)


del ProcessGroupContract

if __name__ == "__main__":
    unittest.main()
