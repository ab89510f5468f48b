# SPDX-License-Identifier: BSD-3-Clause
"""Running test modules and counting what they did: one after the other here, or in several processes.

A module is run whole by one process. A process that dies fails whatever it and the others had still to do. The few
that hold the product to a time of milliseconds come when the others are done, one at a time.
"""

from __future__ import annotations

import io
import multiprocessing
import sys
import time
import unittest
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import chain
from typing import TextIO

__all__ = ["Counts", "run", "run_apart"]

ALONE = frozenset({"tests.process_group.test_baby_fast"})


@dataclass
class Counts:
    """What came of some tests; ``skips`` has a line for each that was skipped."""

    passed: int = 0
    failed: int = 0
    skips: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skips += other.skips

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {len(self.skips)} skipped"


class CountingResult(unittest.TextTestResult):
    """Counts what passed, which unittest does not."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed += 1

    def addExpectedFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addExpectedFailure(test, err)
        self.passed += 1

    def counts(self) -> Counts:
        failed = len(self.failures) + len(self.errors) + len(self.unexpectedSuccesses)
        return Counts(self.passed, failed, [f"{test}: {reason}" for test, reason in self.skipped])


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


def run(names: list[str], verbosity: int, stream: TextIO | None = None) -> Counts:
    """Run the modules ``names`` here; what unittest prints goes to ``stream`` (None: stderr)."""
    runner = unittest.TextTestRunner(
        stream, resultclass=CountingResult, verbosity=verbosity, warnings=None if sys.warnoptions else "default"
    )
    result = runner.run(load_all(names))
    assert isinstance(result, CountingResult)
    return result.counts()


def run_apart(names: list[str], verbosity: int, jobs: int) -> Counts:
    """Run the modules ``names`` in ``jobs`` processes; the output of each when it is done, a line if all passed."""
    total = Counts()
    alone = [name for name in names if name in ALONE]
    together = [name for name in names if name not in ALONE]
    for name, seconds, counts, text in chain(_outcomes(together, verbosity, jobs), _outcomes(alone, verbosity, 1)):
        total.add(counts)
        if counts.failed or verbosity > 1:
            print(text, file=sys.stderr)
        print(f"{name}: {counts} in {seconds:.1f} s", file=sys.stderr, flush=True)
    return total


def _outcomes(names: list[str], verbosity: int, jobs: int) -> Iterator[tuple[str, float, Counts, str]]:
    # spawn: a fork would share what this process has open
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        modules = {pool.submit(_run_one, name, verbosity): name for name in names}
        for future in as_completed(modules):
            try:
                yield modules[future], *future.result()
            except Exception as error:  # its process has died, which is a failure of all that was left to it
                yield modules[future], 0.0, Counts(failed=1), f"{type(error).__name__}: {error}"


def _run_one(name: str, verbosity: int) -> tuple[float, Counts, str]:
    stream = io.StringIO()
    start_s = time.monotonic()
    counts = run([name], verbosity, stream)
    return time.monotonic() - start_s, counts, stream.getvalue()
