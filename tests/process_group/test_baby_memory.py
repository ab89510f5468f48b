# SPDX-License-Identifier: BSD-3-Clause
"""The memory that a trainer shares with its children: few descriptors, no /dev/shm, and given back."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import load, not_in_a_copy
from tests._support import LONG_S, SCALE, WAIT_S, child_env, descriptors, requires_root, wait_until
from tests.process_group._baby_tools import BabyCase, child_of, errors

not_in_a_copy()

arena = load("process_group._arena")


def open_files(pid: int) -> list[str]:
    """What the descriptors of ``pid`` stand for."""
    found = []
    for entry in Path("/proc", str(pid), "fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return sorted(found)


def segments(pid: int) -> int:
    """How many segments ``pid`` has mapped."""
    return Path("/proc", str(pid), "maps").read_text().count("memfd:process-group")


class FewDescriptors(BabyCase):
    def steady(self, body: Any) -> None:
        """``body(group, rank)`` on two ranks, with 128 descriptors for each process and no more than 5 new ones."""
        old = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self.team(2) as team:
            self.works(team)
            pids = [os.getpid(), *(child_of(group) for group in team.groups)]
            before = [len(open_files(pid)) for pid in pids]
            self.assertLess(max(before), 100)
            try:
                for pid in pids:
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (128, old[1]))
                team.run(body)
                after = [len(open_files(pid)) for pid in pids]
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, old)
            for few, many in zip(before, after):
                self.assertLess(abs(many - few), 6, f"{before} before, {after} after")

    def test_five_thousand_live_tensors(self) -> None:
        def body(group: Any, rank: int) -> None:
            tensors = [torch.full((10 + index % 7,), float(rank + index)) for index in range(5000)]
            works = [group.allreduce([tensor]) for tensor in tensors]
            for work in works:
                work.wait()
            for index, tensor in enumerate(tensors):
                self.assertEqual(tensor.unique().tolist(), [2.0 * index + 1])

        self.steady(body)

    def test_five_thousand_tensors_in_one_op(self) -> None:
        def body(group: Any, rank: int) -> None:
            tensors = [torch.full((3,), float(rank + index)) for index in range(5000)]
            group.allreduce_coalesced(tensors).wait()
            for index, tensor in enumerate(tensors):
                self.assertEqual(tensor.tolist(), [2.0 * index + 1] * 3)

        self.steady(body)

    def test_ten_thousand_fresh_tensors(self) -> None:
        def body(group: Any, rank: int) -> None:
            for first in range(0, 10_000, 50):  # fifty at a time, as a step of a model has them
                tensors = [torch.full((16,), float(rank + index)) for index in range(first, first + 50)]
                for work in [group.allreduce([tensor]) for tensor in tensors]:
                    work.wait()
                self.assertEqual(
                    [tensor.unique().tolist() for tensor in tensors[::49]], [[2.0 * first + 1], [2.0 * first + 99]]
                )

        self.steady(body)

    def test_tensors_that_are_shared_already(self) -> None:
        """torch moves a tensor into shared memory by a descriptor each."""

        def body(group: Any, rank: int) -> None:
            for index in range(300):
                tensor = torch.full((20_000,), float(rank + index)).share_memory_()
                group.allreduce([tensor]).wait()
                self.assertEqual(tensor.unique().tolist(), [2.0 * index + 1])

        self.steady(body)

    def test_many_live_tensors_that_are_shared_already(self) -> None:
        """The child has a descriptor for each, and leaves some for the backend: the rest is copied."""
        old = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, old[1]))
        try:
            with self.team(1) as team:
                group = team.groups[0]
                self.works(team)
                before = len(open_files(child_of(group)))
                tensors = [torch.full((20_000,), float(index)).share_memory_() for index in range(60)]
                for _ in range(2):
                    for work in [group.allreduce([tensor]) for tensor in tensors]:
                        work.wait()
                self.assertEqual([tensor.unique().tolist() for tensor in tensors], [[float(i)] for i in range(60)])
                self.assertEqual(len(open_files(child_of(group))), before + 160 // 8)
                del tensors, work
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, old)


class GivenBack(BabyCase):
    def setUp(self) -> None:
        super().setUp()
        # 10 s are long for a test
        patch = mock.patch.object(arena, "IDLE_S", 0.2)
        patch.start()
        self.addCleanup(patch.stop)

    def large(self, group: Any) -> None:
        """An op that needs a segment of its own."""
        group.allreduce([torch.ones(arena.SEGMENT_BYTES // 4 + 1)]).wait()

    def mapped(self, group: Any) -> tuple[int, int]:
        return segments(os.getpid()), segments(child_of(group))

    def test_while_nothing_goes_on(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            self.works(team)
            self.large(group)
            self.assertEqual(self.mapped(group), (2, 2))
            # no op comes, and yet the child drops its mapping, without which the machine has nothing of it
            wait_until(lambda: self.mapped(group) == (0, 0), "both are given back")
            self.works(team)
            self.large(group)

    def test_while_one_op_follows_the_other(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            self.large(group)

            def is_back() -> bool:
                group.allreduce([torch.ones(4)]).wait()
                return self.mapped(group) == (1, 1)

            wait_until(is_back, "the large one is given back")

    def test_at_shutdown(self) -> None:
        with self.team(2) as team:
            for _ in range(3):
                team.run(lambda group, rank: self.large(group))
                gc.disable()  # nothing may wait for a collection
                try:
                    for group in team.groups:
                        group.shutdown()
                    wait_until(lambda: segments(os.getpid()) == 0, "no segment is mapped", SCALE)
                    self.assertFalse([text for text in descriptors().values() if "memfd:process-group" in text])
                finally:
                    gc.enable()
                self.heals(team)

    def test_what_the_user_keeps_at_shutdown(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            mine = group.empty([1000]).fill_(2.0)
            work = group.allreduce([mine])
            work.wait()
            with self.assertRaises(errors.UnsupportedOp) as refused:
                group.allreduce([torch.eye(2).to_sparse()])
            group.shutdown()
            mine.add_(1.0)  # still there
            self.heals(team)
            group.allreduce([mine]).wait()
            self.assertEqual(mine.unique().tolist(), [3.0])
            another = group.empty([10]).fill_(1.0)
            group.allreduce([another]).wait()
            del mine, another, work, refused
            group.shutdown()
            wait_until(lambda: segments(os.getpid()) == 0, "no segment is mapped")

    def test_shutdown_while_others_issue(self) -> None:
        """The memory is in the middle of being copied to: it must not be unmapped."""
        with self.team(1) as team:
            group = team.groups[0]
            for round_ in range(10):
                stop = threading.Event()
                unexpected: list[BaseException] = []

                def issue(stop: threading.Event = stop, unexpected: list[BaseException] = unexpected) -> None:
                    tensor = torch.ones(4 << 20)
                    while not stop.is_set():
                        try:
                            group.allreduce([tensor])
                        except errors.StateError:
                            continue
                        except BaseException as error:
                            unexpected.append(error)
                            return

                threads = [threading.Thread(target=issue) for _ in range(3)]
                for thread in threads:
                    thread.start()
                time.sleep(0.01 + 0.003 * round_)
                group.shutdown()
                team.configure()
                stop.set()
                for thread in threads:
                    thread.join()
                self.assertEqual(unexpected, [])
                self.heals(team)

    def test_a_storage_that_is_freed_meanwhile(self) -> None:
        freed = [threading.Event() for _ in range(3)]  # the other rank joins only then

        def body(group: Any, rank: int) -> None:
            tensors = (torch.ones(100_000), torch.ones(300, 300).t(), torch.ones(300, 300)[::2])
            for tensor, is_freed in zip(tensors, freed):
                if rank == 0:
                    work = group.allreduce([tensor])
                    tensor.untyped_storage().resize_(0)
                    is_freed.set()
                    with self.assertRaisesRegex(errors.StateError, "resized"):
                        work.wait()
                    with self.assertRaises(errors.StateError):
                        group.allreduce([tensor])
                else:
                    self.assertTrue(is_freed.wait(WAIT_S))
                    group.allreduce([tensor]).wait()
                    self.assertEqual(tensor.unique().tolist(), [2.0])
                # nobody else is harmed
                other = torch.ones(3)
                group.allreduce([other]).wait()
                self.assertEqual(other.tolist(), [2.0] * 3)

        with self.team(2) as team:
            team.run(body)
            self.assertEqual([group.num_active_work() for group in team.groups], [0, 0])
            self.assertEqual([group._held.arena.out_bytes() for group in team.groups], [0, 0])


# The shell mounts a /dev/shm of 1 MB of its own and runs the rest in it.
SMALL = """
import os, signal, subprocess, sys, time
import torch
from torch.distributed import TCPStore
from tests.process_group._baby_tools import ProcessGroupBabyGloo
if sys.argv[1:] != ["inside"]:
    left = lambda: sorted(os.listdir("/dev/shm"))
    trainer = subprocess.Popen([sys.executable, __file__, "inside"], stdout=subprocess.PIPE, text=True)
    said = trainer.stdout.readline()
    size = os.statvfs("/dev/shm")
    print(said.strip(), size.f_blocks * size.f_frsize, left())
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.communicate()
    end_s = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.01)
    print(left())
    sys.exit()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupBabyGloo(timeout=60)
group.configure(f"127.0.0.1:{store.port}/x", "alone", 0, 1)
tensors = [torch.full((1 << 20,), 1.0), torch.full((2000, 2000), 1.0).t()[5:], group.empty([1 << 20]).fill_(1.0)]
for tensor in tensors:
    group.allreduce([tensor]).wait()
print("works" if all(bool((tensor == 1).all()) for tensor in tensors) else "differs", flush=True)
work = [group.allreduce([tensor]) for tensor in tensors]
print(group.child_pid(), group._held.template.pid(), flush=True)
time.sleep(600)
"""


class SmallSharedMemory(BabyCase):
    @requires_root
    def test_of_one_megabyte(self) -> None:
        unshare = shutil.which("unshare")
        mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
        if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode:
            self.skipTest("needs unshare -m and mount")
        script = Path(self.stderr.parent, "train.py")
        script.write_text(SMALL)
        done = subprocess.run(
            [unshare, "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, str(script)],
            env=child_env(),
            timeout=LONG_S / 2,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual((done.stderr, done.returncode), ("", 0))
        self.assertEqual(done.stdout, "works 1048576 []\n[]\n")


if __name__ == "__main__":
    unittest.main()
