# SPDX-License-Identifier: BSD-3-Clause
"""``bench pg-transport``, run small, so that it stays alive."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from unittest import mock

import torch  # noqa: F401 - the child processes need it, so what runs without torch leaves this module out

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, run_python

pg_transport = load("bench.pg_transport")

SIZE = 8_000_000
SMALL = ("--total-size", str(SIZE), "--chunk-size", "100KB")
STAGES = [
    "init_pg", "create state_dict", "preparing state_dict", "send metadata", "send tensors", "send_checkpoint",
    "recv_checkpoint",
]  # fmt: skip


def options(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pg_transport.add_arguments(parser)
    return parser.parse_args(line)


class TransportBenchTest(GuardedTestCase):
    limit_s = LONG_S

    def figures(self, *line: str) -> dict[str, object]:
        done = run_python("-m", PACKAGE, "bench", "pg-transport", *SMALL, "--json", *line, limit_s=LONG_S / 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        found = json.loads(done.stdout)
        self.assertIs(found["verified"], True)
        self.assertEqual((found["state_bytes"], found["tensors"]), (SIZE, 80))
        self.assertEqual(list(found["stages"]), STAGES)
        self.assertEqual(found["stages"]["recv_checkpoint"][0], found["first_s"])
        return found

    def test_over_a_child_in_place(self) -> None:
        found = self.figures("--inplace", "--runs", "2")
        self.assertEqual((found["backend"], found["inplace"], found["runs"]), ("baby-gloo", True, 2))
        self.assertEqual({name: len(seconds) for name, seconds in found["stages"].items()}["send tensors"], 2)
        parts = [found["stages"][name] for name in STAGES[2:5]]
        for whole, *of_it in zip(found["stages"]["send_checkpoint"], *parts):
            self.assertLessEqual(sum(of_it), whole)
        for name in ("receiver_peak_growth_bytes", "donor_peak_growth_bytes"):
            # messages on their way; a system that does not tell says so
            self.assertLess(found[name] or 0, 64_000_000, name)
        self.in_lines(found)

    def in_lines(self, found: dict[str, object]) -> None:
        """The same figures without --json."""
        with (
            mock.patch.object(pg_transport, "measure", return_value=found),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            self.assertEqual(pg_transport.run(options(*SMALL)), 0)
        text = printed.getvalue()
        self.assertIn("verified: 80 tensors, 8 MB, bit for bit, in 2 runs over baby-gloo\n", text)
        self.assertIn("first heal ", text)

    def test_in_the_process_into_fresh_memory(self) -> None:
        found = self.figures("--backend", "gloo", "--runs", "1")
        self.assertEqual((found["backend"], found["inplace"]), ("gloo", False))

    def test_a_device_that_is_not_there(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "pg-transport", *SMALL, "--device", "xpu", "--backend", "baby-xccl")
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stdout, "")

    def test_a_backend_that_is_none(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "pg-transport", "--backend", "mpi")
        self.assertEqual(done.returncode, 2)
        self.assertIn("baby-gloo", done.stderr)

    def test_more_memory_than_there_is(self) -> None:
        with self.assertRaisesRegex(ValueError, "lower --total-size"):
            pg_transport.run(options("--total-size", "900TB"))
