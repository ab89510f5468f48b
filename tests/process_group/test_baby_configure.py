# SPDX-License-Identifier: BSD-3-Clause
"""Groups in a child, configured again and again: from which state, and how they end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests import load, not_in_a_copy
from tests._support import SCALE, wait_until
from tests.process_group._baby_tools import (
    ENTRY,
    BabyCase,
    ProcessGroupBabyGloo,
    Waiter,
    child_of,
    errors,
    gone,
    lives,
    template,
)
from tests.process_group._contract_life import quiet_stderr

not_in_a_copy()

frames = load("process_group._frames")
limits = load("process_group._limits")

SHUTDOWN_S = 0.5 * SCALE


class Reconfigured(BabyCase):
    def test_the_thread_that_configured_exits(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            Waiter(lambda: group.configure(team.address(), "from a thread", 0, 1)).join()
            pid = child_of(group)
            self.works(team)
            time.sleep(0.2)  # the kernel would have told the child by now
            self.assertTrue(lives(pid))
            self.works(team)

    def test_two_threads_configure(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            addresses = [team.address() for _ in range(4)]
            waiters = [Waiter(lambda a=a: group.configure(a, "both", 0, 1)) for a in addresses]
            self.assertEqual([waiter.join() for waiter in waiters], [None] * 4)
            self.works(team)

    def test_no_thread_is_left(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            start = threading.Thread.start

            def refuse(thread: threading.Thread) -> None:
                if thread.name.startswith("replies"):
                    raise RuntimeError("can't start new thread")
                start(thread)

            refused = self.assertRaisesRegex(errors.ChildStartFailed, "can't start new thread")
            with mock.patch.object(threading.Thread, "start", refuse), refused:
                group.configure(team.address(), "one too many", 0, 1)
            self.assertIsNone(group.child_pid())
            self.heals(team)


class Shutdown(BabyCase):
    def fast(self, group: Any) -> None:
        started_s = time.monotonic()
        group.shutdown()
        self.assertLess(time.monotonic() - started_s, SHUTDOWN_S)

    def test_idle_and_with_ops_pending(self) -> None:
        with self.team(2) as team:
            for spoil in (
                lambda g: None,
                lambda g: g.allreduce([torch.ones(10)]),
                lambda g: g.recv([torch.ones(1)], 1, 3),
            ):
                group = team.groups[0]
                work, pid = spoil(group), child_of(group)
                self.fast(group)
                self.fast(group)
                self.assertFalse(lives(pid))
                if work is not None:
                    with self.assertRaisesRegex(errors.StateError, "shut down"):
                        work.wait()
                with self.assertRaisesRegex(errors.StateError, "configure"):
                    group.allreduce([torch.ones(1)])
                self.assertIsNone(group.errored())
                self.heals(team)

    def test_from_two_threads(self) -> None:
        with self.team(2) as team:
            for group in team.groups:
                group.allreduce([torch.ones(4)])
            started_s = time.monotonic()
            waiters = [Waiter(group.shutdown) for group in team.groups * 4]
            self.assertEqual([waiter.join() for waiter in waiters], [None] * 8)
            self.assertLess(time.monotonic() - started_s, 2 * SHUTDOWN_S)
            self.heals(team)

    def test_a_configure_under_way_ends(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for phase in ("starting", "meeting"):
                pending = Waiter(lambda: group.configure(team.address(), "alone", 0, 2))
                wait_until(lambda p=phase: group._held.session._link.phase.startswith(p), phase)
                self.fast(group)
                error = pending.join()
                self.assertIsInstance(error, errors.StateError)
                self.assertIn("shut down", str(error))
                self.heals(team)

    def test_in_a_callback(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for wait in (True, False):
                took_s: list[float] = []

                def end(future: Any, took_s: list[float] = took_s) -> None:
                    started_s = time.monotonic()
                    group.shutdown()
                    took_s.append(time.monotonic() - started_s)

                work = group.allreduce([torch.ones(4)])
                work.get_future().add_done_callback(end)
                if wait:
                    work.wait()
                wait_until(lambda took_s=took_s: took_s, "the callback has run")
                self.assertLess(took_s[0], SHUTDOWN_S)
                self.heals(team)

    def test_without_configure(self) -> None:
        group = ProcessGroupBabyGloo(timeout=5)
        self.fast(group)
        self.fast(group)


class Surroundings(BabyCase):
    def test_environment_of_now(self) -> None:
        with self.team(2) as team:
            with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nowhere7"}):
                for group in team.groups:
                    with self.assertRaises(errors.RemoteFailure) as caught:
                        group.configure(team.address(), "wrong", 0, 1)
                    self.assertIn("nowhere7", str(caught.exception).splitlines()[0])
                    self.assertIn("GLOO_SOCKET_IFNAME", str(caught.exception).splitlines()[0])
                    self.assertIsInstance(group.errored(), errors.RemoteFailure)
            with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo"}):
                self.heals(team)
            self.heals(team)

    @contextlib.contextmanager
    def own_template(self) -> Iterator[Any]:
        """A template for one test, to be killed."""
        mine = template.Template(ENTRY).hold()
        with mock.patch.dict(template._templates, {os.getpid(): mine}):
            yield mine
        mine.release()

    def test_the_template_is_killed(self) -> None:
        with self.own_template() as source, self.team(1) as team:
            group = team.groups[0]
            for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1):
                with self.subTest(delay_s=delay_s):
                    pid, child = source.pid(), child_of(group)
                    os.kill(pid, signal.SIGKILL)
                    time.sleep(delay_s)
                    team.configure()
                    self.works(team)
                    self.assertNotEqual(source.pid(), pid)
                    gone(child)

    def test_the_template_is_killed_and_nobody_configures(self) -> None:
        with self.own_template() as source, self.team(1) as team:
            group = team.groups[0]
            pid = child_of(group)
            os.kill(source.pid(), signal.SIGKILL)
            error = wait_until(group.errored, "errored() says so")
            self.assertIsInstance(error, errors.ChildDied)
            wait_until(lambda: not lives(pid), "the child ends with it")
            self.heals(team)

    def peer_leaves(self, leave: Callable[[Any], None], env: dict[str, str]) -> None:
        with mock.patch.dict(os.environ, env), self.team(2) as team:
            limit_s = 2 * SCALE
            team.groups[0].set_timeout(limit_s)
            leave(team.groups[1])
            started_s = time.monotonic()
            with self.assertRaises((errors.ChildError, errors.DeadlineExceeded)):
                team.groups[0].allreduce([torch.ones(4)]).wait()
            self.assertLess(time.monotonic() - started_s, limit_s + 1 * SCALE)
            self.assertIsNotNone(team.groups[0].errored())
            team.groups[0].set_timeout(team.timeout_s)
            self.heals(team)

    def test_a_peer_leaves_before_the_first_collective(self) -> None:
        def killed(group: Any) -> None:
            pid = child_of(group)
            os.kill(pid, signal.SIGKILL)
            gone(pid)

        for leave in (killed, lambda group: group.shutdown(), lambda group: group.abort("it has had enough")):
            for env in ({}, {"TORCH_GLOO_LAZY_INIT": "1"}):
                with self.subTest(leave=leave, env=env), quiet_stderr():
                    self.peer_leaves(leave, env)


class ManyOps(BabyCase):
    def test_fifty_times_two_hundred_in_any_order(self) -> None:
        """Sizes of 1 to 20,000 numbers, futures asked for in random order, messages that cross, ranks that are late."""

        def body(group: Any, rank: int) -> None:
            chance = random.Random(7 + rank)  # and another one on each rank
            for round_ in range(50):
                if chance.random() < 0.2:
                    time.sleep(0.005 * chance.random())
                self.round(group, rank, round_, chance)
            wait_until(lambda: group.num_active_work() == 0, "no op is left")

        with self.team(2) as team:
            team.run(body)
            self.assertEqual([group.errored() for group in team.groups], [None, None])

    def round(self, group: Any, rank: int, round_: int, chance: random.Random) -> None:
        peer, tags = 1 - rank, list(range(40))
        works: list[tuple[Any, torch.Tensor, float]] = []
        chance.shuffle(tags)
        for tag in tags:
            got = torch.zeros(1 + 31 * tag)
            works.append((group.recv([got], peer, tag), got, float(tag + round_)))
        for index in range(120):
            tensor = torch.full((1 + 167 * index % 20_000,), float(rank + index))
            works.append((group.allreduce([tensor]), tensor, 2.0 * index + 1))
        chance.shuffle(tags)
        for tag in tags:
            sent = torch.full((1 + 31 * tag,), float(tag + round_))
            works.append((group.send([sent], peer, tag), sent, float(tag + round_)))
        self.assertEqual(len(works), 200)
        chance.shuffle(works)
        for work, tensor, wanted in works:
            if chance.random() < 0.5:
                work.wait()
            (value,) = work.get_future().wait() or [tensor]
            self.assertEqual(value.data_ptr(), tensor.data_ptr())
            self.assertTrue(bool((tensor == wanted).all()), f"round {round_}: {tensor} and not {wanted}")


class Pieces(unittest.TestCase):
    def test_limits(self) -> None:
        pending: dict[int, None] = {}
        made = limits.Limits(pending)
        self.assertEqual((made.next_s(), made.pop_due(1e9)), (float("inf"), None))
        for op_id in range(100_000):
            pending[op_id] = None
            made.add(float(op_id % 7), op_id)
            pending.pop(op_id - 5, None)
        self.assertLess(len(made._heap), 1000)
        found = [made.pop_due(6.0) for _ in range(6)]
        self.assertEqual(found, [*sorted(range(99_995, 100_000), key=lambda op_id: (op_id % 7, op_id)), None])

    def test_frames(self) -> None:
        try:
            try:
                raise KeyError("one")
            except KeyError as error:
                raise ValueError("two") from error
        except ValueError as error:
            caught = error
        another = frames.fresh(caught)
        self.assertIsNot(another, caught)
        self.assertEqual((type(another), str(another), another.__cause__), (ValueError, "two", caught.__cause__))
        self.assertIsNone(another.__traceback__)
        caught.__cause__.__context__ = caught  # a knot
        self.assertIs(frames.frameless(caught), caught)
        self.assertIsNone(caught.__traceback__)
        self.assertIsNone(caught.__cause__.__traceback__)

        class Odd(Exception):
            def __init__(self, number: int, text: str) -> None:
                super().__init__(text)

        odd = Odd(1, "cannot be copied")
        self.assertIs(frames.fresh(odd), odd)
        late = load("_errors").DeadlineExceeded("it", limit_s=1.0, elapsed_s=2.0)
        self.assertEqual((frames.fresh(late).limit_s, str(frames.fresh(late))), (1.0, str(late)))


if __name__ == "__main__":
    unittest.main()
