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


class BabyGlooContract(ProcessGroupContract, GuardedTestCase):
    limit_s = LONG_S

    def make_group(self, timeout: timedelta) -> Any:
        return ProcessGroupBabyGloo(timeout=timeout)


del ProcessGroupContract

if __name__ == "__main__":
    unittest.main()
