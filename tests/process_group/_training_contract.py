# SPDX-License-Identifier: BSD-3-Clause
"""Training over a process group, as a mixin of tests; each runs real processes of ``_training_child``.

A subclass names the group class in the package's door (``group_name``) and may give the name under which
``register_backend`` takes it (``backend_name``).
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from torch.distributed import TCPStore

from tests._support import LONG_S, SCALE, child_env

# Processes that import torch at the same time on a machine with two cores, and train for a moment.
_CHILD_S = 120 * SCALE


class TrainingContract:
    """Mix into a ``GuardedTestCase``."""

    limit_s = LONG_S
    group_name = ""
    backend_name = "ftlite-baby-gloo"

    @classmethod
    def setUpClass(cls) -> None:
        """The first TCPStore of a process opens a pipe that stays."""
        super().setUpClass()  # type: ignore[misc]
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run_processes(self: Any, command: str, size: int = 2) -> list[str]:
        """Run ``command`` of the child on ``size`` ranks and return what each printed; its stderr has to be empty."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = [self.group_name, self.backend_name, str(store.port)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.process_group._training_child", command, *common, str(rank), str(size)],
                env=child_env(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=_CHILD_S) for process in running]
        except BaseException:
            for process in running:
                process.kill()
                process.communicate()
            raise
        for rank, (process, (out, err)) in enumerate(zip(running, outputs)):
            self.assertEqual((process.returncode, err), (0, ""), f"rank {rank} of {command}:\n{out}\n{err}")
        return [out.strip() for out, _ in outputs]

    def test_data_parallel(self: Any) -> None:
        first, second = self.run_processes("data_parallel")
        self.assertEqual(first, second)

    def test_data_parallel_of_a_changing_size(self: Any) -> None:
        first, second, third = self.run_processes("changing_size", 3)
        self.assertEqual(first, second)
        self.assertEqual(first, third)

    def test_data_parallel_with_a_comm_hook(self: Any) -> None:
        first, second = self.run_processes("comm_hook")
        self.assertEqual(first, second)

    def test_a_failure_in_backward_is_an_error(self: Any) -> None:
        self.run_processes("failure_in_backward")

    def test_functional_collectives(self: Any) -> None:
        self.run_processes("functional")

    def test_device_mesh(self: Any) -> None:
        self.run_processes("device_mesh")

    def test_as_a_backend_of_torch(self: Any) -> None:
        self.run_processes("backend")

    def test_new_group(self: Any) -> None:
        self.run_processes("new_group", 3)

    def test_exit_without_shutdown(self: Any) -> None:
        self.run_processes("exit_at_once")
