# SPDX-License-Identifier: BSD-3-Clause
"""``bench all``, run small, so that it stays alive."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import torch  # noqa: F401 - the child processes need it, so what runs without torch leaves this module out

from tests import PACKAGE, load, not_in_a_copy
from tests._support import LONG_S, GuardedTestCase, run_python

not_in_a_copy()

bench = load("bench.all")
errors = load("_errors")


def options(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(line)


class AllTest(GuardedTestCase):
    limit_s = LONG_S

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.json, self.html = self.folder / "figures.json", self.folder / "page.html"

    def files(self) -> tuple[str, ...]:
        return "--json", str(self.json), "--html", str(self.html)

    def test_a_small_run(self) -> None:
        self.html.write_text("the page of yesterday", encoding="utf-8")
        done = run_python("-m", PACKAGE, "bench", "all", "--quick", *self.files(), limit_s=LONG_S * 0.8)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertEqual(sorted(os.listdir(self.folder)), ["figures.json", "page.html"])
        found = json.loads(self.json.read_text(encoding="utf-8"))
        self.of_the_limits(found)
        self.of_the_benches(found)
        self.of_the_table(done.stdout)
        text = self.html.read_text(encoding="utf-8")
        HTMLParser().feed(text)
        self.assertTrue(text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n"))
        for word in ("http://", "https://", "<script"):
            self.assertNotIn(word, text.replace("http://www.w3.org/2000/svg", ""))

    def of_the_limits(self, found: dict[str, object]) -> None:
        self.assertEqual((found["verified"], found["quick"], found["package"]), (True, True, PACKAGE))
        self.assertEqual(set(found["limits"]), {"copy", "socket", "round_trip", "gloo_float", "gloo_large"})
        for limit in found["limits"].values():
            self.assertGreater(limit["seconds"], 0)
            if "GBps" in limit:
                self.assertAlmostEqual(limit["GBps"] * limit["seconds"] * 1e9 / limit["bytes"], 1)

    def of_the_benches(self, found: dict[str, object]) -> None:
        self.assertEqual([it["name"] for it in found["transports"]], [name for name, *_ in bench._TRANSPORTS])
        for it in found["transports"]:
            shapes = [(row["tensors"], row["tensor_bytes"]) for row in it["shapes"]]
            self.assertEqual(shapes, list(bench.QUICK.shapes))
            for row in it["shapes"]:
                self.assertAlmostEqual(row["off"], row["fitted_s"] / row["median_s"] - 1)
            self.assertEqual(it["fit"]["determined"], len(shapes) > 2)
        ops = {(it["op"], it["kind"]): it for it in found["pg"]["ops"]}
        kinds = [("same", "child"), ("same", "in_process"), ("fresh", "child"), ("fresh", "in_process")]
        self.assertEqual(list(ops), [*kinds, ("shared", "child")])
        self.assertEqual(ops["same", "child"]["sizes"], [4, *bench.QUICK.ops])
        self.assertEqual(ops["shared", "child"]["sizes"], list(bench.QUICK.ops))
        self.assertIn("configure after kill -9", [row["part"] for row in found["pg"]["latency"]])

    def of_the_table(self, text: str) -> None:
        for part in ("raw socket, loopback, 1 MB", "pg-transport, baby-gloo  50 x 4 KB", "cannot tell these",
                     "configure warm", "shared tensor, child", "verified: every byte of every run"):  # fmt: skip
            self.assertIn(part, text)
        self.assertLessEqual(max(map(len, text.splitlines()[3:])), 110)

    def test_a_child_that_fails_leaves_no_file(self) -> None:
        self.html.write_text("the page of yesterday", encoding="utf-8")
        # another bench's child, which misses its options
        with (
            mock.patch.object(bench, "_LIMITS", f"{PACKAGE}.bench._http_worker"),
            self.assertRaisesRegex(errors.RemoteFailure, "KeyError: 'device'"),
        ):
            bench.run(options("--quick", *self.files()))
        self.assertEqual(os.listdir(self.folder), ["page.html"])
        self.assertEqual(self.html.read_text(encoding="utf-8"), "the page of yesterday")

    def test_a_limit_of_time(self) -> None:
        done = run_python("-m", PACKAGE, "bench", "all", "--quick", "--timeout", "0", *self.files())
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("DeadlineExceeded", done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    def test_only_json_on_stdout(self) -> None:
        known = {"bench": "all", "verified": True}
        with mock.patch.object(bench, "measure", return_value=known), mock.patch("builtins.print") as printed:
            self.assertEqual(bench.run(options("--json", "-")), 0)
        self.assertEqual([json.loads(call.args[0]) for call in printed.call_args_list], [known])

    def test_a_file_that_cannot_be_one_is_told_at_once(self) -> None:
        with mock.patch.object(bench, "measure", side_effect=AssertionError("measured")):
            for name, said in (
                (self.folder / "none" / "page.html", "there is no folder"),
                (self.folder, "no regular file"),
                ("/dev/null", "no regular file"),
            ):
                for option in ("--html", "--json"):
                    with self.assertRaisesRegex(ValueError, said):
                        bench.run(options(option, str(name)))

    def test_a_file_is_replaced_as_a_whole(self) -> None:
        link = self.folder / "link.html"
        self.html.write_text("old", encoding="utf-8")
        link.symlink_to(self.html)
        bench._write(link, "new")
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.html.read_text(encoding="utf-8"), "new")
        with mock.patch.object(bench.os, "replace", side_effect=OSError("disk")), self.assertRaises(OSError):
            bench._write(link, "newer")
        self.assertEqual(self.html.read_text(encoding="utf-8"), "new")
        self.assertEqual(sorted(os.listdir(self.folder)), ["link.html", "page.html"])

    def test_the_command_line_imports_no_torch(self) -> None:
        code = f"import sys, {PACKAGE}.bench.all; print('torch' in sys.modules)"
        self.assertEqual(run_python("-c", code, check=True).stdout, "False\n")


class LimitsTest(GuardedTestCase):
    def test_wrong_bytes_have_no_figure(self) -> None:
        worker = load("bench._limits_worker")
        want = worker._buffer(2_500_000)
        worker._require(bytearray(want), want)
        wrong = bytearray(want)
        wrong[1_000_003] ^= 1
        moved = bytearray(want[4096:] + want[:4096])
        for got in (wrong, moved, wrong[:-1]):
            with self.assertRaisesRegex(ValueError, "wrong bytes"):
                worker._require(got, want)
