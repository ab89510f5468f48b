# SPDX-License-Identifier: BSD-3-Clause
"""Waits that end early, late, for nothing, or by an abort; Works that outlive their configure."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import unittest
import weakref
from datetime import timedelta
from typing import Any

import torch

from tests import load, not_in_a_copy
from tests._support import SCALE, run_python, wait_until
from tests.process_group._baby_tools import SOON_S, BabyCase, ProcessGroupBabyGloo, Waiter, child_of, errors, gone

not_in_a_copy()

# Before torch 2.7 the group keeps what nobody has looked at.
KEPT = load("_compat").WORK_LOSES_ITS_PYTHON_HALF
# Those who wait are told of an abort that soon.
ABORT_S = 0.1 * SCALE

LEAVES_WORKS = """
import threading, torch, tests
from torch.distributed import TCPStore
group = tests.load("process_group").ProcessGroupBabyGloo(timeout=60)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def configure(name):
    peer = threading.Thread(target=other.configure, args=(f"127.0.0.1:{store.port}/{name}", "b", 1, 2))
    peer.start()
    group.configure(f"127.0.0.1:{store.port}/{name}", "a", 0, 2)
    peer.join()
other = tests.load("process_group").ProcessGroupBabyGloo(timeout=60)
configure("one")
old = [group.allreduce([torch.ones(3)]) for _ in range(20)]
futures = [work.get_future() for work in old[::2]]
configure("two")
pending = [group.allreduce([torch.ones(3)]) for _ in range(20)]
def wait():
    try:
        pending[0].wait()
    except RuntimeError:
        pass
threading.Thread(target=wait, daemon=True).start()
print("the end")
"""


class Stale(BabyCase):
    """Works of an earlier configure."""

    def old_works(self, group: Any) -> list[Any]:
        works = [group.allreduce([torch.ones(4)]) for _ in range(40)]
        return [*works, *(group.recv([torch.ones(2)], 1, tag) for tag in range(10))]

    def test_they_say_so_in_any_thread_and_do_nothing_to_the_new_child(self) -> None:
        with self.team(2) as team:
            for _ in range(3):
                old = self.old_works(team.groups[0])
                waiters = [Waiter(work.wait) for work in old[::7]]
                futures = [work.get_future() for work in old[::5]]
                team.configure()
                pid = child_of(team.groups[0])
                for waiter in waiters:
                    error = waiter.join()
                    self.assertIsInstance(error, errors.StateError)
                    self.assertIn("stale", str(error))
                for future in futures:
                    with self.assertRaisesRegex(errors.StateError, "stale"):
                        future.wait()

                def use(old: list[Any] = old) -> None:
                    for work in old:
                        try:
                            work.get_future().wait()
                        except errors.StateError:
                            continue
                        raise AssertionError(f"{work} has ended well")

                users = [Waiter(use) for _ in range(4)]
                for _ in range(20):
                    self.works(team)
                for user in users:
                    self.assertIsNone(user.join())
                self.assertEqual(child_of(team.groups[0]), pid)

    def test_one_that_has_ended_well_stays_so(self) -> None:
        with self.team(2) as team:
            works = team.run(lambda group, rank: group.allreduce([torch.ones(4)]))
            for work in works:
                work.wait()
            team.configure()
            for work in works:
                self.assertTrue(work.wait())
                self.assertEqual(work.get_future().wait()[0].tolist(), [2.0] * 4)

    def test_they_are_deleted_in_other_threads(self) -> None:
        with self.team(2) as team:
            for _ in range(5):
                old = self.old_works(team.groups[0])
                seen = [weakref.ref(work) for work in old]
                team.configure()
                droppers = [threading.Thread(target=lambda part=old[n::4]: part.clear()) for n in range(4)]
                old.clear()
                for dropper in droppers:
                    dropper.start()
                self.works(team)
                for dropper in droppers:
                    dropper.join()
                del droppers
                gc.collect()
                if not KEPT:
                    wait_until(lambda seen=seen: not any(one() for one in seen), "no Work is left")
                self.works(team)

    def test_they_are_left_at_exit(self) -> None:
        done = run_python("-c", LEAVES_WORKS, check=True)
        self.assertEqual((done.stdout, done.stderr), ("the end\n", ""))

    def test_nothing_is_written_for_them_any_more(self) -> None:
        """Also when the answer came at the very moment of configure."""
        with self.team(2) as team:
            tensors = [torch.ones(2_000_000) for _ in team.groups]
            for round_ in range(10):
                works = team.run(lambda group, rank: group.allreduce([tensors[rank]]))
                time.sleep(0.002 * round_)
                team.configure()
                for rank, tensor in enumerate(tensors):
                    tensor.fill_(float(rank))
                time.sleep(0.02)
                for rank, tensor in enumerate(tensors):
                    self.assertTrue(bool((tensor == rank).all()), f"rank {rank}, round {round_}")
                for work in works:
                    with contextlib.suppress(errors.FtliteError):  # stale, or the peer was the first to leave
                        work.wait()


class Times(BabyCase):
    def test_a_short_wait_harms_nobody(self) -> None:
        def body(group: Any, rank: int) -> None:
            if rank == 0:
                got = torch.zeros(3)
                work = group.recv([got], 1, 5)
                for _ in range(3):
                    started_s = time.monotonic()
                    with self.assertRaises(errors.DeadlineExceeded) as caught:
                        work.wait(timedelta(seconds=0.3))
                    self.assertGreaterEqual(time.monotonic() - started_s, 0.3)
                    self.assertLess(time.monotonic() - started_s, 0.3 + SOON_S)
                    self.assertEqual(caught.exception.limit_s, 0.3)
            group.barrier().wait()
            for round_ in range(20):
                tensor = torch.full((100,), float(round_))
                group.allreduce([tensor]).wait()
                self.assertEqual(tensor.tolist(), [2.0 * round_] * 100)
            if rank == 1:
                group.send([torch.full((3,), 7.0)], 0, 5).wait()
                return
            for limit in (None, timedelta(0), timedelta(seconds=1), timedelta(milliseconds=1), 0, 0.5):
                self.assertTrue(work.wait() if limit is None else work.wait(limit))
            self.assertEqual(got.tolist(), [7.0] * 3)
            self.assertIsNone(group.errored())

        with self.team(2) as team:
            team.run(body)

    def test_two_threads_wait_for_two_ops_and_both_for_one(self) -> None:
        def body(group: Any, rank: int) -> None:
            gots = [torch.zeros(2) for _ in range(2)]
            works = [group.recv([got], 1 - rank, tag) for tag, got in enumerate(gots)]
            waiters = [Waiter(work.wait) for work in (*works, *works)]
            for tag in (1, 0):
                group.send([torch.full((2,), tag + 0.5)], 1 - rank, tag).wait()
            for waiter in waiters:
                self.assertIsNone(waiter.join())
            self.assertEqual([got.tolist() for got in gots], [[0.5] * 2, [1.5] * 2])

        with self.team(2) as team:
            team.run(body)

    def test_a_limit_of_its_own_that_ends_while_another_thread_waits_longer(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            longer = Waiter(group.recv([torch.zeros(1)], 1, 3).wait)
            time.sleep(0.05)
            started_s = time.monotonic()
            late = (errors.DeadlineExceeded, errors.RemoteFailure)  # whether we or Gloo are the first to notice
            with self.assertRaises(late):
                group.allreduce([torch.ones(1)], timeout=timedelta(seconds=0.5)).wait()
            self.assertLess(time.monotonic() - started_s, 0.5 + 1.5 * SOON_S)
            self.assertIsInstance(longer.join(), late)
            self.assertIsInstance(group.errored(), late)
            self.heals(team)


class Interrupts(BabyCase):
    def test_ctrl_c_ends_a_wait_and_harms_no_op(self) -> None:
        """In the thread that reads the replies, which is the main one here."""
        with self.team(2) as team:
            group, other = team.groups
            kept = signal.getsignal(signal.SIGINT)
            self.addCleanup(signal.signal, signal.SIGINT, kept)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for tag in range(20):
                got = torch.zeros(2)
                work = group.recv([got], 1, tag)
                future = work.get_future() if tag % 2 else None
                killer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
                killer.start()
                with self.assertRaises(KeyboardInterrupt):
                    work.wait()
                killer.join()
                self.assertFalse(work.is_completed())
                other.send([torch.full((2,), float(tag))], 0, tag).wait()
                self.assertTrue(work.wait())
                self.assertTrue(future is None or future.wait())
                self.assertEqual(got.tolist(), [float(tag)] * 2)
            self.assertIsNone(group.errored())

    def test_ctrl_c_ends_configure(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            kept = signal.getsignal(signal.SIGINT)
            self.addCleanup(signal.signal, signal.SIGINT, kept)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            killer.start()
            with self.assertRaises(KeyboardInterrupt):
                group.configure(team.address(), "alone", 0, 2)
            killer.join()
            with self.assertRaises(errors.ChildError):
                group.allreduce([torch.ones(1)])
            self.heals(team)


class Aborts(BabyCase):
    def test_one_who_waits_is_told_the_reason(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            for reason in ("the peer left", RuntimeError("the quorum has changed")):
                works = [group.allreduce([torch.ones(4)]) for _ in range(3)]
                waiters = [Waiter(work.wait) for work in (*works, works[0])]
                waiters += [Waiter(group.allreduce([torch.ones(4)]).get_future().wait) for _ in range(2)]
                time.sleep(0.05)
                pid = child_of(group)
                aborted_s = time.monotonic()
                group.abort(reason)
                for waiter in waiters:
                    error = waiter.join()
                    self.assertIn(str(reason), str(error))
                    self.assertLess(waiter.over_s - aborted_s, ABORT_S)
                first = group.errored()
                group.abort("again")
                self.assertIs(group.errored(), first)
                gone(pid, SOON_S)
                self.heals(team)

    def test_thousands_pending_are_all_told_the_reason(self) -> None:
        with self.team(2) as team:
            for _ in range(5):
                group = team.groups[0]
                works = [group.allreduce([torch.ones(1)]) for _ in range(1000)]
                waiters = [Waiter(work.wait) for work in works[-3:]]
                time.sleep(0.02)
                group.abort("enough")
                for waiter in waiters:
                    self.assertIn("was aborted: enough", str(waiter.join()))
                team.configure()

    def test_a_callback_that_waits_for_what_is_aborted_with_it(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works = [group.allreduce([torch.ones(1)]) for _ in range(3)]
            seen: list[str] = []

            def look(_: Any) -> None:
                for work in works:
                    try:
                        work.wait()
                    except errors.ChildError as error:
                        seen.append(str(error))
                try:
                    group.allreduce([torch.ones(1)])
                except errors.ChildError as error:
                    seen.append(str(error))

            works[0].get_future().add_done_callback(look)
            started_s = time.monotonic()
            group.abort("enough")
            wait_until(lambda: len(seen) == 4, "the callback has run")
            self.assertLess(time.monotonic() - started_s, SOON_S)
            self.assertTrue(all("enough" in text for text in seen), seen)

    def test_before_configure_and_after_shutdown(self) -> None:
        group = ProcessGroupBabyGloo(timeout=5)
        self.addCleanup(group.shutdown)
        group.abort("nothing to abort")
        self.assertIsNone(group.errored())
        with self.team(1) as team:
            group.configure(team.address(), "alone", 0, 1)
            group.allreduce([torch.ones(1)]).wait()
            group.shutdown()
            group.abort("nothing to abort")
            group.configure(team.address(), "alone", 0, 1)
            group.allreduce([torch.ones(1)]).wait()

    def test_during_configure(self) -> None:
        with self.team(1) as team:
            group = ProcessGroupBabyGloo(timeout=60)
            self.addCleanup(group.shutdown)
            for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1):
                address = team.address()
                configured = Waiter(lambda address=address: group.configure(address, "alone", 0, 2))
                wait_until(lambda: group._held.session is not None and group._held.session._reader is not None, "begun")
                time.sleep(delay_s)
                aborted_s = time.monotonic()
                group.abort("the others will not come")
                error = configured.join()
                self.assertLess(configured.over_s - aborted_s, ABORT_S)
                self.assertIn("the others will not come", str(error))
                self.assertIn("the others will not come", str(group.errored()))
                group.configure(team.address(), "alone", 0, 1)
                group.allreduce([torch.ones(1)]).wait()
                group.shutdown()

    def test_while_others_issue_and_wait(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for round_ in range(10):
                stop = threading.Event()

                def use(stop: threading.Event = stop) -> None:
                    tensor = torch.ones(10)
                    while not stop.is_set():
                        try:
                            works = [group.allreduce([tensor]) for _ in range(5)]
                            for work in works:
                                work.wait()
                        except errors.FtliteError as error:
                            if "enough" in str(error):
                                return
                            raise

                waiters = [Waiter(use) for _ in range(4)]
                time.sleep(0.005 * round_)
                group.abort("enough")
                errors_seen = [waiter.join() for waiter in waiters]
                stop.set()
                self.assertEqual(errors_seen, [None] * 4)
                team.configure()


if __name__ == "__main__":
    unittest.main()
