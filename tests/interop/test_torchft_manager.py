# SPDX-License-Identifier: BSD-3-Clause
"""torchft's own Manager and lighthouse train on our groups and heal over our transport, while replicas are killed."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any

from tests._support import LONG_S, GuardedTestCase

if importlib.util.find_spec("torchft") is None:
    raise unittest.SkipTest("needs torchft")

from torchft.coordination import LighthouseServer

# Of training together after the newcomer's first.
MORE = 5
ROOT = Path(__file__).parents[2]


class Replica:
    """One process, and the lines that it has printed."""

    def __init__(self, lighthouse: str, name: str, kind: str) -> None:
        self.name = name
        self.committed: dict[int, dict[str, Any]] = {}
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interop._manager_replica", lighthouse, name, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.errors: list[str] = []
        self.threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def _read_errors(self) -> None:
        self.errors.extend(self.process.stderr or ())

    def until(self, step: int) -> dict[str, Any]:
        """Wait for the first commit of ``step`` or a later one."""
        while True:
            try:
                line = self.lines.get(timeout=LONG_S / 3)
            except queue.Empty:
                line = None
            if line is None:
                what = "says no more" if self.process.poll() is None else "ended"
                text = "".join(self.errors)
                raise AssertionError(f"{self.name} {what} after {sorted(self.committed)}, {step} awaited:\n{text}")
            self.committed[line["step"]] = line
            if line["step"] >= step:
                return line

    def end(self) -> None:
        """Have it end, or kill it."""
        process = self.process
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        for thread in self.threads:
            thread.join(10)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


class ManagerTest(GuardedTestCase):
    limit_s = LONG_S
    # the lighthouse's own threads and sockets stay for the life of the process
    lighthouse: Any

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
        )
        cls.addClassCleanup(cls.lighthouse.shutdown)

    def start(self, name: str, kind: str) -> Replica:
        made = Replica(self.lighthouse.address(), name, kind)
        self.addCleanup(made.end)
        return made

    def train(self, kind: str) -> None:
        replicas = [self.start(f"replica_{i}", kind) for i in range(3)]
        for replica in replicas:
            replica.until(2)
        victim = replicas.pop()
        victim.process.send_signal(signal.SIGKILL)
        done = max(replica.until(3)["step"] for replica in replicas)
        child = replicas[0].committed[max(replicas[0].committed)]["pid_of_child"]
        if child is not None:  # a backend that dies costs a step and not the replica
            os.kill(child, signal.SIGKILL)
        replicas.append(self.start("replica_2", kind))
        first = replicas[-1].until(1)["step"]
        self.assertGreater(first, done, "the newcomer has not healed")
        last = [replica.until(first + MORE)["peers"] for replica in replicas]
        self.assertEqual(last, [3, 3, 3])
        common = set.intersection(*(set(replica.committed) for replica in replicas))
        self.assertTrue(common >= set(range(first, first + MORE)), common)
        for step in common:
            self.assertEqual(len({replica.committed[step]["digest"] for replica in replicas}), 1, f"step {step}")

    def test_groups_in_a_child(self) -> None:
        self.train("ProcessGroupBabyGloo")

    def test_groups_in_the_process(self) -> None:
        self.train("ProcessGroupGloo")


if __name__ == "__main__":
    unittest.main()
