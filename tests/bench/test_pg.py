# SPDX-License-Identifier: BSD-3-Clause
"""``bench pg``, run small, so that it stays alive."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from unittest import mock

import torch  # noqa: F401 - the child processes need it, so what runs without torch leaves this module out

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, run_python

pg = load("bench.pg")

SMALL = (
    "--size", "100KB", "--small-ops", "5", "--large-ops", "3", "--burst", "9", "--configures", "2", "--runs", "2",
)  # fmt: skip
ON_BOTH = {
    "configure cold", "configure warm", "1 float, wait", "1 float, future", "9 at once, 1 float each",
    "large, fresh", "large, same",
}  # fmt: skip
IN_THE_CHILD = {"configure after kill -9", "large, shared"}


class ProcessGroupBenchTest(GuardedTestCase):
    limit_s = LONG_S

    def test_every_part_is_measured(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "pg", *SMALL, "--json", limit_s=LONG_S / 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        found = json.loads(done.stdout)
        self.assertIs(found["verified"], True)
        rows = {row["part"]: row for row in found["parts"]}
        self.assertEqual(set(rows), ON_BOTH | IN_THE_CHILD)
        for part, row in rows.items():
            self.assertGreater(row["child_s"], 0, part)
            if part in ON_BOTH:
                self.assertGreater(row["in_process_s"], 0, part)
                low, high = row["ratios"]
                self.assertTrue(0 < low <= row["ratio"] <= high, row)
        self.assertEqual(rows["large, same"]["size"], 100_000)
        self.in_lines(found)

    def in_lines(self, found: dict[str, object]) -> None:
        """The same figures without --json."""
        parser = argparse.ArgumentParser()
        pg.add_arguments(parser)
        with (
            mock.patch.object(pg, "measure", return_value=found),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            self.assertEqual(pg.run(parser.parse_args(SMALL)), 0)
        text = printed.getvalue()
        for part in ON_BOTH | IN_THE_CHILD:
            self.assertIn(part, text)
        self.assertIn("verified: every sum, on torch ", text)


class Figures(GuardedTestCase):
    def test_ratios_are_of_the_same_repetition(self) -> None:
        (row,) = pg._together(
            [
                {"part": "x", "kind": "child", "seconds": [2.0]},
                {"part": "x", "kind": "in process", "seconds": [1.0]},
                {"part": "x", "kind": "child", "seconds": [20.0]},
                {"part": "x", "kind": "in process", "seconds": [15.0]},
            ]
        )
        self.assertEqual((row["ratio"], row["ratios"]), (0.625, [0.5, 0.75]))
        self.assertEqual((row["child_s"], row["in_process_s"]), (11.0, 8.0))
