# SPDX-License-Identifier: BSD-3-Clause
"""Sizes in words, the bar, and the peak of memory."""

from __future__ import annotations

import argparse
import io
import unittest

from tests import load
from tests._support import GuardedTestCase, run_python

common = load("bench._common")
PACKAGE = common.__package__


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class SizeTest(GuardedTestCase):
    def test_what_people_write(self) -> None:
        for text, size in {
            "4096": 4096,
            "300MB": 300_000_000,
            "2 GB": 2_000_000_000,
            "1.5kb": 1500,
            "64MiB": 1 << 26,
            "2e9": 2_000_000_000,
            "1K": 1000,
            "7B": 7,
        }.items():
            self.assertEqual(common.parse_size(text), size, text)

    def test_what_is_no_size(self) -> None:
        for text in ("", "0", "-1", "four", "4q", "1.2.3MB", "MB", "nan", "0.1"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                common.parse_size(text)

    def test_in_words(self) -> None:
        for count, text in {
            0: "0 bytes",
            999: "999 bytes",
            999_700: "1 MB",
            12_300_000: "12.3 MB",
            301_000_000: "301 MB",
            2_000_000_000: "2 GB",
            250_000_000_000: "250 GB",
        }.items():
            self.assertEqual(common.in_bytes(count), text)
        for seconds, text in {
            None: "-",
            0.0: "0 us",
            4.2e-7: "0.42 us",
            2.5e-5: "25 us",
            0.0123: "12.3 ms",
            0.9999: "1 s",
            2.0: "2 s",
            12345.6: "12346 s",
        }.items():
            self.assertEqual(common.in_time(seconds), text)
        self.assertEqual([common.in_percent(part) for part in (-0.004, 0.126, -1.0)], ["+0%", "+13%", "-100%"])
        self.assertEqual(common.rate(3e9, 2), "1.50 GB/s")
        self.assertEqual(common.rate(3e9, 0), "- GB/s")


class BarTest(GuardedTestCase):
    def test_drawn_on_a_terminal(self) -> None:
        stream = Terminal()
        bar = common.Bar(stream)
        bar.show("heal", 150_000_000, 300_000_000, "B")
        self.assertIn("##############..............", stream.getvalue())
        self.assertIn("150 MB of 300 MB", stream.getvalue())
        bar.clear()
        self.assertTrue(stream.getvalue().endswith("\r\x1b[K"))

    def test_nothing_elsewhere(self) -> None:
        stream = io.StringIO()
        bar = common.Bar(stream)
        bar.show("heal", 1, 2)
        bar.clear()
        self.assertEqual(stream.getvalue(), "")


class MemoryPeakTest(GuardedTestCase):
    def test_a_passing_peak_is_seen(self) -> None:
        # in a process of its own: other tests' freed memory would be used again here
        code = (
            f"from {PACKAGE}._common import MemoryPeak\n"
            "kept = bytearray(b'x') * 50_000_000; high = bytearray(b'x') * 100_000_000; del high\n"
            "memory = MemoryPeak(); passing = bytearray(b'x') * 30_000_000; del passing; print(memory.growth())"
        )
        printed = run_python("-c", code, check=True).stdout.strip()
        if printed == "None":
            raise unittest.SkipTest("this system does not tell a process's peak")
        self.assertAlmostEqual(int(printed) / 1e6, 30, delta=3)
