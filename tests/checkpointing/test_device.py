# SPDX-License-Identifier: BSD-3-Clause
"""Device memory to the host. What must hold: the bytes are those that the caller's stream had produced; no host
memory is complete before its copy is; pinned memory stays within its bound and is used again.

Without a device a made-up one plays its part: it does nothing until somebody waits for it, and overwrites memory
that nobody holds any more.
"""

from __future__ import annotations

import gc
import random
import unittest
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import GuardedTestCase, requires_cuda
from tests.checkpointing._states import MISSING, flat_bytes, load_blob, noise, plan, publish, raw, same, tensors

device = load("checkpointing._device")


class FakeModule:
    """What ``torch.cuda`` is to a device: streams and events, of which only the order is real.

    Work of a stream is done when an event that was recorded after it is waited for; until then it is queued.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: list[Callable[[], None]] = []
        module = self

        class Event:
            def record(self, stream: Any) -> None:
                self.upto = len(module.queue)
                module.log.append("record")

            def synchronize(self) -> None:
                for i in range(self.upto):
                    module.queue[i]()
                    module.queue[i] = lambda: None
                module.log.append("wait")

        class Stream:
            def __init__(self, of: Any = None) -> None:
                module.log.append("stream")

            def wait_stream(self, other: Any) -> None:
                module.log.append("after the caller's")

            def synchronize(self) -> None:
                module.log.append("settle")

        self.Event, self.Stream = Event, Stream
        self.callers = Stream()
        self.log.clear()

    def current_stream(self, of: Any) -> Any:
        return self.callers

    def stream(self, which: Any) -> Any:
        return mock.MagicMock()


class FakeBytes:
    """uint8 memory of a device: a slice of it is copied when the device gets round to it."""

    def __init__(self, module: FakeModule, data: torch.Tensor) -> None:
        self.module, self.data = module, data
        self.device = torch.device("cuda", 0)

    def numel(self) -> int:
        return self.data.numel()

    def __getitem__(self, key: slice) -> FakeBytes:
        return FakeBytes(self.module, self.data[key])


class Buffer:
    """A pinned buffer whose ``copy_`` from the device is queued."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)

    def numel(self) -> int:
        return self.memory.numel()

    def __getitem__(self, key: slice) -> Any:
        part = self.memory[key]

        class Part(torch.Tensor):
            def copy_(self, source: Any, non_blocking: bool = False) -> Any:
                target, data = part, source.data
                source.module.queue.append(lambda: target.copy_(data))
                return self

        return part.as_subclass(Part)


class Staged(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.module = FakeModule()
        self.made: list[int] = []

        def pinned(nbytes: int, of: torch.device) -> Buffer:
            self.made.append(nbytes)
            return Buffer(nbytes)

        for target, name, value in (
            (torch, "get_device_module", lambda of: self.module),
            (device, "pinned", pinned),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def source(self, nbytes: int, seed: int) -> FakeBytes:
        return FakeBytes(self.module, noise((nbytes,), torch.uint8, seed=seed))

    def test_random_sizes_arrive_whole(self) -> None:
        for seed in range(20):
            rng = random.Random(seed)
            stage = device.HostStage(slot_bytes=rng.choice((3, 7, 64, 1000)))
            for _ in range(2):  # a second publish uses the same buffers
                sources = [self.source(rng.randrange(90), seed=i) for i in range(rng.randrange(6))]
                hosts = [torch.zeros(s.numel(), dtype=torch.uint8) for s in sources]
                for host, source in zip(hosts, sources):
                    stage.copy(host, source)
                stage.finish()
                for host, source in zip(hosts, sources):
                    self.assertTrue(torch.equal(host, source.data))

    def test_two_slots_however_much_there_is(self) -> None:
        stage = device.HostStage(slot_bytes=64)
        for _ in range(5):
            stage.copy(torch.zeros(1000, dtype=torch.uint8), self.source(1000, 1))
            stage.finish()
        self.assertEqual(self.made, [64, 64])

    def test_every_copy_comes_after_the_callers_work(self) -> None:
        stage = device.HostStage(slot_bytes=64)
        for i in range(3):
            stage.copy(torch.zeros(10, dtype=torch.uint8), self.source(10, i))
            self.assertEqual(self.module.log[-1], "after the caller's")
        self.assertEqual(self.module.log.count("stream"), 1)

    def test_a_full_slot_is_marked_and_the_other_one_emptied_first(self) -> None:
        stage = device.HostStage(slot_bytes=10)
        stage.copy(torch.zeros(40, dtype=torch.uint8), self.source(40, 1))
        self.assertEqual(self.module.log[2:], ["record", "record", "wait", "record", "wait", "record", "wait"])

    def test_small_ones_share_a_slot(self) -> None:
        stage = device.HostStage(slot_bytes=100)
        for i in range(9):
            stage.copy(torch.zeros(10, dtype=torch.uint8), self.source(10, i))
        self.assertNotIn("record", self.module.log)

    def test_a_source_is_held_until_its_copy_is_done(self) -> None:
        stage = device.HostStage(slot_bytes=100)
        source = self.source(10, 1)
        gone = weakref.ref(source)
        stage.copy(torch.zeros(10, dtype=torch.uint8), source)
        del source
        gc.collect()
        self.assertIsNotNone(gone(), "its memory could be given to another tensor while the copy waits")
        stage.finish()
        gc.collect()
        self.assertIsNone(gone())

    def test_finish_may_come_without_copies(self) -> None:
        stage = device.HostStage()
        stage.finish()
        stage.copy(torch.zeros(0, dtype=torch.uint8), self.source(0, 1))
        stage.finish()
        stage.finish()

    def test_settle_waits_for_the_current_stream(self) -> None:
        device.settle(torch.device("cuda", 0))
        self.assertEqual(self.module.log, ["settle"])
        device.settle(torch.device("cpu"))
        self.assertEqual(self.module.log, ["settle"])


class OnTheHost(unittest.TestCase):
    def test_host_memory_is_copied_at_once(self) -> None:
        host = torch.zeros(9, dtype=torch.uint8)
        stage = device.HostStage()
        stage.copy(host, noise((9,), torch.uint8))
        self.assertTrue(torch.equal(host, noise((9,), torch.uint8)))
        stage.finish()

    def test_a_buffer_for_the_cpu_is_not_pinned(self) -> None:
        buffer = device.pinned(10, torch.device("cpu"))
        self.assertEqual((buffer.numel(), buffer.dtype), (10, torch.uint8))


@requires_cuda
class Cuda(GuardedTestCase):
    """With a device: the state of a donor on it, and a receiver on it."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        # the driver opens what it keeps: before the leak guard looks
        torch.zeros(10, device="cuda").cpu()
        device.pinned(10, torch.device("cuda"))

    def state(self, of: str = "cuda") -> dict[str, Any]:
        base = noise((600, 50), seed=1).to(of)
        return {
            "large": noise((3_000_000,), seed=2).to(of), "weight": torch.nn.Parameter(noise((30, 40), seed=3).to(of)),
            "column": base[:, 7], "turned": noise((50, 60), seed=4).to(of).t(), "host": noise((5, 5)),
            "bf16": noise((9,), torch.bfloat16).to(of), "step": torch.tensor(3.0), "n": 3,
            "many": [noise((100,), seed=i).to(of) for i in range(200)], "empty": torch.empty(0, 3, device=of),
            "views": list(noise((100,), seed=5).to(of).split(30)),
            "conj": torch.tensor([1 + 2j, 3 - 4j]).to(of).conj(),
        }  # fmt: skip

    def heal(self, state: Any, own: Any, **planned: Any) -> Any:
        snapshot = publish(state)
        made = plan(snapshot, own, **planned)
        made.settle()
        snapshot.copy_to(made.intervals)
        out = made.finish(load_blob)
        torch.cuda.synchronize()
        return out

    def alike(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        self.assertEqual((got.dtype, got.shape), (wanted.dtype, wanted.shape))
        self.assertTrue(raw(got.detach().cpu().resolve_conj()) == raw(wanted.detach().resolve_conj()))

    def test_to_the_host(self) -> None:
        same(self, self.heal(self.state(), MISSING), self.state("cpu"))

    def test_from_device_to_device_in_place(self) -> None:
        own = self.state()
        with torch.no_grad():
            for tensor in tensors(own):
                tensor.zero_()
        out = self.heal(self.state(), own)
        for got, mine, wanted in zip(tensors(out), tensors(own), tensors(self.state("cpu")), strict=True):
            self.assertIs(got, mine)
            self.alike(got, wanted)

    def test_from_the_host_to_a_device(self) -> None:
        out = self.heal(self.state("cpu"), MISSING, device=torch.device("cuda"))
        for got, wanted in zip(tensors(out), tensors(self.state("cpu")), strict=True):
            self.assertEqual(got.device.type, "cuda")
            self.assertEqual(got.stride(), wanted.stride())
            self.alike(got, wanted)

    def test_the_bytes_are_those_of_publish(self) -> None:
        # what is queued before must be in them, and what is queued after must not
        x, columns = torch.zeros(8_000_000, device="cuda"), torch.zeros(2000, 4000, device="cuda")
        a = torch.randn(2000, 2000, device="cuda")
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        for tensor in (x, columns):
            tensor.fill_(1.0)
        snapshot = publish({"x": x, "column": columns[:, 1]})
        for tensor in (x, columns):
            tensor.fill_(2.0)
        torch.cuda.synchronize()
        served = torch.frombuffer(bytearray(flat_bytes(snapshot)), dtype=torch.float32)
        self.assertEqual(served.unique().tolist(), [1.0])

    def test_many_packed_views_in_turn(self) -> None:
        # each is gathered into memory that is free again at once: the copy to the host must still find it
        state = [torch.full((500_000, 4), float(i), device="cuda")[:, 1] for i in range(40)]
        for i, got in enumerate(self.heal(state, MISSING)):
            self.assertEqual(got.unique().tolist(), [float(i)])
