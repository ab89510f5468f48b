# SPDX-License-Identifier: BSD-3-Clause
"""Training over ProcessGroupGloo in real processes."""

from __future__ import annotations

import unittest

from tests._support import GuardedTestCase
from tests.process_group._training_contract import TrainingContract


class TrainingOverGloo(TrainingContract, GuardedTestCase):
    group_name = "ProcessGroupGloo"
    backend_name = "in-process-again"


del TrainingContract

if __name__ == "__main__":
    unittest.main()
