# SPDX-License-Identifier: BSD-3-Clause
"""Comparing in pairs: the order of the runs, and the arithmetic."""

from __future__ import annotations

from tests import load
from tests._support import GuardedTestCase

pairs = load("bench._pairs")

SAME = dict.fromkeys(
    ("torch", "python", "device", "num_chunks", "inplace", "runs", "readers", "state_bytes", "tensors"), 1
)


def figures(seconds: float) -> dict[str, object]:
    return {**SAME, "bench": "http", "publish_s": seconds, "first_s": seconds, "median_s": seconds / 2}


class PairsTest(GuardedTestCase):
    def test_they_take_turns_in_who_goes_first(self) -> None:
        called = []

        def measure(side: int) -> dict[str, object]:
            called.append(side)
            return {"side": side}

        rows = pairs.compare(measure, 3)
        self.assertEqual(called, [0, 1, 1, 0, 0, 1])
        self.assertEqual(rows, [({"side": 0}, {"side": 1})] * 3)

    def test_the_ratio_is_the_median_of_the_pairs_ratios(self) -> None:
        rows = [(figures(1.0), figures(2.0)), (figures(4.0), figures(4.0)), (figures(9.0), figures(3.0))]
        result = pairs.summarize(rows, ("this", "other"))
        self.assertEqual(result["first_ratio"], 1.0)
        self.assertEqual(result["first_spread"], [0.5, 3.0])
        self.assertEqual(result["this"]["first_s"], 4.0)
        self.assertEqual(result["other"]["median_s"], 1.5)
        self.assertEqual(result["pairs"], 3)
