# SPDX-License-Identifier: BSD-3-Clause
"""The child dies, hangs in native code, or raises what no pickle carries: everybody who waits is told, soon."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any

import torch

from tests import not_in_a_copy
from tests._support import SCALE, WAIT_S, descriptors, wait_until
from tests.process_group._baby_tools import (
    SOON_S,
    BabyCase,
    ProcessGroupBabyGloo,
    Waiter,
    child_of,
    errors,
    faulty,
    gone,
    lives,
)
from tests.process_group._contract_life import quiet_stderr

not_in_a_copy()

# How a child dies: the signal that does it, and how an error is to say so. ``_baby_entry`` exits upon SIGUSR1.
DEATHS = {
    "SIGKILL": (signal.SIGKILL, "killed by SIGKILL"),
    "SIGSEGV": (signal.SIGSEGV, "killed by SIGSEGV"),
    "exit": (signal.SIGUSR1, "exited with code 3"),
}


class Deaths(BabyCase):
    def tells(self, error: BaseException | None, pid: int, fate: str, last: str) -> None:
        """``error`` is the one type and says what there is to say."""
        self.assertIsInstance(error, errors.ChildDied)
        for text in (f"pid {pid}", f"process {pid} was {fate}" if "killed" in fate else fate, f"last op: {last}"):
            self.assertIn(text, str(error))

    def dies(self, name: str, pending: Callable[[Any], tuple[list[Any], str]]) -> None:
        """The child of rank 0 dies while ``pending`` is: [what waits], the last op."""
        number, fate = DEATHS[name]
        with self.team(2) as team:
            group = team.groups[0]
            pid = child_of(group)
            waits, last = pending(group)
            waiters = [Waiter(wait) for wait in waits]
            died_s = time.monotonic()
            os.kill(pid, number)
            for waiter in waiters:
                self.tells(waiter.join(), pid, fate, last)
                self.assertLess(waiter.over_s - died_s, SOON_S)
            wait_until(lambda: group.errored() is not None, "errored() says so", SOON_S)
            self.assertLess(time.monotonic() - died_s, SOON_S)
            self.tells(group.errored(), pid, fate, last)
            self.assertTrue(all(waiter.error.__cause__ is group.errored() for waiter in waiters))
            started_s = time.monotonic()
            with self.assertRaises(errors.ChildDied) as caught:
                group.allreduce([torch.ones(1)])
            self.assertLess(time.monotonic() - started_s, SOON_S / 10)
            self.tells(caught.exception, pid, fate, last)
            self.assertEqual(group.num_active_work(), 0)
            self.assertIsNone(team.groups[1].errored())
            gone(pid)
            self.heals(team)

    def test_with_a_wait_pending(self) -> None:
        def pending(group: Any) -> tuple[list[Any], str]:
            works = [group.allreduce([torch.ones(4)]), group.recv([torch.ones(4)[::2]], 1, 7)]
            # one of them reads the pipe itself, the other waits for that; twice on one op as well
            return [works[0].wait, works[1].wait, works[0].wait], "recv (op 1)"

        for name in DEATHS:
            with self.subTest(name):
                self.dies(name, pending)

    def test_with_a_future_pending(self) -> None:
        def pending(group: Any) -> tuple[list[Any], str]:
            futures = [group.allreduce([torch.ones(4)]).get_future() for _ in range(50)]
            return [future.wait for future in (futures[0], futures[-1])], "allreduce (op 49)"

        for name in DEATHS:
            with self.subTest(name):
                self.dies(name, pending)

    def test_with_nothing_pending(self) -> None:
        for name in DEATHS:
            with self.subTest(name):
                self.dies(name, lambda group: ([], "none"))

    def test_during_configure(self) -> None:
        for name, (number, fate) in DEATHS.items():
            with self.subTest(name), self.team(2) as team:
                group = team.groups[0]
                alone = Waiter(lambda team=team: team.groups[0].configure(team.address(), "alone", 0, 2))
                wait_until(
                    lambda group=group: group._held.session._link.phase.startswith("meeting"), "it meets the others"
                )
                pid = child_of(group)
                died_s = time.monotonic()
                os.kill(pid, number)
                self.tells(alone.join(), pid, fate, "none")
                self.assertLess(alone.over_s - died_s, SOON_S)
                self.assertIn("meeting the other 1 ranks", str(alone.error))
                self.tells(group.errored(), pid, fate, "none")
                with self.assertRaises(errors.ChildDied):
                    group.allreduce([torch.ones(1)])
                self.heals(team)

    def test_the_end_of_its_stderr_is_told(self) -> None:
        with self.team(1) as team:
            os.kill(child_of(team.groups[0]), signal.SIGSEGV)
            error = wait_until(team.groups[0].errored, "errored() says so")
            self.assertIn("Fatal Python error: Segmentation fault", str(error))
            wait_until(lambda: "Segmentation fault" in self.stderr.read_text(), "the user sees it as well")

    def test_thousands_of_ops_are_told_in_time(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works = [group.allreduce([torch.ones(1)]) for _ in range(2000)]
            waiters = [Waiter(work.wait) for work in works[::500]]
            died_s = time.monotonic()
            os.kill(child_of(group), signal.SIGKILL)
            for waiter in waiters:
                self.assertIsInstance(waiter.join(), errors.ChildDied)
                self.assertLess(waiter.over_s - died_s, SOON_S)
            for work in works:
                with self.assertRaises(errors.ChildDied):
                    work.wait()


class NativeCalls(BabyCase):
    """The child sits in native code, and SIGTERM means nothing to it."""

    def sits(self, pid: int, group: Any, works: list[Any], waiters: list[Waiter]) -> None:
        os.kill(pid, signal.SIGTERM)
        self.assertFalse(works[0].is_completed())
        self.assertTrue(lives(pid))
        started_s = time.monotonic()
        group.abort("it hangs")
        self.assertLess(time.monotonic() - started_s, SOON_S)
        gone(pid, SOON_S)
        for waiter in waiters:
            self.assertIn("it hangs", str(waiter.join()))
        self.assertTrue(all(work.is_completed() for work in works))

    def test_abort(self) -> None:
        for fault in ("op sits in native code", "op sits in native code with the GIL"):
            with self.subTest(fault), self.team(2) as team:
                self.works(team)
                group, before = team.groups[0], len(descriptors())
                with faulty(fault):
                    team.configure()
                works = [group.allreduce([torch.ones(4)]) for _ in range(3)]
                waiters = [Waiter(work.wait) for work in works]
                self.sits(child_of(group), group, works, waiters)
                self.heals(team)
                wait_until(lambda before=before: len(descriptors()) <= before, "no descriptor is left behind")

    def test_the_whole_child_is_stopped_by_the_gil(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            pid = child_of(group)
            os.kill(pid, signal.SIGUSR2)
            works = [group.allreduce([torch.ones(4)]) for _ in range(3)]
            self.sits(pid, group, works, [Waiter(work.wait) for work in works])
            self.heals(team)

    def test_shutdown_and_configure_do_not_wait_for_it(self) -> None:
        for end in ("shutdown", "configure"):
            with self.subTest(end), self.team(2) as team:
                with faulty("op sits in native code with the GIL"):
                    team.configure()
                group = team.groups[0]
                pid = child_of(group)
                work = group.allreduce([torch.ones(4)])
                started_s = time.monotonic()
                if end == "shutdown":
                    group.shutdown()
                    self.assertLess(time.monotonic() - started_s, 0.5 * SCALE)
                self.heals(team)
                gone(pid, SOON_S)
                with self.assertRaises(errors.StateError):
                    work.wait()

    def test_an_idle_child_that_does_not_listen(self) -> None:
        for number in (signal.SIGUSR2, signal.SIGSTOP):
            with self.subTest(number.name), self.team(1) as team:
                pid = child_of(team.groups[0])
                os.kill(pid, number)
                started_s = time.monotonic()
                team.groups[0].shutdown()
                self.assertLess(time.monotonic() - started_s, SOON_S)
                gone(pid, SOON_S)


class Stopped(BabyCase):
    """A child that takes nothing any more."""

    def test_ten_thousand_ops(self) -> None:
        timeout_s = 2 * SCALE
        with self.team(1, timeout_s=20 * SCALE) as team:
            group = team.groups[0]
            group.set_timeout(timeout_s)
            group.configure(team.address(), "alone", 0, 1)
            pid = child_of(group)
            os.kill(pid, signal.SIGSTOP)
            works, refused = [], 0
            started_s = time.monotonic()
            for _ in range(10_000):
                try:
                    works.append(group.allreduce([torch.ones(1)]))
                except errors.DeadlineExceeded:
                    refused += 1
            self.assertEqual(len(works) + refused, 10_000)
            for work in works:
                with self.assertRaises(errors.DeadlineExceeded):
                    work.wait()
            # the limit of the first op, and what it takes to be told of ten thousand
            self.assertLess(time.monotonic() - started_s, timeout_s + 2 * SOON_S)
            self.assertGreater(refused, 0)
            self.assertIsInstance(group.errored(), errors.DeadlineExceeded)
            gone(pid)
            group.configure(team.address(), "alone", 0, 1)
            self.works(team)

    def test_threads_that_issue_and_an_abort(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            os.kill(child_of(group), signal.SIGSTOP)

            def issue() -> None:
                while True:
                    group.allreduce([torch.ones(1)])

            waiters = [Waiter(issue) for _ in range(4)]
            time.sleep(0.3)  # by now the pipe is full, and all but one of them wait for the turn
            aborted_s = time.monotonic()
            group.abort("it does not listen")
            for waiter in waiters:
                self.assertIn("it does not listen", str(waiter.join(WAIT_S)))
                self.assertLess(waiter.over_s - aborted_s, SOON_S)
            self.heals(team)


class Raised(BabyCase):
    """What the child raises crosses as text."""

    def test_what_cannot_be_pickled(self) -> None:
        cases = {
            "op raises what cannot be pickled": ("_TwoArguments: two of them", "in _raise"),
            "op raises SystemExit": ("SystemExit: leave me alone", "in _raise"),
        }
        for fault, texts in cases.items():
            with self.subTest(fault), self.team(1) as team:
                with faulty(fault):
                    team.configure()
                group = team.groups[0]
                pid = child_of(group)
                work = group.allreduce([torch.ones(4)])
                with self.assertRaises(errors.RemoteFailure) as caught:
                    work.wait()
                for text in (*texts, "Traceback", "allreduce (op 0)", f"pid {pid}"):
                    self.assertIn(text, str(caught.exception))
                with self.assertRaises(errors.RemoteFailure):
                    work.get_future().wait()
                # it had not begun, so nothing is broken
                self.assertIsNone(group.errored())
                self.assertTrue(lives(pid))

    def test_one_error_raised_in_many_threads(self) -> None:
        """Each waiter has a traceback of its own: none grows by the frames of others."""
        with self.team(2) as team:
            group = team.groups[0]
            work = group.allreduce([torch.ones(4)])
            others = [group.allreduce([torch.ones(4)]) for _ in range(8)]
            waiters = [Waiter(each.wait) for each in (work, *others)]
            os.kill(child_of(group), signal.SIGKILL)
            found = [waiter.join() for waiter in waiters]
            self.assertEqual(len({id(error) for error in found}), len(found))
            for error in found:
                self.assertLess(len(traceback.extract_tb(error.__traceback__ if error else None)), 12)


class Races(BabyCase):
    """A death at whichever moment."""

    def test_a_death_while_ops_are_issued(self) -> None:
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02):
            with self.subTest(delay_s=delay_s), self.team(1) as team:
                group = team.groups[0]
                killer = threading.Timer(delay_s, os.kill, (child_of(group), signal.SIGKILL))
                killer.start()
                outcomes = []
                end_s = time.monotonic() + 5 * SCALE
                while time.monotonic() < end_s:
                    try:
                        outcomes.append(group.allreduce([torch.ones(100)]))
                    except errors.ChildDied:
                        break
                killer.join()
                self.assertLess(time.monotonic(), end_s)
                for work in outcomes:
                    try:
                        work.wait()
                    except errors.ChildDied as error:
                        self.assertIn("SIGKILL", str(error))
                    self.assertTrue(work.get_future().done())
                arena = group._held.arena
                wait_until(lambda arena=arena: arena.out_bytes() == 0, "all memory is free", SOON_S)
                self.heals(team)

    def test_a_death_at_any_moment_of_configure(self) -> None:
        with self.team(1) as team, quiet_stderr():
            group = ProcessGroupBabyGloo(timeout=20 * SCALE)
            self.addCleanup(group.shutdown)
            for round_ in range(20):
                address, old = team.address(), group._held.session
                configured = Waiter(lambda address=address: group.configure(address, "alone", 0, 1))
                wait_until(lambda old=old: group._held.session is not old, "it has begun")
                time.sleep(0.0005 * round_)
                os.kill(child_of(group), signal.SIGKILL)
                error = configured.join()
                if error is not None:
                    self.assertIsInstance(error, (errors.ChildDied, errors.ChildStartFailed))
                    self.assertIn("SIGKILL", str(error))
                wait_until(lambda: group.errored() is not None, "errored() says so", SOON_S)


if __name__ == "__main__":
    unittest.main()
