# SPDX-License-Identifier: BSD-3-Clause
"""The leak guard, the watchdog and their helpers: a guard that cannot fail guards nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import unittest
from unittest import mock

from tests import PACKAGE
from tests._support import GuardedTestCase, Holdings, captured_logs, free_port, leaks_since, run_python, wait_until


class Leaks(unittest.TestCase):
    def setUp(self) -> None:
        self.before = Holdings.now()

    def assertLeak(self, wanted: str) -> None:
        left = leaks_since(self.before, limit_s=0)
        self.assertEqual(len(left), 1, left)
        self.assertIn(wanted, left[0])

    def assertClean(self) -> None:
        self.assertEqual(leaks_since(self.before), [])

    def test_nothing(self) -> None:
        self.assertClean()

    def test_thread(self) -> None:
        done = threading.Event()
        thread = threading.Thread(target=done.wait, name="forgotten")
        thread.start()
        self.assertLeak("thread forgotten")
        done.set()
        self.assertClean()  # which waits for the thread to end

    def test_child(self) -> None:
        child = subprocess.Popen(["sleep", "60"])
        self.assertLeak(f"child {child.pid}: ")
        child.kill()
        wait_until(lambda: "state Z" in leaks_since(self.before, limit_s=0)[0], "the killed child is a zombie")
        child.wait()
        self.assertClean()

    def test_descriptor(self) -> None:
        reader, writer = os.pipe()
        os.close(writer)
        self.assertLeak(f"descriptor {reader}: pipe:")
        os.close(reader)
        self.assertClean()

    def test_descriptor_that_a_driver_keeps(self) -> None:
        number = os.open("/dev/null", os.O_RDONLY)
        self.addCleanup(os.close, number)
        self.assertEqual(leaks_since(self.before, limit_s=0, ignored=("/dev/nu",)), [])


class Guard(unittest.TestCase):
    def test_fails_a_test_that_leaks_and_names_it(self) -> None:
        class Leaky(GuardedTestCase):
            def test(self) -> None:
                self.numbers = os.pipe()

        with mock.patch("tests._support.GRACE_S", 0):
            test = Leaky("test")
            result = test.run()
        for number in test.numbers:
            os.close(number)
        self.assertEqual(len(result.failures), 1)
        self.assertIn(f"descriptor {test.numbers[0]}: pipe:", result.failures[0][1])

    def test_looks_after_every_other_cleanup(self) -> None:
        class Tidy(GuardedTestCase):
            def test(self) -> None:
                for number in os.pipe():
                    self.addCleanup(os.close, number)

        result = Tidy("test").run()
        self.assertTrue(result.wasSuccessful(), result.failures)

    def test_watchdog_dumps_the_stacks_and_ends(self) -> None:
        code = (
            "import threading, unittest\n"
            "from tests._support import GuardedTestCase\n"
            "class Hangs(GuardedTestCase):\n"
            "    limit_s = 0.2\n"
            "    def test_hangs_here(self):\n"
            "        threading.Event().wait()\n"
            "unittest.main()\n"
        )
        done = run_python("-c", code)
        self.assertEqual(done.returncode, 1)
        self.assertIn("Timeout", done.stderr)
        self.assertIn("in test_hangs_here", done.stderr)


class Helpers(unittest.TestCase):
    def test_wait_until_returns_the_value(self) -> None:
        values = iter([None, 0, "there"])
        self.assertEqual(wait_until(lambda: next(values), "the third value"), "there")

    def test_wait_until_gives_up_and_says_on_what(self) -> None:
        with self.assertRaisesRegex(AssertionError, "within 0 s: the sky falls"):
            wait_until(lambda: False, "the sky falls", limit_s=0)

    def test_free_port_can_be_bound(self) -> None:
        self.assertGreater(free_port(), 1023)

    def test_run_python_finds_package_and_tests_from_anywhere(self) -> None:
        done = run_python("-c", "from tests import load; print(load().__name__)", cwd="/", check=True)
        self.assertEqual(done.stdout, f"{PACKAGE}\n")

    def test_run_python_shows_what_a_failed_child_said(self) -> None:
        with self.assertRaisesRegex(AssertionError, "ended with 3\n.*\n*last words"):
            run_python("-c", "import sys; print('last words', file=sys.stderr); sys.exit(3)", check=True)

    def test_captured_logs(self) -> None:
        logger = logging.getLogger(f"{PACKAGE}.somewhere")
        with captured_logs() as records:
            logger.debug("heard %d", 1)
        logger.debug("not heard")
        self.assertEqual([record.getMessage() for record in records], ["heard 1"])


if __name__ == "__main__":
    unittest.main()
