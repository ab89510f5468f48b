# SPDX-License-Identifier: BSD-3-Clause
"""What every process group has to do, as a mixin of tests.

A subclass says how to make a group (``make_group(timeout)``). References are plain tensor arithmetic, never a
backend. Ranks are threads of this process with a group each (``Team``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests import load
from tests._support import SCALE, WAIT_S, wait_until
from tests.process_group._collectives import KINDS, Case, Cases, content
from tests.process_group._contract_life import LifeContract
from tests.process_group._contract_ranks import RankContract
from tests.process_group._contract_views import ViewContract
from tests.process_group._ranks import Team

errors = load("_errors")

# What every backend here has to do; the rest it may refuse, by an UnsupportedOp.
NEEDED = {"allreduce", "broadcast", "allgather", "_allgather_base", "alltoall_base", "barrier", "send", "recv"}
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


class ProcessGroupContract(LifeContract, RankContract, ViewContract):
    """Mix into a ``GuardedTestCase``."""

    def make_group(self, timeout: timedelta) -> Any:
        raise NotImplementedError

    @classmethod
    def setUpClass(cls) -> None:
        """What a backend opens once per process and keeps is no leak of the first test."""
        super().setUpClass()  # type: ignore[misc]
        team = Team(lambda timeout: cls.make_group(cls, timeout), 1)  # type: ignore[arg-type]
        team.run(lambda group, rank: group.allreduce([torch.ones(1)]).wait())
        team.close()

    def team(self, size: int = 2, **options: Any) -> Team:
        made = Team(self.make_group, size, **options)
        self.addCleanup(made.close)
        return made

    # --- results ----------------------------------------------------------------------------------------

    def run_cases(self, team: Team, make: Callable[[int, int], list[Case]]) -> set[str]:
        """Run the same cases on all ranks, one after the other; return the names of ops that were refused."""

        def body(group: Any, rank: int) -> tuple[list[str], set[str]]:
            problems, refused = [], set()
            for case in make(rank, len(team.groups)):
                try:
                    work = getattr(group, case.op)(*case.args)
                    work.wait()
                except errors.UnsupportedOp as error:
                    refused.add(case.name)
                    problems += self.unclear(error, case)
                    continue
                except Exception as error:
                    raise AssertionError(f"{case.name} failed") from error
                problems += case.problems()
                if not work.get_future().done():
                    problems.append(f"{case.name}: its future is not done after wait()")
            return problems, refused

        if team.broken:
            team.configure()
        outcomes = team.run(body)
        found = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(outcomes) for text in texts]
        self.assertFalse(found, "\n" + "\n".join(found))
        refused = {name for _, names in outcomes for name in names}
        self.assertEqual([names for _, names in outcomes], [refused] * len(outcomes), "the ranks do not agree")
        return refused

    def unclear(self, error: Any, case: Case) -> list[str]:
        """What a refusal lacks."""
        dtypes = {str(tensor.dtype) for tensor in _tensors(case.args)}
        wanted = [error.backend, case.op, *dtypes] if error.op == case.op and error.backend else ["its attributes"]
        return [f"{case.name}: {text!r} is not in {error}" for text in wanted if text not in str(error)]

    def test_every_collective_and_kind_of_view(self) -> None:
        for size in (2, 4):
            with self.team(size) as team:
                for kind in KINDS:
                    with self.subTest(size=size, kind=kind):
                        refused = self.run_cases(
                            team, lambda rank, n, kind=kind: list(Cases(rank, n, kind, torch.float32).all())
                        )
                        self.assertFalse(refused & NEEDED)

    def test_every_dtype(self) -> None:
        with self.team(2) as team:
            for dtype in DTYPES:
                for kind in ("contiguous", "slice"):
                    with self.subTest(dtype=dtype, kind=kind):

                        def make(rank: int, n: int, kind: str = kind, dtype: torch.dtype = dtype) -> list[Case]:
                            return [case for case in Cases(rank, n, kind, dtype).all() if _has_answer(case, dtype)]

                        refused = self.run_cases(team, make)
                        if dtype in (torch.float32, torch.float64, torch.int64):
                            self.assertFalse(refused & NEEDED)
            self.assertEqual([group.errored() for group in team.groups], [None, None])

    def test_scalars_and_empty_tensors(self) -> None:
        with self.team(2) as team:
            for shape in ((), (0,), (0, 3)):
                with self.subTest(shape=shape):
                    self.run_cases(
                        team,
                        lambda rank, n, shape=shape: list(Cases(rank, n, "contiguous", torch.float32, shape).all()),
                    )

    def test_a_group_of_one(self) -> None:
        def body(group: Any, rank: int) -> None:
            tensor = torch.arange(4.0)
            group.allreduce(tensor).wait()
            group.broadcast(tensor, 0).wait()
            group.barrier().wait()
            self.assertEqual(tensor.tolist(), [0, 1, 2, 3])

        with self.team(1) as team:
            team.run(body)

    # --- send and receive -------------------------------------------------------------------------------

    def test_send_and_receive(self) -> None:
        def body(group: Any, rank: int) -> None:
            size = group.size()
            for kind in KINDS:
                sent = [self.slot(kind, content(rank, index, (3, 4), torch.float32)) for index in range(3)]
                got = [self.slot(kind, torch.zeros(3, 4)) for _ in range(3)]
                to, source = (rank + 1) % size, (rank - 1) % size
                # the tags cross on purpose
                works = [group.recv([got[tag].view], source, tag) for tag in (2, 0, 1)]
                works += [group.send([sent[tag].view], to, tag) for tag in (0, 1, 2)]
                for work in works:
                    work.wait()
                for index in range(3):
                    wanted = content(source, index, (3, 4), torch.float32)
                    self.assertEqual(got[index].differs(wanted), "", kind)

        for size in (2, 4):
            with self.team(size) as team:
                team.run(body)

    def test_receive_from_anybody(self) -> None:
        def body(group: Any, rank: int) -> None:
            if rank != 0:
                group.send([torch.full((3,), float(rank))], 0, 5).wait()
                return
            seen = []
            for _ in range(group.size() - 1):
                tensor = torch.zeros(3)
                group.recv_anysource([tensor], 5).wait()
                seen.append(tensor.tolist())
            self.assertEqual(sorted(seen), [[float(r)] * 3 for r in range(1, group.size())])

        with self.team(4) as team:
            team.run(body)

    def test_a_short_wait_poisons_nobody(self) -> None:
        ready = threading.Event()

        def body(group: Any, rank: int) -> None:
            tensor = torch.zeros(2)
            if rank == 0:
                work = group.recv([tensor], 1, 9)
                started_s = time.monotonic()
                with self.assertRaises(TimeoutError):
                    work.wait(timedelta(seconds=0.3))
                self.assertLess(time.monotonic() - started_s, 2 * SCALE)
                self.assertFalse(work.is_completed())
            for round_ in range(3):
                other = torch.full((4,), float(rank + round_))
                group.allreduce([other]).wait()
                self.assertEqual(other.tolist(), [1.0 + 2 * round_] * 4)
            if rank == 0:
                ready.set()
                work.wait()
                work.wait(timedelta(0))
                self.assertTrue(work.is_completed())
                self.assertEqual(tensor.tolist(), [5.0, 5.0])
                self.assertIsNone(group.errored())
            else:
                self.assertTrue(ready.wait(WAIT_S))
                group.send([torch.full((2,), 5.0)], 0, 9).wait()

        with self.team(2) as team:
            team.run(body)

    # --- Work and future --------------------------------------------------------------------------------

    def test_waits_and_future(self) -> None:
        def body(group: Any, rank: int) -> None:
            for tensor in (torch.ones(4), torch.ones(4, 4)[::2]):
                work = group.allreduce([tensor])
                self.assertTrue(work.wait())
                self.assertTrue(work.wait(timedelta(0)))
                self.assertTrue(work.wait(timedelta(seconds=0.2)))
                self.assertTrue(work.is_completed())
                future = work.get_future()
                self.assertTrue(future.done())
                (value,) = future.value()
                self.assertEqual(value.tolist(), tensor.tolist())
                self.assertEqual(value.data_ptr(), tensor.data_ptr())
                self.assertEqual(future.wait()[0].tolist(), tensor.tolist())

        with self.team(2) as team:
            team.run(body)

    def test_the_result_is_there_before_a_callback(self) -> None:
        def body(group: Any, rank: int) -> None:
            for tensor in (torch.ones(100), torch.ones(10, 10).t()[2:5, 3:8]):
                seen: list[float] = []
                work = group.allreduce([tensor])
                doubled = work.get_future().then(
                    lambda future, t=tensor, seen=seen: seen.append(float(t.max())) or future.value()[0] * 2
                )
                self.assertTrue(bool((doubled.wait() == 4).all()))
                self.assertEqual(seen, [2.0])

        with self.team(2) as team:
            team.run(body)

    def test_many_ops_at_once_settle_each_with_its_own(self) -> None:
        count = 200

        def body(group: Any, rank: int) -> None:
            tensors = [torch.full((1 + 37 * index % 1000,), float(rank + index)) for index in range(count)]
            works = [group.allreduce([tensor]) for tensor in tensors]
            order = torch.randperm(count, generator=torch.Generator().manual_seed(rank)).tolist()
            for index in order:
                (value,) = works[index].get_future().wait()
                self.assertEqual(value.tolist(), [2.0 * index + 1] * len(tensors[index]))
                self.assertEqual(tensors[index].tolist(), value.tolist())
            del works
            wait_until(lambda: group.num_active_work() == 0, "no op is left")

        with self.team(2) as team:
            for _ in range(3):
                team.run(body)

    def test_two_threads_on_one_group(self) -> None:
        def body(group: Any, rank: int) -> None:
            late = torch.zeros(1)
            pending = group.recv([late], 1 - rank, 3)
            waiting = threading.Thread(target=pending.wait)
            waiting.start()
            tensor = torch.ones(3)
            group.allreduce([tensor]).wait()
            self.assertEqual(tensor.tolist(), [2.0] * 3)
            group.send([torch.ones(1)], 1 - rank, 3).wait()
            waiting.join(WAIT_S)
            self.assertFalse(waiting.is_alive())
            self.assertEqual(late.item(), 1.0)

        with self.team(2) as team:
            team.run(body)

    def test_torchs_overloads(self) -> None:
        def body(group: Any, rank: int) -> None:
            t = torch.full((2,), float(rank + 1))
            group.allreduce(t, dist.ReduceOp.MAX).wait()
            self.assertEqual(t.tolist(), [2, 2])
            group.allreduce([t], op=dist.ReduceOp.SUM, timeout=timedelta(seconds=5)).wait()
            self.assertEqual(t.tolist(), [4, 4])
            mine = torch.full((2,), float(rank))
            group.broadcast(mine, root=1).wait()
            self.assertEqual(mine.tolist(), [1, 1])
            outs = [torch.zeros(2), torch.zeros(2)]
            group.allgather(outs, torch.full((2,), float(rank))).wait()
            self.assertEqual([out.tolist() for out in outs], [[0, 0], [1, 1]])
            wide = torch.zeros(4)
            group.all_gather_single(wide, torch.full((2,), float(rank))).wait()
            self.assertEqual(wide.tolist(), [0, 0, 1, 1])
            with self.assertRaises(TypeError):
                group.allreduce(3)
            with self.assertRaises(TypeError):
                group.broadcast([mine], 0, nonsense=1)

        with self.team(2) as team:
            team.run(body)

    def test_what_cpp_asks_is_what_python_asks(self) -> None:
        with self.team(2) as team:
            for rank, group in enumerate(team.groups):
                self.assertEqual((group.size(), group.getSize()), (2, 2))
                self.assertEqual((group.rank(), group.getRank()), (rank, rank))
                self.assertEqual(group.name(), group.getBackendName())
                with self.assertRaises(ValueError):
                    _ = group.group_name
                group._set_group_name("some")
                self.assertEqual((group.group_name, group.getGroupName()), ("some", "some"))
                group._set_group_name(None)


def _has_answer(case: Case, dtype: torch.dtype) -> bool:
    """Whether arithmetic says what the case gives: a sum of truth values is one thing here and another there."""
    return dtype is not torch.bool or not any(word in case.name for word in ("SUM", "PRODUCT", "reduce"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []
