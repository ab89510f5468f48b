# SPDX-License-Identifier: BSD-3-Clause
"""Run the tests and count them: ``python -m tests [--pure] [MODULE ...]``.

By default every test module runs, those under ``tests.interop`` aside; ``python -m unittest discover -t . -s
tests`` runs the same. ``--pure`` runs what can run where torch is not installed, and names what it leaves out.
The counts end the output and, if FTLITE_TEST_COUNTS names a file, are added to it as one line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import unittest
from pathlib import Path


class CountingResult(unittest.TextTestResult):
    """Counts what passed, which unittest does not."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed += 1

    def addExpectedFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addExpectedFailure(test, err)
        self.passed += 1

    def counts(self) -> tuple[int, int, int]:
        failed = len(self.failures) + len(self.errors) + len(self.unexpectedSuccesses)
        return self.passed, failed, len(self.skipped)


def module_names() -> list[str]:
    """Every test module, found by its file, so that nothing has to be imported for it."""
    folder = Path(__file__).parent
    files = sorted(path.relative_to(folder.parent) for path in folder.rglob("test_*.py"))
    return [".".join(file.with_suffix("").parts) for file in files if file.parts[1] != "interop"]


def needs_torch(name: str) -> bool:
    """Whether a module cannot be imported for want of torch."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return (error.name or "").partition(".")[0] == "torch"
    except Exception:
        return False  # unittest's loader will report it
    return False


class LeftOut(unittest.TestCase):
    """The place of a module that raised SkipTest when it was imported."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__("runTest")
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return self.name

    def runTest(self) -> None:
        self.skipTest(self.reason)


def load_all(names: list[str]) -> unittest.TestSuite:
    """The tests of the modules ``names``."""
    found = unittest.TestSuite()
    for name in names:
        try:
            found.addTest(unittest.defaultTestLoader.loadTestsFromName(name))
        except unittest.SkipTest as reason:
            found.addTest(LeftOut(name, str(reason)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description="Run the tests and count them.")
    parser.add_argument("--pure", action="store_true", help="run without torch what needs none")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every test")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="tests.test_errors, ... (default: all)")
    arguments = parser.parse_args()
    names = arguments.modules or module_names()
    if arguments.pure:
        if importlib.util.find_spec("torch") is not None:
            parser.error("torch is installed here, so --pure would prove nothing")
        left_out = [name for name in names if needs_torch(name)]
        names = [name for name in names if name not in left_out]
        print("left out, for they need torch:", ", ".join(left_out) or "none", file=sys.stderr)
    runner = unittest.TextTestRunner(
        resultclass=CountingResult,
        verbosity=2 if arguments.verbose else 1,
        warnings=None if sys.warnoptions else "default",
    )
    result = runner.run(load_all(names))
    passed, failed, skipped = result.counts()
    for test, reason in result.skipped:
        print(f"skipped: {test}: {reason}", file=sys.stderr)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", file=sys.stderr)
    if counts_file := os.environ.get("FTLITE_TEST_COUNTS"):
        with open(counts_file, "a", encoding="utf-8") as file:
            file.write(f"{passed} {failed} {skipped}\n")
    # no test at all is no success
    return 0 if result.wasSuccessful() and passed else 1


if __name__ == "__main__":
    sys.exit(main())
