# SPDX-License-Identifier: BSD-3-Clause
"""NCCL in a child and in this process, and device tensors through Gloo; where there is a CUDA device, world size 1.

Without one: that it is refused in words.
"""

from __future__ import annotations

import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import load
from tests._support import LONG_S, SCALE, GuardedTestCase, wait_until
from tests.process_group._ranks import Team

errors = load("_errors")
door = load("process_group")

HAS_CUDA = torch.cuda.is_available()
HAS_NCCL = HAS_CUDA and dist.is_nccl_available()
TIMEOUT_S = 30 * SCALE


class Case(GuardedTestCase):
    limit_s = LONG_S

    @classmethod
    def setUpClass(cls) -> None:
        """What is opened once per process and kept is no leak of the first test."""
        super().setUpClass()
        team = Team(lambda timeout: door.ProcessGroupBabyGloo(timeout=timeout), 1)
        team.close()

    def group(self, make: Any, timeout_s: float = TIMEOUT_S) -> Any:
        team = Team(lambda timeout: make(timeout=timeout), 1, timeout_s=timeout_s)
        self.addCleanup(team.close)
        return team.groups[0]

    def configure(self, group: Any) -> None:
        """Make it a group of one, at a store of its own."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group.configure(f"127.0.0.1:{store.port}/x", "replica0", 0, 1)


@unittest.skipIf(HAS_NCCL, "there is NCCL here")
class WithoutNccl(Case):
    def test_the_child_is_refused(self) -> None:
        group = door.ProcessGroupBabyNCCL(timeout=timedelta(seconds=TIMEOUT_S))
        self.addCleanup(group.shutdown)
        with self.assertRaises(errors.RemoteFailure) as caught:
            self.configure(group)
        self.assertIn("no NCCL or no CUDA device", str(caught.exception))

    def test_the_group_in_this_process_is_refused(self) -> None:
        group = door.ProcessGroupNCCL(timeout=timedelta(seconds=TIMEOUT_S))
        with self.assertRaises(errors.UnsupportedOp):
            self.configure(group)


@unittest.skipUnless(HAS_NCCL, "needs NCCL and a CUDA device")
class InChild(Case):
    def test_allreduce_is_in_the_order_of_the_stream(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        tensor = torch.ones(1 << 20, device="cuda")
        for _ in range(20):
            tensor += 1
            group.allreduce([tensor]).wait()
            tensor *= 2
        wanted = 1.0
        for _ in range(20):
            wanted = (wanted + 1) * 2
        self.assertEqual(tensor[::4096].tolist(), [wanted] * 256)

    def test_streams_of_ones_own(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        tensor = torch.ones(1 << 20, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            tensor += 1
            work = group.allreduce([tensor])
        work.wait()
        self.assertEqual(tensor.sum().item(), 2 * tensor.numel())

    def test_wait_does_not_wait_for_the_device(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        tensor = torch.ones(4, device="cuda")
        group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        work = group.allreduce([tensor])
        work.wait()
        self.assertFalse(work.is_completed())
        torch.cuda.synchronize()
        self.assertTrue(work.is_completed())

    def test_a_future_and_its_callback(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        tensor = torch.ones(1 << 20, device="cuda")
        torch.cuda._sleep(100_000_000)
        tensor += 1
        doubled = group.allreduce([tensor]).get_future().then(lambda future: future.value()[0] * 2)
        self.assertEqual(doubled.wait().sum().item(), 4 * tensor.numel())

    def test_every_kind_of_view(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        for cut in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 2:5], lambda t: t[:, :0]):
            whole = torch.arange(48.0, device="cuda").reshape(6, 8)
            wanted = whole.clone()
            view = cut(whole)
            group.broadcast(view, 0).wait()
            self.assertEqual(whole.tolist(), wanted.tolist())

    def test_the_collectives_of_one_rank(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        one, other = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
        group.allgather([[other]], [one]).wait()
        self.assertEqual(other.tolist(), one.tolist())
        other.zero_()
        group.alltoall_base(other, one, [], []).wait()
        self.assertEqual(other.tolist(), one.tolist())
        self.assertTrue(group.barrier().wait())

    def test_memory_comes_back(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        keep = torch.ones(4, device="cuda")
        group.allreduce([keep]).wait()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            group.allreduce([torch.ones(1 << 20, device="cuda")]).wait()
            torch.cuda.synchronize()

        def is_back() -> bool:
            group.allreduce([keep]).wait()
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
            return bool(torch.cuda.memory_allocated() <= before)

        wait_until(is_back, "the memory of 50 tensors is torch's again")

    def test_memory_comes_back_after_a_kill(self) -> None:
        before = torch.cuda.memory_allocated()
        group = self.group(door.ProcessGroupBabyNCCL)
        for _ in range(3):
            tensor = torch.ones(1 << 20, device="cuda")
            group.allreduce([tensor]).wait()
            torch.cuda.synchronize()
            group.abort("the test says so")
            del tensor
            self.configure(group)

        def is_back() -> bool:
            torch.cuda.ipc_collect()
            return bool(torch.cuda.memory_allocated() <= before)

        wait_until(is_back, "the memory is torch's again")

    def test_cpu_tensors_are_refused(self) -> None:
        group = self.group(door.ProcessGroupBabyNCCL)
        with self.assertRaises(errors.UnsupportedOp):
            group.allreduce([torch.ones(1)]).wait()


@unittest.skipUnless(HAS_NCCL, "needs NCCL and a CUDA device")
class InProcess(Case):
    def test_allreduce_and_again(self) -> None:
        group = self.group(door.ProcessGroupNCCL)
        tensor = torch.ones(1 << 20, device="cuda")
        for _ in range(2):
            group.allreduce([tensor]).wait()
            self.assertEqual(tensor.sum().item(), tensor.numel())
            self.configure(group)
        self.assertIsNone(group.errored())


@unittest.skipUnless(HAS_CUDA, "needs a CUDA device")
class ThroughGloo(Case):
    def test_allreduce(self) -> None:
        group = self.group(door.ProcessGroupBabyGloo)
        tensor = torch.ones(1 << 20, device="cuda")
        tensor += 1
        try:
            group.allreduce([tensor]).wait()
        except errors.UnsupportedOp:
            self.skipTest("this torch's Gloo takes none")
        tensor *= 2
        self.assertEqual(tensor.sum().item(), 4 * tensor.numel())

    def test_send_is_refused_and_harms_nobody(self) -> None:
        group = self.group(door.ProcessGroupBabyGloo)
        with self.assertRaisesRegex(errors.UnsupportedOp, "on the CPU only"):
            group.send([torch.ones(1, device="cuda")], 0, 0).wait()
        self.assertTrue(group.allreduce([torch.ones(1)]).wait())


if __name__ == "__main__":
    unittest.main()
