# SPDX-License-Identifier: BSD-3-Clause
"""Training over a process group, as a mixin of tests; they look at what real processes of ``_training_child`` tell.

The ranks run all commands one after the other, since most of the time goes into starting them. A subclass names the
group class in the package's door (``group_name``) and may give the name under which ``register_backend`` takes it
(``backend_name``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed import TCPStore

from tests._support import LONG_S, SCALE, child_env

_CHILD = "tests.process_group._training_child"
# Processes that import torch at the same time on a machine with two cores, and train for a moment.
_CHILD_S = 120 * SCALE
# Each command and how many ranks it takes; the last leaves without a shutdown.
_COMMANDS = {
    "data_parallel": 2,
    "changing_size": 3,
    "comm_hook": 2,
    "failure_in_backward": 2,
    "functional": 2,
    "compiled": 2,
    "device_mesh": 2,
    "backend": 2,
    "new_group": 3,
    "exit_at_once": 2,
}


@dataclass
class Ended:
    """A rank that has ended: what it told of each command, its exit code and its stderr."""

    told: dict[str, dict[str, str]]
    code: int
    err: str


def run_processes(group_name: str, backend_name: str) -> list[Ended]:
    """Run all commands on as many processes as they need, to the end of these."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in _COMMANDS]
    commands = [f"{command}:{size}:{store.port}" for (command, size), store in zip(_COMMANDS.items(), stores)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", _CHILD, group_name, backend_name, str(rank), *commands],
            env=child_env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(max(_COMMANDS.values()))
    ]
    ended = []
    for process in running:
        try:
            out, err = process.communicate(timeout=_CHILD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\nkilled after {_CHILD_S:g} s"
        except BaseException:
            for other in running:
                other.kill()
                other.communicate()
            raise
        told = {line["command"]: line for line in map(json.loads, out.splitlines())}
        ended.append(Ended(told, process.returncode, err))
    return ended


class TrainingContract:
    """Mix into a ``GuardedTestCase``."""

    limit_s = 2 * LONG_S
    group_name = ""
    backend_name = "ftlite-baby-gloo"
    ranks: ClassVar[list[Ended]]

    @classmethod
    def setUpClass(cls) -> None:
        """The first TCPStore of a process opens a pipe that stays."""
        super().setUpClass()  # type: ignore[misc]
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        cls.ranks = []

    def setUp(self: Any) -> None:
        """The first test runs them, under its guard."""
        super().setUp()  # type: ignore[misc]
        if not self.ranks:
            type(self).ranks = run_processes(self.group_name, self.backend_name)

    def said(self: Any, command: str) -> list[str]:
        """What ``command`` returned on each of its ranks; it raised nowhere."""
        for rank, ended in enumerate(self.ranks[: _COMMANDS[command]]):
            if command not in ended.told:
                self.fail(f"rank {rank} ended with {ended.code} before the end of {command}:\n{ended.err}")
            if "error" in ended.told[command]:
                self.fail(f"rank {rank} of {command}:\n{ended.told[command]['error']}\n{ended.err}")
        return [ended.told[command]["said"] for ended in self.ranks[: _COMMANDS[command]]]

    def test_data_parallel(self: Any) -> None:
        first, second = self.said("data_parallel")
        self.assertTrue(first)
        self.assertEqual(first, second)

    def test_data_parallel_of_a_changing_size(self: Any) -> None:
        first, second, third = self.said("changing_size")
        self.assertTrue(first)
        self.assertEqual(first, second)
        self.assertEqual(first, third)

    def test_data_parallel_with_a_comm_hook(self: Any) -> None:
        first, second = self.said("comm_hook")
        self.assertTrue(first)
        self.assertEqual(first, second)

    def test_a_failure_in_backward_is_an_error(self: Any) -> None:
        self.said("failure_in_backward")

    def test_functional_collectives(self: Any) -> None:
        self.said("functional")

    def test_a_compiled_function_with_a_functional_collective(self: Any) -> None:
        self.said("compiled")

    def test_device_mesh(self: Any) -> None:
        self.said("device_mesh")

    def test_as_a_backend_of_torch(self: Any) -> None:
        self.said("backend")

    def test_new_group(self: Any) -> None:
        self.said("new_group")

    def test_exit_without_shutdown(self: Any) -> None:
        """Also: none of the commands has printed anything."""
        self.said("exit_at_once")
        for rank, ended in enumerate(self.ranks):
            self.assertEqual((ended.code, ended.err), (0, ""), f"rank {rank}")
