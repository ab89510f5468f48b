# SPDX-License-Identifier: BSD-3-Clause
"""PGTransport passes the contract over groups in this process and over groups in children; what it has beyond it."""

from __future__ import annotations

import enum
import functools
import signal
import subprocess
import sys
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests import load, not_in_a_copy
from tests._support import LONG_S, SCALE, WAIT_S, GuardedTestCase, child_env
from tests.checkpointing._contract import TransportContract
from tests.checkpointing._contract_tools import Sending
from tests.checkpointing._transport_states import block, clone, noise
from tests.checkpointing._wire import OneThread
from tests.process_group._ranks import Team

PGTransport = load("checkpointing").PGTransport
errors = load("_errors")
process_group = load("process_group")
template = load("process_group._template")
backends = load("process_group._backends")
arena = load("process_group._arena")
wire = load("checkpointing._pg_wire")

GROUPS = ("ProcessGroupGloo", "ProcessGroupBabyGloo")


class Color(enum.Enum):
    RED = 1


class _Groups(OneThread, GuardedTestCase):
    """Teams of one kind of group."""

    limit_s = LONG_S
    group = GROUPS[0]

    @classmethod
    def setUpClass(cls) -> None:
        # one template for all tests, up before the first of them; and what a backend opens once per process is no leak
        cls.addClassCleanup(template.acquire().release)
        super().setUpClass()
        team = Team(cls.make_group, 1)
        team.run(lambda group, rank: group.allreduce([torch.ones(1)]).wait())
        team.close()

    @classmethod
    def make_group(cls, timeout: timedelta) -> Any:
        return getattr(process_group, cls.group)(timeout)

    def team(self, size: int = 2) -> Team:
        team = Team(self.make_group, size)
        self.addCleanup(team.close)
        return team

    def transports(self, groups: list[Any], **options: Any) -> list[Any]:
        return [PGTransport(group, 20 * SCALE, "cpu", **options) for group in groups]


class _Contract(TransportContract):
    """The donor is rank 0, the receiver rank 1."""

    send_waits_for_receiver = True

    def make_pair(self, **options: Any) -> tuple[Any, Any]:
        own = options.pop("state_dict", None)
        team = self.team()  # type: ignore[attr-defined]
        donor = PGTransport(team.groups[0], device="cpu", **options)
        return donor, PGTransport(team.groups[1], device="cpu", state_dict=own, **options)


class OverGloo(_Contract, _Groups):
    pass


class OverBabyGloo(_Contract, _Groups):
    group = GROUPS[1]

    def test_the_group_copies_nothing_but_what_is_said(self) -> None:
        state = {"large": block(3 * wire.MESSAGE_BYTES + 16), "small": noise(40), "other": block(wire.STRAIGHT_BYTES)}
        own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        donor, receiver = self.make_pair(timeout=20 * SCALE, state_dict=lambda: own)
        copied: list[int] = []
        take = arena.Arena.take

        def noted(self: Any, nbytes: int, deadline: Any) -> Any:
            copied.append(nbytes)
            return take(self, nbytes, deadline)

        with unittest.mock.patch.object(arena.Arena, "take", noted):
            sending = Sending(donor, 7, state)
            receiver.recv_checkpoint(0, "", 7)
            sending.join()
        self.assertIsNone(sending.error)
        self.assertTrue(all(torch.equal(own[name], state[name]) for name in state))
        # the layout and the checksums; those of the state are in memory that the child sees
        self.assertLess(max(copied), 2 * wire.CONTROL_BYTES)


class _Flipping:
    """A group whose message ``number`` (counted from 0) has another bit."""

    def __init__(self, group: Any, number: int) -> None:
        self._group = group
        self._number = number
        self.sent = 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self.sent == self._number:
            tensors = [tensors[0].clone()]
            tensors[0][tensors[0].numel() // 2] ^= 4
        self.sent += 1
        return self._group.send(tensors, rank, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Counting:
    """A group that calls ``at`` when it is to send its message ``number``."""

    def __init__(self, group: Any, number: int, at: Callable[[], None]) -> None:
        self._group = group
        self._left = number
        self._at = at

    def send(self, *args: Any) -> Any:
        if self._left == 0:
            self._at()
        self._left -= 1
        return self._group.send(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class TroubleIsTold(_Groups):
    def both(self, donor: Any, receiver: Any, state: Any, step: int = 7) -> tuple[Any, Any, float]:
        """The errors of both sides, and how long the later of them took."""
        began_s = time.monotonic()
        sending = Sending(donor, 7, state)
        error: Any = None
        try:
            receiver.recv_checkpoint(0, "", step)
        except Exception as e:
            error = e
        sending.join()
        return sending.error, error, time.monotonic() - began_s

    def test_the_donor_learns_of_a_layout_that_does_not_fit(self) -> None:
        own = {"w": torch.zeros(3)}
        donor, receiver = self.transports(self.team().groups, state_dict=lambda: own)
        sent, got, took_s = self.both(donor, receiver, {"w": noise(4)})
        for error in (sent, got):
            self.assertIsInstance(error, errors.LayoutError)
            self.assertIn("['w']", str(error))
        self.assertIn("rank 1", str(sent))
        self.assertLess(took_s, 1.0 * SCALE)
        self.assertEqual(own["w"].tolist(), [0, 0, 0])

    def test_the_donor_learns_of_another_step(self) -> None:
        donor, receiver = self.transports(self.team().groups)
        sent, got, took_s = self.both(donor, receiver, {"w": noise(4)}, step=8)
        self.assertIsInstance(sent, errors.NotServing)
        self.assertIsInstance(got, errors.NotServing)
        self.assertIn("step 8", str(sent))
        self.assertLess(took_s, 1.0 * SCALE)

    def test_the_donor_learns_of_a_receiver_without_memory(self) -> None:
        donor, receiver = self.transports(self.team().groups)
        plan = load("checkpointing._plan")
        with unittest.mock.patch.object(plan, "memory_at_hand", lambda: 100):
            sent, got, took_s = self.both(donor, receiver, {"w": noise(1000)})
        for error in (sent, got):
            self.assertIsInstance(error, errors.LayoutError)
            self.assertIn("at hand", str(error))
        self.assertLess(took_s, 1.0 * SCALE)

    def test_the_donor_learns_of_a_state_dict_that_fails(self) -> None:
        donor, receiver = self.transports(self.team().groups, state_dict=lambda: {}["gone"])
        sent, got, took_s = self.both(donor, receiver, {"w": noise(4)})
        self.assertIsInstance(sent, errors.TransferError)
        self.assertIn("KeyError: 'gone'", str(sent))
        self.assertIsInstance(got, KeyError)
        self.assertLess(took_s, 1.0 * SCALE)

    def test_the_receiver_learns_of_a_leaf_that_cannot_be_carried(self) -> None:
        donor, receiver = self.transports(self.team().groups)
        sent, got, took_s = self.both(donor, receiver, {"x": noise(3), "leaf": Color.RED})
        self.assertIsInstance(sent, errors.LayoutError)
        self.assertIsInstance(got, errors.NotServing)
        self.assertIn("['leaf']", str(got))
        self.assertLess(took_s, 1.0 * SCALE)
        sending = Sending(donor, 8, {"x": noise(3)})
        self.assertTrue(torch.equal(receiver.recv_checkpoint(0, "", 8)["x"], noise(3)))
        sending.finish()

    def test_a_refusal_that_nobody_fetches_costs_a_second(self) -> None:
        donor, _ = self.transports(self.team().groups)
        began_s = time.monotonic()
        with self.assertRaises(errors.LayoutError):
            donor.send_checkpoint([1], 7, {"leaf": Color.RED})
        self.assertLess(time.monotonic() - began_s, 2.0 * SCALE)

    def test_trusted_leaves(self) -> None:
        donor, receiver = self.transports(self.team().groups, weights_only=False)
        sent, got, _ = self.both(donor, receiver, {"leaf": Color.RED})
        self.assertEqual((sent, got), (None, None))

    def test_an_untrusting_receiver(self) -> None:
        groups = self.team().groups
        donor, receiver = PGTransport(groups[0], 20, "cpu", weights_only=False), PGTransport(groups[1], 20, "cpu")
        sent, got, took_s = self.both(donor, receiver, {"x": noise(3), "leaf": Color.RED})
        for error in (sent, got):
            self.assertIsInstance(error, errors.LayoutError)
            self.assertIn("['leaf']", str(error))
        self.assertLess(took_s, 1.0 * SCALE)

    def test_damage_in_any_message(self) -> None:
        groups = self.team().groups
        state = {"big": block(wire.MESSAGE_BYTES + (2 << 20)), "small": noise(9), "middle": block(300_000)}
        # OFFER, GO, layout, two of the large region, one of the others, END, the checksums
        for number in range(8):
            own = clone(state)
            for tensor in own.values():
                tensor.zero_()
            donor = PGTransport(flipping := _Flipping(groups[0], number), 20 * SCALE, "cpu")
            receiver = PGTransport(groups[1], 20 * SCALE, "cpu", state_dict=lambda own=own: own)
            with self.subTest(number=number):
                sent, got, took_s = self.both(donor, receiver, state)
                self.assertIsInstance(got, errors.IntegrityError)
                self.assertIsInstance(sent, errors.IntegrityError)
                self.assertEqual(got.destination_dirty, number >= 3)
                self.assertEqual(bool(got.keys), number >= 3)
                self.assertLess(took_s, 3.0 * SCALE)
                if number >= 3:
                    self.assertEqual(flipping.sent, 8)
                sending = Sending(donor, 8, state)
                receiver.recv_checkpoint(0, "", 8)
                sending.finish()
                self.assertTrue(all(torch.equal(own[key], state[key]) for key in state))

    def test_a_damaged_reply(self) -> None:
        groups = self.team().groups
        donor = PGTransport(groups[0], 3 * SCALE, "cpu")
        receiver = PGTransport(_Flipping(groups[1], 0), 3 * SCALE, "cpu")
        sent, got, _ = self.both(donor, receiver, {"x": noise(3)})
        self.assertIsInstance(sent, errors.IntegrityError)
        self.assertIsInstance(got, errors.DeadlineExceeded)


class SeveralReceivers(_Groups):
    def test_one_refuses(self) -> None:
        team = self.team(4)
        state = {"w": block(20 << 20), "b": noise(9)}
        own = [clone(state) for _ in range(4)]
        for each in own:
            each["w"].zero_()
        own[2]["b"] = torch.zeros(8)
        failures: dict[int, Exception] = {}

        def body(group: Any, rank: int) -> None:
            transport = PGTransport(group, 20 * SCALE, "cpu", state_dict=lambda: own[rank])
            try:
                if rank == 0:
                    transport.send_checkpoint([1, 2, 3], 5, state)
                else:
                    transport.recv_checkpoint(0, "", 5)
            except errors.LayoutError as e:
                failures[rank] = e

        team.run(body)
        self.assertEqual(sorted(failures), [0, 2])
        self.assertIn("rank 2", str(failures[0]))
        self.assertNotIn("rank 1:", str(failures[0]))
        for rank in (1, 3):
            self.assertTrue(torch.equal(own[rank]["w"], state["w"]))

    def test_all_get_it(self) -> None:
        team = self.team(4)
        state = {"w": block(3 << 20), "small": [noise(i + 1) for i in range(50)]}

        def body(group: Any, rank: int) -> Any:
            transport = PGTransport(group, 20 * SCALE, "cpu")
            return transport.send_checkpoint([1, 2, 3], 5, state) if rank == 0 else transport.recv_checkpoint(0, "", 5)

        for moved in team.run(body)[1:]:
            self.assertTrue(torch.equal(moved["w"], state["w"]))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(moved["small"], state["small"])))

    def test_nobody_is_to_get_it(self) -> None:
        self.transports(self.team().groups)[0].send_checkpoint([], 5, {})


class KilledReceiver(_Groups):
    @classmethod
    def setUpClass(cls) -> None:
        not_in_a_copy()
        super().setUpClass()

    def test_at_any_point(self) -> None:
        self._kill_at_any_point(GROUPS[0])

    def test_at_any_point_with_children(self) -> None:
        self._kill_at_any_point(GROUPS[1])

    def _kill_at_any_point(self, group: str) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        state = {"w": block(60 << 20), "b": noise(9)}
        # short: what was pending with a dead peer ends in this process only then, and configure() waits for it
        pg = getattr(process_group, group)(5.0 * SCALE)
        self.addCleanup(pg.shutdown)
        for number in (0, 2, 6):
            with self.subTest(number=number):
                self._kill(group, pg, f"127.0.0.1:{store.port}/{number}", number, state)
        pg.configure(f"127.0.0.1:{store.port}/after", "donor", 0, 1)
        pg.allreduce([torch.ones(1)]).wait()

    def _kill(self, group: str, pg: Any, address: str, number: int, state: Any) -> None:
        command = [sys.executable, "-m", "tests.checkpointing._pg_receiver", group, address]
        with subprocess.Popen(command, env=child_env(), stdout=subprocess.PIPE, text=True) as child:
            lines = iter(child.stdout)  # type: ignore[arg-type]
            self.assertEqual(next(lines), "up\n")
            pg.configure(address, "donor", 0, 2)
            self.assertEqual(next(lines), "ready\n")

            def kill() -> None:
                child.send_signal(signal.SIGKILL)
                child.wait(WAIT_S)

            donor = PGTransport(_Counting(pg, number, kill), 10 * SCALE, "cpu")
            began_s = time.monotonic()
            with self.assertRaises((errors.IncompleteTransfer, errors.DeadlineExceeded)) as caught:
                donor.send_checkpoint([1], 1, state)
            self.assertLess(time.monotonic() - began_s, 11.0 * SCALE)
            self.assertIn("rank 1", str(caught.exception))

    def test_a_receiver_that_stops(self) -> None:
        team = self.team()
        release = threading.Event()
        donor, receiver = self.transports(team.groups, state_dict=lambda: release.wait(WAIT_S) and {})
        sending = threading.Thread(target=lambda: self._late(receiver), daemon=True)
        sending.start()
        began_s = time.monotonic()
        with self.assertRaises(errors.DeadlineExceeded) as caught:
            donor.send_checkpoint([1], 7, {"x": noise(3)}, 0.5)
        self.assertLess(time.monotonic() - began_s, 0.5 + 1.0 * SCALE)
        self.assertIn("rank 1", str(caught.exception))
        release.set()
        sending.join(WAIT_S)
        # the two meet again: what is left of the session that was given up is passed over
        again = Sending(donor, 8, {"x": noise(3)})
        receiver.__dict__["_state_dict"] = None
        self.assertTrue(torch.equal(receiver.recv_checkpoint(0, "", 8)["x"], noise(3)))
        again.finish()

    def _late(self, receiver: Any) -> None:
        try:
            receiver.recv_checkpoint(0, "", 7, 2)
        except errors.FtliteError:
            return


class OverTorchsOwn(_Groups):
    """A dist.ProcessGroup of torch itself."""

    def test_heals(self) -> None:
        # one each, since a client that waits blocks every thread of it
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        stores.append(TCPStore("127.0.0.1", stores[0].port, is_master=False))
        made: dict[int, Any] = {}

        def meet(rank: int) -> None:
            made[rank] = backends.new_gloo(stores[rank], rank, 2, 20 * SCALE, (), ["cpu"])[0]

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        donor, receiver = self.transports([made[0], made[1]])
        state = {"w": block(20 << 20), "small": noise(30), "step": 3}
        for step in range(3):
            sending = Sending(donor, step, state)
            moved = receiver.recv_checkpoint(0, donor.metadata(), step)
            sending.finish()
            self.assertEqual(moved["step"], 3)
            self.assertTrue(torch.equal(moved["w"], state["w"]) and torch.equal(moved["small"], state["small"]))


class Shards(_Groups):
    """DTensors: the local shard goes to the receiver's own, on an equal mesh."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)
        cls.mesh = init_device_mesh("cpu", (1,))

    def shard(self, local: torch.Tensor, place: Any) -> DTensor:
        return DTensor.from_local(local, self.mesh, [place], run_check=False)

    def test_in_place_and_another_placement(self) -> None:
        wanted = noise(600).reshape(30, 20)
        state = {"w": self.shard(wanted.clone(), Shard(0)), "plain": noise(5)}
        for place, fits in ((Shard(0), True), (Replicate(), False)):
            own = {"w": self.shard(torch.zeros(30, 20), place), "plain": torch.zeros(5)}
            groups = self.team().groups
            (donor,), (receiver,) = (
                self.transports(groups[:1]),
                self.transports(groups[1:], state_dict=functools.partial(dict, own)),
            )
            sending = Sending(donor, 3, state)
            if fits:
                moved = receiver.recv_checkpoint(0, donor.metadata(), 3)
                sending.finish()
                self.assertIs(moved["w"], own["w"])
                self.assertTrue(torch.equal(own["w"].to_local(), wanted))
                continue
            with self.assertRaisesRegex(errors.LayoutError, "the same shard of an equal mesh"):
                receiver.recv_checkpoint(0, donor.metadata(), 3)
            with self.assertRaises(errors.LayoutError):
                sending.finish()
            self.assertFalse(own["plain"].any())


del _Contract, _Groups, TransportContract

if __name__ == "__main__":
    unittest.main()
