# SPDX-License-Identifier: BSD-3-Clause
"""The command line: help, errors as one line, exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import types
import unittest
from collections.abc import Callable
from unittest import mock

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, child_env, run_python

errors = load("_errors")
main = load("__main__")

HAS_TORCH = importlib.util.find_spec("torch") is not None
COMMANDS = [" ".join(command.words) for command in main.COMMANDS]


class FreshInterpreter(GuardedTestCase):
    limit_s = LONG_S

    def test_without_arguments_shows_help(self) -> None:
        done = run_python("-m", PACKAGE)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(f"usage: python -m {PACKAGE} COMMAND", done.stdout)
        for name in COMMANDS:
            self.assertIn(name, done.stdout)
        self.assertEqual(run_python("-m", PACKAGE, "--help").stdout, done.stdout)

    def test_version(self) -> None:
        self.assertEqual(run_python("-m", PACKAGE, "--version").stdout, f"{PACKAGE} {load().__version__}\n")

    def test_unknown_command_is_refused_with_a_hint(self) -> None:
        done = run_python("-m", PACKAGE, "dmeo", "--size", "1")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(
            done.stderr, f"python -m {PACKAGE}: no command 'dmeo --size'; there is: {', '.join(COMMANDS)}\n"
        )

    def test_half_a_command_is_refused_with_the_other_half(self) -> None:
        done = run_python("-m", PACKAGE, "bench")
        self.assertEqual(done.returncode, 2)
        benches = "bench http, bench pg, bench pg-transport, bench all"
        self.assertEqual(done.stderr, f"python -m {PACKAGE}: no command 'bench'; there is: {benches}\n")

    @unittest.skipUnless(HAS_TORCH, "needs torch")
    def test_each_command_has_help(self) -> None:
        for command in main.COMMANDS:
            with self.subTest(command.words):
                done = run_python("-m", PACKAGE, *command.words, "--help")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn(f"usage: python -m {PACKAGE} {' '.join(command.words)}", done.stdout)

    def test_reader_that_leaves_is_no_news(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                [sys.executable, "-m", PACKAGE, "--help"],
                env=child_env({"PYTHONUNBUFFERED": None}),
                stdout=writer,
                stderr=subprocess.PIPE,
                timeout=LONG_S / 2,
                check=False,
            )
        finally:
            os.close(writer)
        self.assertEqual((done.returncode, done.stderr), (1, b""))


class Errors(unittest.TestCase):
    def ended(self, run: Callable[[argparse.Namespace], int], *arguments: str) -> tuple[int, str]:
        """The exit status and the stderr of a command that does ``run``."""

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--size", type=int, default=1)

        module = types.SimpleNamespace(add_arguments=add_arguments, run=run)
        importer = types.SimpleNamespace(import_module=lambda name, package: module)
        stderr = io.StringIO()
        with mock.patch.object(main, "importlib", importer), contextlib.redirect_stderr(stderr):
            return main.main(["demo", *arguments]), stderr.getvalue()

    def raising(self, error: BaseException) -> Callable[[argparse.Namespace], int]:
        def run(arguments: argparse.Namespace) -> int:
            raise error

        return run

    def test_status_and_arguments_are_the_commands(self) -> None:
        self.assertEqual(self.ended(lambda arguments: arguments.size, "--size", "7"), (7, ""))

    def test_own_error_is_one_line(self) -> None:
        status, text = self.ended(self.raising(errors.NotServing("no state of step 3")))
        self.assertEqual((status, text), (1, f"python -m {PACKAGE}: NotServing: no state of step 3\n"))

    def test_bad_value_is_one_line(self) -> None:
        status, text = self.ended(self.raising(ValueError("size is -1")))
        self.assertEqual((status, text), (2, f"python -m {PACKAGE}: size is -1\n"))

    def test_interrupt(self) -> None:
        self.assertEqual(self.ended(self.raising(KeyboardInterrupt())), (130, ""))

    def test_missing_torch_is_one_line(self) -> None:
        status, text = self.ended(self.raising(ModuleNotFoundError("No module named 'torch'", name="torch")))
        self.assertEqual(status, 1)
        self.assertRegex(text, "^python -m .*: this command needs torch .*\n$")

    def test_bugs_keep_their_traceback(self) -> None:
        for error in (KeyError("x"), ModuleNotFoundError("No module named 'x'", name="x")):
            with self.assertRaises(type(error)):
                self.ended(self.raising(error))

    def test_broken_pipe_of_the_command_is_not_swallowed(self) -> None:
        with (
            open(os.devnull, "w") as healthy,
            contextlib.redirect_stdout(healthy),
            self.assertRaises(BrokenPipeError),
        ):
            self.ended(self.raising(BrokenPipeError("the child's pipe")))


if __name__ == "__main__":
    unittest.main()
