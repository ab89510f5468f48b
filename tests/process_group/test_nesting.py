# SPDX-License-Identifier: BSD-3-Clause
"""Callbacks that wait within callbacks that wait: so deep and no deeper, and nothing gets lost where the stack ends."""

from __future__ import annotations

import itertools
import sys
import threading
import unittest
from typing import Any
from unittest import mock

import torch

from tests import load, not_in_a_copy
from tests._support import WAIT_S, wait_until
from tests.process_group._baby_tools import SOON_S, BabyCase, Waiter, errors

not_in_a_copy()

effects = load("process_group._effects")
handle = load("process_group._handle")
nesting = load("process_group._nesting")
pending = load("process_group._pending")


class Chains(BabyCase):
    def chain(self, group: Any, length: int) -> tuple[list[Any], list[BaseException]]:
        """Ops of which each, when it ends, waits for the next; and what these waits raise."""
        works = [group.allreduce([torch.ones(3)]) for _ in range(length)]
        raised: list[BaseException] = []

        def wait_for(work: Any) -> None:
            try:
                work.wait()
            except BaseException as error:
                raised.append(error)

        for one, following in itertools.pairwise(works):
            one.get_future().add_done_callback(lambda _, following=following: wait_for(following))
        return works, raised

    def test_one_too_deep_is_told_so_and_harms_nobody(self) -> None:
        with self.team(2) as team:
            group, other = team.groups
            works, raised = self.chain(group, 3 * nesting.DEEPEST)
            for _ in works:
                other.allreduce([torch.ones(3)])
            for work in works:
                self.assertTrue(work.wait())
            wait_until(lambda: group.num_active_work() == 0, "all callbacks have run")
            for error in raised:
                self.assertIsInstance(error, errors.StateError)
                self.assertIn("wait outside of callbacks", str(error))
            self.works(team)

    def test_aborted_together(self) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            works, raised = self.chain(group, 3 * nesting.DEEPEST)
            group.abort("enough")
            for work in works:
                with self.assertRaisesRegex(errors.ChildError, "enough"):
                    work.wait()
            wait_until(lambda: len(raised) == len(works) - 1, "all callbacks have run")
            kinds = [type(error) for error in raised]
            self.assertIn(errors.StateError, kinds)
            self.assertEqual(set(kinds), {errors.StateError, errors.ChildError})
            self.heals(team)

    def test_where_the_stack_ends_everybody_is_told(self) -> None:
        """Without the limit: an exception of Python's comes in the middle of anything."""
        with self.team(2) as team, mock.patch.object(nesting, "DEEPEST", sys.maxsize):
            group, other = team.groups
            for length in range(100, 112):  # so that it comes here and there
                works, _ = self.chain(group, length)
                for _ in works:
                    other.allreduce([torch.ones(3)])
                wait_until(lambda group=group: group.errored() or not group.num_active_work(), "it is over")
                waiters = [Waiter(work.wait) for work in works]
                for waiter in waiters:
                    waiter.join(WAIT_S)
                    self.assertLess(waiter.over_s - waiter.started_s, SOON_S)
                wait_until(lambda group=group: not group.num_active_work(), "nothing is left")
                team.configure()
            self.works(team)


class FakeWork:
    """An op whose end cannot be told, the first time."""

    name = "allreduce on fake"

    def __init__(self, error: BaseException) -> None:
        self.has_ended = False
        self.source = -1
        self.told: list[Any] = []
        self._errors = [error]

    def settle(self, outcome: Exception | None) -> bool:
        if self._errors:
            raise self._errors.pop()
        self.told.append(outcome)
        return True

    def let_go(self) -> None:
        pass


class NothingIsLost(unittest.TestCase):
    def test_whoever_comes_next_tells_it(self) -> None:
        for error in (RecursionError("deep"), MemoryError(), KeyboardInterrupt(), ValueError("the device")):
            with self.subTest(repr(error)):
                made = pending.Pending(threading.RLock(), mock.Mock(), mock.Mock(), lambda: True)
                first, second = FakeWork(error), FakeWork(error)
                second._errors.clear()
                made.works.update({0: first, 1: second})
                with self.assertRaises(type(error)):
                    made.settle([effects.Settle(0, None), effects.Settle(1, None)])
                self.assertEqual((made.names(), nesting.here.depth), ({}, 0))
                made.settle()
                self.assertEqual(made.works, {})
                self.assertEqual(second.told, [None])
                [outcome] = first.told
                self.assertEqual(str(outcome), str(error if isinstance(error, ValueError) else None))

    def test_a_work_is_settled_again(self) -> None:
        work = handle.OpWork("allreduce on fake", 1.0, [])
        future = work.get_future()
        heard: list[Any] = []
        work.on_settled(heard.append)
        deep = mock.patch.object(work, "_complete", side_effect=RecursionError("deep"))
        with deep, self.assertRaises(RecursionError):
            work.settle()
        self.assertFalse(work.is_over())
        self.assertTrue(work.settle())
        self.assertTrue(future.done() and work.is_success())
        self.assertEqual(heard[-1], work)
        self.assertFalse(work.settle())


if __name__ == "__main__":
    unittest.main()
