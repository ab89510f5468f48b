# SPDX-License-Identifier: BSD-3-Clause
"""Many ops at once: each ends with its own tensors, whoever asks, in whichever order and thread."""

from __future__ import annotations

import itertools
import random
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist

from tests import not_in_a_copy
from tests._support import SCALE, WAIT_S, wait_until
from tests.process_group._baby_tools import BabyCase, Waiter, child_of, errors, lives

not_in_a_copy()

COUNT = 200


def numbers(rank: int, index: int, count: int) -> torch.Tensor:
    """Content that tells rank and op apart, in whole numbers."""
    return torch.arange(float(count)) + 1000.0 * index + rank


class Order(BabyCase):
    def mixed(self, group: Any, rank: int, seed: int) -> int:
        """COUNT ops of mixed kinds and sizes; how many settled with what was theirs."""
        shapes = random.Random(seed)  # the same on all ranks
        order = random.Random(seed * 2 + rank)
        peer, ops = 1 - rank, []
        for index in range(COUNT):
            count = shapes.choice((0, 1, 7, 100, 5000, 70_000))
            mine, theirs = numbers(rank, index, count), numbers(peer, index, count)
            kind = shapes.choice(("allreduce", "gather", "strided", "exchange"))
            if kind == "allreduce":
                ops.append((group.allreduce([mine]), mine, numbers(0, index, count) + numbers(1, index, count)))
            elif kind == "strided":
                wide = torch.zeros(count, 2)
                wide[:, 0] = mine
                ops.append(
                    (group.allreduce([wide[:, 0]]), wide[:, 0], numbers(0, index, count) + numbers(1, index, count))
                )
            elif kind == "gather":
                out = torch.zeros(2 * count)
                wanted = torch.cat([numbers(0, index, count), numbers(1, index, count)])
                ops.append((group._allgather_base(out, mine), out, wanted))
            else:
                got = torch.zeros(count)
                ops.append((group.recv([got], peer, index), got, theirs))
                ops.append((group.send([mine], peer, index), mine, numbers(rank, index, count)))
        order.shuffle(ops)
        futures = [work.get_future() if order.random() < 0.5 else None for work, _, _ in ops]
        settled = 0
        for (work, tensor, wanted), future in zip(ops, futures):
            if future is not None:
                future.wait()
            else:
                work.wait()
            self.assertTrue(torch.equal(tensor, wanted))
            self.assertTrue(work.get_future().done())
            settled += 1
        return settled - (len(ops) - COUNT)

    def test_two_hundred_mixed_ops_fifty_times(self) -> None:
        with self.team(2) as team:
            for seed in range(50):
                self.assertEqual(team.run(lambda group, rank, seed=seed: self.mixed(group, rank, seed)), [COUNT] * 2)
            wait_until(lambda: not any(group.num_active_work() for group in team.groups), "no op is left")

    def test_ops_on_the_same_memory_follow_each_other(self) -> None:
        def body(group: Any, rank: int) -> None:
            tensor = torch.ones(50_000)
            works = [group.allreduce([tensor]) for _ in range(20)]
            works[3].wait()
            half = group.allreduce([tensor[:100]])  # meets the rest's memory in part
            half.wait()
            self.assertTrue(all(work.is_completed() for work in works))
            self.assertTrue(bool((tensor[:100] == 2.0**21).all() and (tensor[100:] == 2.0**20).all()))

        with self.team(2) as team:
            team.run(body)

    def test_more_ops_on_the_same_memory_than_the_pipe_holds(self) -> None:
        """Each waits in the child for the one before, and the next is not read meanwhile: the replies are, here."""

        def body(group: Any, rank: int) -> None:
            for count in (1, 64):
                tensors = [torch.full((1,), float(rank + at)) for at in range(count)]
                works = [group.allreduce([tensors[at % count]], dist.ReduceOp.MAX) for at in range(2500)]
                for work in works:
                    work.wait()
                self.assertEqual([tensor.item() for tensor in tensors], [at + 1.0 for at in range(count)])

        with self.team(2) as team:
            team.run(body)

    def test_a_refused_op_leaves_the_result_of_the_one_before(self) -> None:
        def body(group: Any, rank: int) -> None:
            for _ in range(20):
                tensor = torch.ones(100_000)
                works = [group.allreduce([tensor]), group.allreduce([tensor], dist.ReduceOp.BXOR)]
                with self.assertRaises(errors.UnsupportedOp):
                    works[1].wait()
                works[0].wait()
                self.assertTrue(bool((tensor == 2).all()))
            self.assertIsNone(group.errored())

        with self.team(2) as team:
            team.run(body)

    def test_an_op_with_more_tensors_than_memory_is_set_aside_for(self) -> None:
        def body(group: Any, rank: int) -> None:
            tensors = [torch.ones(8_000_000) for _ in range(10)]  # 320 MB, where all ops together get 256
            group.allreduce_coalesced(tensors).wait()
            self.assertTrue(all(tensor[-1] == group.size() for tensor in tensors))

        with self.team(1) as team:
            team.run(body)


class Threads(BabyCase):
    def test_who_waits_for_what_is_done_returns_though_another_waits_for_what_never_comes(self) -> None:
        with self.team(2) as team:

            def body(group: Any, rank: int) -> list[float]:
                never = group.recv([torch.zeros(1)], 1 - rank, 99)
                waiter = Waiter(never.wait)
                gaps = []
                for round_ in range(20):
                    tensor = torch.ones(100)
                    work = group.allreduce([tensor])
                    if round_ % 2:
                        work.get_future().wait()
                    else:
                        work.wait()
                    started_s = time.monotonic()
                    work.wait()
                    gaps.append(time.monotonic() - started_s)
                    self.assertEqual(tensor.tolist(), [2.0] * 100)
                self.assertTrue(waiter.thread.is_alive())
                group.barrier().wait()
                group.send([torch.ones(1)], 1 - rank, 99).wait()
                self.assertIsNone(waiter.join())
                return gaps

            self.assertLess(max(map(max, team.run(body))), 0.05 * SCALE)

    def test_who_waits_is_told_though_another_reads(self) -> None:
        """The op ends while both wait: that costs the second one no more than a hand-over."""
        with self.team(2) as team:
            group, other = team.groups
            first, second = torch.zeros(1), torch.zeros(1)
            waiters = [Waiter(group.recv([first], 1, 1).wait), Waiter(group.recv([second], 1, 2).wait)]
            time.sleep(0.05)  # both wait now, and either may be the one that reads
            for tag in (2, 1):
                other.send([torch.ones(1)], 0, tag).wait()
                sent_s = time.monotonic()
                self.assertIsNone(waiters[tag - 1].join())
                self.assertLess(waiters[tag - 1].over_s - sent_s, 0.05 * SCALE)

    def test_eight_threads_on_one_rank(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]

            def one(number: int) -> None:
                tensor = torch.zeros(64)
                for index in range(500):
                    tensor.fill_(float(number * 1000 + index))
                    work = group.allreduce([tensor])
                    if index % 3:
                        work.wait()
                    else:
                        work.get_future().wait()
                    if tensor.tolist() != [float(number * 1000 + index)] * 64:
                        raise AssertionError(f"thread {number}, op {index}: {tensor}")

            for waiter in [Waiter(lambda number=number: one(number)) for number in range(8)]:
                self.assertIsNone(waiter.join(6 * WAIT_S))

    def test_sends_and_receives_of_eight_threads_on_two_ranks(self) -> None:
        def body(group: Any, rank: int) -> None:
            def one(number: int) -> None:
                for index in range(100):
                    tag = number * 100 + index
                    got = torch.zeros(16)
                    works = [
                        group.recv([got], 1 - rank, tag),
                        group.send([torch.full((16,), tag + 0.25)], 1 - rank, tag),
                    ]
                    for work in works:
                        work.wait()
                    if got.tolist() != [tag + 0.25] * 16:
                        raise AssertionError(f"thread {number}, tag {tag}: {got}")

            for waiter in [Waiter(lambda number=number: one(number)) for number in range(8)]:
                self.assertIsNone(waiter.join(6 * WAIT_S))

        with self.team(2) as team:
            team.run(body)


class Callbacks(BabyCase):
    """A callback runs in whichever thread comes first, and may do what any code may."""

    def test_one_that_issues_and_waits(self) -> None:
        def body(group: Any, rank: int) -> None:
            seen: list[float] = []

            def again(future: Any) -> Any:
                (value,) = future.value()
                group.allreduce([value]).wait()
                seen.append(float(value[0]))
                return [value]

            future = group.allreduce([torch.ones(4)]).get_future()
            for _ in range(5):
                future = future.then(again)
            self.assertEqual(future.wait()[0].tolist(), [64.0] * 4)
            self.assertEqual(seen, [4.0, 8.0, 16.0, 32.0, 64.0])

        with self.team(2) as team:
            team.run(body)

    def test_one_that_issues_while_its_group_waits_for_memory(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for _ in range(50):
                tensor, works = torch.ones(1000), []
                future = group.allreduce([tensor]).get_future()
                done = future.then(lambda _, works=works: works.append(group.allreduce([torch.ones(2)])))
                group.allreduce([tensor[:10]]).wait()  # is issued when the first is over, whose callback issues
                done.wait()
                works[0].wait()

    def test_one_that_issues_more_than_the_pipe_holds(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            tensor, works = torch.ones(1), []
            future = group.allreduce([torch.ones(1)]).get_future()
            future.then(lambda _: works.extend(group.allreduce([tensor]) for _ in range(3000))).wait()
            for work in works:
                work.wait()

    def test_one_that_shuts_down_or_configures(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for end in (group.shutdown, lambda: group.configure(team.address(), "again", 0, 1)):
                group.configure(team.address(), "first", 0, 1)
                started_s = time.monotonic()
                group.allreduce([torch.ones(1)]).get_future().then(lambda _, end=end: end()).wait()
                self.assertLess(time.monotonic() - started_s, 1 * SCALE)
            self.works(team)


class Refusals(BabyCase):
    def test_a_dtype_that_the_backend_cannot_reduce(self) -> None:
        def body(group: Any, rank: int) -> set[torch.dtype]:
            refused = set()
            pid = child_of(group)
            for dtype, _ in itertools.product(
                (torch.float8_e4m3fn, torch.bool, torch.int16, torch.complex64), range(10)
            ):
                works = [group.allreduce([torch.zeros(4).to(dtype)]) for _ in range(3)]
                for work in works:
                    try:
                        work.wait()
                    except errors.UnsupportedOp as error:
                        refused.add(dtype)
                        self.assertIn(str(dtype), str(error))
                        self.assertIn("gloo", str(error))
                        self.assertEqual((error.backend, error.op), ("gloo", "allreduce"))
                # what comes next does not get the error of what came before
                group.barrier().wait()
                tensor = torch.ones(2)
                group.allreduce([tensor]).wait()
                self.assertEqual(tensor.tolist(), [2.0, 2.0])
            self.assertIsNone(group.errored())
            self.assertEqual(child_of(group), pid)
            self.assertTrue(lives(pid))
            return refused

        with self.team(2) as team:
            for refused in team.run(body):
                self.assertIn(torch.float8_e4m3fn, refused)

    def test_what_is_no_tensor_for_it(self) -> None:
        with self.team(1) as team:
            group = team.groups[0]
            for tensor, word in ((torch.eye(3).to_sparse(), "sparse"), (torch.zeros(2, device="meta"), "meta")):
                with self.assertRaises(errors.UnsupportedOp) as caught:
                    group.allreduce([tensor]).wait()
                self.assertIn(word, str(caught.exception))
            self.works(team)


if __name__ == "__main__":
    unittest.main()
