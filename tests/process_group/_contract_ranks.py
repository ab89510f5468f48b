# SPDX-License-Identifier: BSD-3-Clause
"""The part of the contract about ranks: which may be named, whose memory is only read, who it was that sent."""

from __future__ import annotations

from typing import Any

import torch

from tests import load
from tests._support import wait_until

errors = load("_errors")


class RankContract:
    """Mixed in by ``ProcessGroupContract``."""

    def test_a_wrong_number_is_refused_at_once_and_harms_nobody(self: Any) -> None:
        t = torch.ones(4)
        wrong = [("send", ([t], rank, 0), f"dstRank is {rank}") for rank in (0, 2, 1000, -1, 2**70)]
        wrong += [("recv", ([t], rank, 0), f"srcRank is {rank}") for rank in (0, 2, -1)]
        wrong += [("send", ([t], 1, tag), f"tag is {tag}") for tag in (-1, 2**31)]
        wrong += [("recv_anysource", ([t], -1), "tag is -1")]
        for splits in ([-1, 5], [4], [2, 1], [2**70, 2], [2, 2, 0]):
            wrong += [("alltoall_base", (t, t, splits, [2, 2]), "output_split_sizes is")]
            wrong += [("alltoall_base", (t, t, [2, 2], splits), "input_split_sizes is")]
        wrong += [("alltoall_base", (torch.ones(3), t, [], []), "output_split_sizes is empty")]
        wrong += [("alltoall_base", (t, torch.ones(()), [], []), "input_split_sizes")]
        with self.team(2) as team:
            group = team.groups[0]
            for name, args, text in wrong:
                with self.subTest(name, args=args[1:]), self.assertRaises(ValueError) as caught:
                    getattr(group, name)(*args)
                self.assertIn(name, str(caught.exception))
                self.assertIn(text, str(caught.exception))
                self.assertIsNone(group.errored())
            self.sums(team, [0, 1])

    def test_configure_with_nonsense_leaves_the_group_as_it_is(self: Any) -> None:
        with self.team(2) as team:
            group = team.groups[0]
            there = team.address()
            for kind, name, args in (
                (ValueError, "rank", (there, "r", -1, 2)),
                (ValueError, "rank", (there, "r", 2, 2)),
                (TypeError, "rank", (there, "r", "0", 2)),
                (TypeError, "rank", (there, "r", 0.0, 2)),
                (ValueError, "world_size", (there, "r", 0, 0)),
                (ValueError, "world_size", (there, "r", 0, 2**70)),
                (TypeError, "world_size", (there, "r", 0, None)),
                (TypeError, "store_addr", (None, "r", 0, 2)),
                (ValueError, "nowhere", ("nowhere", "r", 0, 2)),
                (TypeError, "global_ranks", (there, "r", 0, 2, None, None, None, ["a"])),
            ):
                with self.subTest(args=args), self.assertRaises(kind) as caught:
                    group.configure(*args)
                self.assertIn(name, str(caught.exception))
                self.sums(team, [0, 1])

    def test_the_root_of_a_broadcast_is_not_written_to(self: Any) -> None:
        """It may be in memory that is mapped for reading only. Here it is changed meanwhile, and stays as changed."""
        with self.team(2) as team:
            for make in (lambda: torch.ones(8), lambda: torch.ones(4, 4)[:, 1]):
                sent, got = make(), torch.zeros_like(make())
                work = team.groups[0].broadcast([sent], root=0)
                sent.fill_(7.0)
                other = team.groups[1].broadcast([got], root=0)
                for each in (work, other):
                    each.wait()
                self.assertEqual(sent.unique().tolist(), [7.0])
                self.assertIn(got.unique().tolist(), ([1.0], [7.0]))
                self.assertIs(work.get_future().wait()[0].data_ptr() == sent.data_ptr(), True)

    def test_the_source_of_a_receive(self: Any) -> None:
        def body(group: Any, rank: int) -> None:
            if rank:
                group.send([torch.full((3,), float(rank))], 0, rank).wait()
                return
            for source in (2, 1):
                got = torch.zeros(3)
                work = group.recv_anysource([got], source)
                work.wait()
                self.assertEqual((work._source_rank(), got.tolist()), (source, [float(source)] * 3))

        with self.team(3) as team:
            team.run(body)
            sent = team.groups[0].allreduce([torch.ones(1)])
            with self.assertRaises((errors.StateError, RuntimeError)):
                sent._source_rank()
            team.groups[0].abort("it was for its Work")
            wait_until(lambda: team.groups[0].errored() is not None, "it is aborted")
