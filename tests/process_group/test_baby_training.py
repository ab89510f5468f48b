# SPDX-License-Identifier: BSD-3-Clause
"""Training over ProcessGroupBabyGloo in real processes."""

from __future__ import annotations

import unittest

from tests._support import GuardedTestCase
from tests.process_group._training_contract import TrainingContract


class TrainingOverBabyGloo(TrainingContract, GuardedTestCase):
    group_name = "ProcessGroupBabyGloo"


del TrainingContract

if __name__ == "__main__":
    unittest.main()
