# SPDX-License-Identifier: BSD-3-Clause
"""``bench http``, run small, so that it stays alive."""

from __future__ import annotations

import argparse
import json
import sys

import torch  # the child processes need it as well, so what runs without torch leaves this module out

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, run_python

http = load("bench.http")
state = load("bench._state")

SIZE = 8_000_000
SMALL = ("--total-size", str(SIZE), "--chunk-size", "100KB")


def options(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    http.add_arguments(parser)
    return parser.parse_args(line)


class HttpBenchTest(GuardedTestCase):
    limit_s = LONG_S

    def bench(self, *line: str) -> str:
        done = run_python("-m", PACKAGE, "bench", "http", *SMALL, *line, limit_s=LONG_S / 2)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def figures(self, *line: str) -> dict[str, object]:
        (text,) = self.bench("--json", *line).splitlines()
        found = json.loads(text)
        self.assertIs(found["verified"], True)
        return found

    def test_in_place_two_readers(self) -> None:
        found = self.figures("--inplace", "--runs", "2", "--readers", "2")
        self.assertEqual((found["inplace"], found["readers"], found["num_chunks"]), (True, 2, None))
        self.assertEqual((found["state_bytes"], found["tensors"]), (SIZE, 80))
        self.assertEqual(len(found["fetch_s"]), 2)
        self.assertEqual(found["first_s"], found["fetch_s"][0])
        self.assertAlmostEqual(found["first_GBps"] * found["first_s"] * 1e9, SIZE, delta=1)
        for name in ("receiver_peak_growth_bytes", "donor_peak_growth_bytes"):
            # threads and sockets cost a little; a system that does not tell says so
            self.assertLess(found[name] or 0, 64_000_000, name)

    def test_single_stream_in_lines(self) -> None:
        text = self.bench("--num-chunks", "0", "--runs", "1")
        for part in (
            "create state_dict",
            "transferring state_dict to CPU",
            "fetching checkpoint",
            "GB/s",
            "verified: 80 tensors, 8 MB, bit for bit, in 1 run\n",
        ):
            self.assertIn(part, text)

    def test_pairs_with_another_interpreter_into_fresh_memory(self) -> None:
        found = self.figures("--runs", "1", "--pairs", "1", "--against", sys.executable)
        self.assertGreater(found["first_ratio"], 0)
        self.assertEqual(found["this"]["torch"], found["other"]["torch"])
        for side in (found["this"], found["other"]):
            self.assertEqual((side["inplace"], side["readers"], side["num_chunks"]), (False, 1, None))
            self.assertEqual((side["state_bytes"], side["tensors"]), (SIZE, 80))

    def test_an_interpreter_that_is_not_there(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "http", *SMALL, "--runs", "1", "--pairs", "1", "--against", "/none")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("/none: there is no such program", done.stderr)
        self.assertEqual(done.stdout, "")

    def test_wrong_bytes_have_no_figures(self) -> None:
        line = {"total_size": 4000, "chunk_size": 400}
        cpu = torch.device("cpu")

        def good() -> dict[str, torch.Tensor]:
            return state.make_state(line, cpu)

        state.verify(good(), good(), line, cpu)
        wrong, swapped, short, longer = good(), good(), good(), good()
        wrong["w9"].view(torch.int32)[99] ^= 1
        swapped["w3"], swapped["w4"] = swapped["w4"], swapped["w3"]
        short["w0"] = short["w0"][:-1]
        longer["extra"] = torch.zeros(1)
        for got, own, said in (
            (wrong, None, r"w9 \(returned\)"),
            (good(), wrong, r"w9 \(in place\)"),
            (swapped, None, "w3"),
            (short, None, ""),
            (longer, None, ""),
        ):
            with self.assertRaisesRegex(ValueError, said):
                state.verify(got, own, line, cpu)

    def test_more_memory_than_there_is(self) -> None:
        with self.assertRaisesRegex(ValueError, "lower --total-size or --readers"):
            http.run(options("--total-size", "900TB"))

    def test_a_size_that_is_none(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "http", "--total-size", "much")
        self.assertEqual(done.returncode, 2)
        self.assertIn("'much' is no size", done.stderr)
