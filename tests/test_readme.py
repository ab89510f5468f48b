# SPDX-License-Identifier: BSD-3-Clause
"""The README's program runs as it stands there, the port aside."""

from __future__ import annotations

import re
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401 - the program needs it, so what runs without torch leaves this module out

from tests import PACKAGE
from tests._support import LONG_S, GuardedTestCase, free_port, run_python

README = Path(__file__).parents[1] / "README.md"


@unittest.skipUnless(README.is_file(), "the README is not here")
class ReadmeTest(GuardedTestCase):
    limit_s = LONG_S

    def program(self, mark: str) -> str:
        """The one block of code that has ``mark`` in it, for the package under test."""
        blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
        (found,) = [block for block in blocks if mark in block]
        return str(found).replace("from ftlite import", f"from {PACKAGE} import")

    def test_a_child_that_is_killed(self) -> None:
        program = self.program("os.kill(pg.child_pid()").replace("29500", str(free_port()))
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(run_python, "-c", program, rank, limit_s=LONG_S / 2) for rank in "01"]
            done = [rank.result() for rank in ranks]
        for rank, one in enumerate(done):
            self.assertEqual((one.returncode, one.stderr), (0, ""), one.stdout)
            first, middle, *_, last = one.stdout.splitlines()
            self.assertEqual(first, f"{rank} before: [3.0, 3.0, 3.0]")
            self.assertRegex(middle, rf"^{rank} (ChildDied|RemoteFailure) ")
            self.assertEqual(last, f"{rank} after: [3.0, 3.0, 3.0]")
        self.assertIn("SIGKILL", done[1].stdout)


if __name__ == "__main__":
    unittest.main()
