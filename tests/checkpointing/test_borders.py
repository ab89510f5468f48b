# SPDX-License-Identifier: BSD-3-Clause
"""No byte is read or written beyond memory that is the state's own, whatever a donor says or a trainer does."""

from __future__ import annotations

import io
import json
import struct
import unittest

import torch

from tests import load

errors = load("_errors")
manifests = load("checkpointing._manifest")
plans = load("checkpointing._plan")
servers = load("checkpointing._server")
snapshots = load("checkpointing._snapshot")
stage = load("checkpointing._device").HostStage


def published(state: object, snapshot: str = "none") -> object:
    return snapshots.publish(state, 1, weights_only=False, snapshot=snapshot, num_chunks=None, stage=stage())


def bent(state: object, **fields: object) -> bytes:
    """The document about ``state`` with some of its fields replaced."""
    return json.dumps({**json.loads(published(state).document), **fields}).encode()


class HostileDocuments(unittest.TestCase):
    def test_a_region_larger_than_its_tensors(self) -> None:
        size = 1 << 30
        with self.assertRaises(errors.IntegrityError):
            manifests.parse(bent({"w": torch.zeros(1)}, sizes=[size], ends=[size], sums=[0]))

    def test_a_region_without_tensors(self) -> None:
        with self.assertRaises(errors.IntegrityError):
            manifests.parse(bent({"w": torch.zeros(1)}, sizes=[4, 4], ends=[8], sums=[0]))

    def test_a_region_of_no_bytes(self) -> None:
        with self.assertRaises(errors.IntegrityError):
            manifests.parse(bent({"w": torch.zeros(1)}, sizes=[4, 0]))

    def test_an_object_that_has_one_byte_for_many(self) -> None:
        document = bent({"x": {1, 2}}, tree=["d", {"x": ["p", 0]}])
        fields = json.loads(document)
        fields.update(specs=[["uint8", [1 << 40], [0], 0]], regions=[1], offsets=[0], kinds=[0])
        fields.update(sizes=[1], large=0, ends=[1], sums=[0])
        with self.assertRaises(errors.IntegrityError):
            plans.Plan(manifests.parse(json.dumps(fields).encode()), {})


class FreedMemory(unittest.TestCase):
    """A storage that was shrunk under its tensors, as sharding libraries do, is no memory to read or to write."""

    def freed(self, nbytes: int) -> list[torch.Tensor]:
        tensor = torch.ones(64 << 20, dtype=torch.uint8).view(1 << 10, -1)
        views = [tensor, tensor.t(), tensor[:, 1:]]
        tensor.untyped_storage().resize_(nbytes)
        return views

    def test_at_the_donor(self) -> None:
        for nbytes in (0, (64 << 20) - 1):
            for tensor in self.freed(nbytes):
                with self.assertRaisesRegex(errors.LayoutError, rf"\['w'\].*{nbytes} bytes"):
                    published({"w": tensor})

    def test_at_the_receiver(self) -> None:
        manifest = manifests.parse(published({"w": torch.ones(1 << 10, 1 << 16, dtype=torch.uint8)}).document)
        for nbytes in (0, (64 << 20) - 1):
            with self.assertRaisesRegex(errors.LayoutError, rf"\['w'\].*{nbytes} bytes"):
                plans.Plan(manifest, {"w": self.freed(nbytes)[0]})

    def test_what_has_no_elements_needs_none(self) -> None:
        published({"w": torch.ones(4)[4:], "x": torch.empty(0, 3)})


class Trainer(unittest.TestCase):
    def test_the_memory_of_publish_outlives_a_new_data(self) -> None:
        weight = torch.nn.Parameter(torch.full((1 << 18,), 3.0))
        served = published({"w": weight})
        weight.data = torch.zeros(1)
        blocks = b"".join(bytes(block) for block, _ in served.blocks(0, served.flat.total))
        self.assertEqual(blocks, struct.pack("=f", 3.0) * (1 << 18))


class _Connection:
    """Takes what is sent, and remembers in what pieces."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def sendall(self, data: memoryview) -> None:
        self.sent.append(len(data))


class Pieces(unittest.TestCase):
    """What is sent goes out in pieces, since a send has one time limit, however much it is given."""

    def setUp(self) -> None:
        self.handler = servers._Handler.__new__(servers._Handler)
        self.handler.connection = self.connection = _Connection()

    def test_metadata(self) -> None:
        self.handler._send(bytes(5 << 20))
        self.check()

    def test_a_storage_of_a_stream(self) -> None:
        with io.BufferedWriter(servers._Body(self.handler._send, 5 << 20), 1 << 20) as body:
            body.write(bytes(5 << 20))
        self.check()

    def check(self) -> None:
        self.assertEqual(sum(self.connection.sent), 5 << 20)
        self.assertLessEqual(max(self.connection.sent), 1 << 20)


if __name__ == "__main__":
    unittest.main()
