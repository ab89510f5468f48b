# SPDX-License-Identifier: BSD-3-Clause
"""What stays when a group is configured anew, killed, collected, or fails: nothing. No test waits for a collection."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import unittest
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests import not_in_a_copy
from tests._support import SCALE, Holdings, children, wait_until
from tests.process_group._baby_tools import BabyCase, ProcessGroupBabyGloo, Waiter, child_of, errors, gone

not_in_a_copy()

ROUNDS = 100
# What the memory of a process may grow by in that many rounds: the allocator's own to and fro.
GROWTH_BYTES = 4 << 20


def private_bytes(pid: int) -> int:
    """The memory that ``pid`` shares with nobody."""
    rollup = Path("/proc", str(pid), "smaps_rollup")
    try:
        lines = rollup.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) << 10
    except OSError:  # a kernel without it
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Uncollected(BabyCase):
    """The garbage collector is off."""

    def setUp(self) -> None:
        super().setUp()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def dies(self, *references: weakref.ref[Any]) -> None:
        for reference in references:
            wait_until(lambda reference=reference: reference() is None, f"{reference()} is gone")

    def test_a_hundred_reconfigures_with_a_kill_each(self) -> None:
        with self.team(2) as team:

            def once() -> None:
                victim = team.groups[0]
                work = victim.allreduce([torch.ones(1000)])
                future = work.get_future()
                os.kill(child_of(victim), signal.SIGKILL)
                with self.assertRaises(errors.ChildDied):
                    work.wait()
                with self.assertRaises(errors.ChildDied):
                    future.value()
                team.configure()
                self.works(team)

            for _ in range(10):  # the allocator and torch's store settle
                once()
            pids = [os.getpid(), self.template.pid()]
            held, memory = self.settled(), [private_bytes(pid) for pid in pids]
            files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
            for _ in range(ROUNDS):
                once()
            wait_until(lambda: not self.settled().beyond(held), "threads, children and descriptors are as before")
            self.assertLessEqual(len(os.listdir(f"/proc/{pids[1]}/fd")), files[1] + 1)
            wait_until(lambda: len(grandchildren(pids[1])) == 2, "only the two children are left")
            for before, pid in zip(memory, pids):
                self.assertLess(private_bytes(pid) - before, GROWTH_BYTES, f"process {pid} of {pids}")

    def settled(self) -> Holdings:
        """What is held, once the readers of earlier children have ended; numbers and targets of descriptors aside."""
        wait_until(lambda: sum("replies" in t.name for t in threading.enumerate()) == 2, "earlier readers have ended")
        now = Holdings.now()
        threads = frozenset(thread for thread in now.threads if "replies" not in thread.name)
        return Holdings(threads, children(), dict.fromkeys(range(len(now.descriptors)), ""))

    def test_what_a_later_configure_leaves_behind(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works = [group.allreduce([torch.ones(8)]) for _ in range(3)]
            works[1].get_future()
            session = weakref.ref(group._held.session)
            child = child_of(group)
            team.configure()
            # the user keeps what failed, and with it no session
            caught = [Waiter(work.wait).join() for work in works]
            self.assertEqual([type(error) for error in caught], [errors.StateError] * 3)
            self.dies(session)
            gone(child)
            self.works(team)

    def test_an_error_that_is_kept_keeps_nothing(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            result = torch.ones(1000)
            storage = weakref.ref(result.untyped_storage())
            work = group.allreduce([result])
            work.get_future()
            os.kill(child_of(group), signal.SIGKILL)
            error: Any = Waiter(work.wait).join()
            kept = [error, group.errored(), work.exception()]
            with self.assertRaises(errors.ChildDied) as caught:
                group.allreduce([result])
            kept.append(caught.exception)
            session = weakref.ref(group._held.session)
            team.configure()
            self.dies(session)
            del result, caught
            self.dies(storage)
            self.assertEqual([type(each) for each in kept], [errors.ChildDied] * 4)

    def test_a_future_that_failed_goes_with_its_frames(self) -> None:
        """The future is C++: a cycle through it would live as long as the process."""

        class Mark:
            pass

        def use(group: Any) -> weakref.ref[Any]:
            mark = Mark()
            work = group.allreduce([torch.ones(3)])
            future = work.get_future()
            group.abort("enough")
            for wait in (work.wait, future.wait, future.value, work.wait):
                with self.assertRaises(errors.ChildError):
                    wait()
            try:
                future.value()
            except errors.ChildError as error:
                mark.error = error
            mark.everything = (work, future)
            return weakref.ref(mark)

        with self.team(2) as team:
            mark = use(team.groups[0])
            gc.collect()  # a cycle in Python is the caller's own
            self.dies(mark)
            team.configure()

    def test_a_configure_that_failed(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            sessions = []

            def fail() -> None:
                for address in (team.address(), "127.0.0.1:1/nobody"):
                    group.set_timeout(0.5)
                    try:
                        group.configure(address, "alone", 0, 2)
                    except Exception:
                        sessions.append(weakref.ref(group._held.session))
                    group.set_timeout(team.timeout_s)

            Waiter(fail).join()
            self.assertEqual(len(sessions), 2)
            team.configure()
            self.dies(*sessions)

    def test_the_group_is_collected_with_work_in_flight(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for round_ in range(3):
            groups = [ProcessGroupBabyGloo(timeout=60) for _ in range(2)]
            address = f"127.0.0.1:{store.port}/{round_}"
            waiters = [Waiter(lambda a=address, g=g, r=r: g.configure(a, "x", r, 2)) for r, g in enumerate(groups)]
            self.assertEqual([waiter.join() for waiter in waiters], [None, None])
            del waiters
            children_of_them = [child_of(group) for group in groups]
            group = groups.pop()
            works = [group.allreduce([torch.ones(10_000_000)]), group.recv([torch.ones(1)], 0, 3)]
            works.append(group.allreduce([torch.ones(10)]))
            futures = [works[2].get_future()]
            told: list[Any] = []
            futures[0].add_done_callback(told.append)
            waiting = Waiter(works[1].wait)
            references = [weakref.ref(group), weakref.ref(group._held.session), weakref.ref(group._held.arena)]
            ticks: list[float] = []
            stop = threading.Event()
            ticker = threading.Thread(target=tick, args=(ticks, stop))
            ticker.start()
            wait_until(lambda ticks=ticks: len(ticks) > 3, "the ticker runs")
            del group
            self.dies(references[0])
            self.assertIsInstance(waiting.join(), errors.ChildDied)
            wait_until(lambda told=told: told, "the callback was told")
            gone(children_of_them[1])
            count = len(ticks)
            wait_until(lambda ticks=ticks, count=count: len(ticks) > count + 3, "the ticker runs on")
            stop.set()
            ticker.join()
            self.assertLess(max(later - earlier for earlier, later in itertools.pairwise(ticks)), 0.5 * SCALE)
            for work in works:
                self.assertTrue(work.is_completed())
            del waiting, works, futures, told, work
            self.dies(*references)
            groups[0].shutdown()

    def test_the_last_group_is_collected(self) -> None:
        """It ends the template, in a thread of its own."""
        group = ProcessGroupBabyGloo(timeout=5)
        holders = self.template._holders
        del group
        wait_until(lambda: self.template._holders == holders - 1, "it is released")
        wait_until(lambda: "release the template" not in [t.name for t in threading.enumerate()], "in a thread")

    def test_ops_that_have_ended_are_forgotten(self) -> None:
        """Also within their timeout, which may be hours."""
        with self.team(1) as team:
            group = team.groups[0]
            session = group._held.session
            tensor = torch.ones(4)
            for _ in range(3000):
                group.allreduce([tensor]).wait()
            self.assertLess(len(session._limits._heap), 600)
            self.assertEqual(group.num_active_work(), 0)
            storages = []
            for _ in range(10):
                fresh = torch.ones(100)
                storages.append(weakref.ref(fresh.untyped_storage()))
                group.allreduce([fresh]).wait()
                del fresh
            self.dies(*storages)


def tick(ticks: list[float], stop: threading.Event) -> None:
    """Note the time every 5 ms."""
    while not stop.wait(0.005):
        ticks.append(time.monotonic())


def grandchildren(parent: int) -> list[int]:
    """The children of the process ``parent``, those not reaped included."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry))
    return found


if __name__ == "__main__":
    unittest.main()
