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


class Trainer(unittest.TestCase):
    def test_the_memory_of_publish_outlives_a_new_data(self) -> None:
        weight = torch.nn.Parameter(torch.full((1 << 18,), 3.0))
        served = published({"w": weight})
        weight.data = torch.zeros(1)
        blocks = b"".join(bytes(block) for block, _ in served.blocks(0, served.flat.total))
        self.assertEqual(blocks, struct.pack("=f", 3.0) * (1 << 18))


class Streams(unittest.TestCase):
    def test_a_storage_goes_out_in_pieces(self) -> None:
        sent: list[int] = []
        with io.BufferedWriter(servers._Body(lambda part: sent.append(len(part))), 1 << 20) as body:
            body.write(bytes(5 << 20))
        self.assertEqual(sum(sent), 5 << 20)
        self.assertLessEqual(max(sent), 1 << 20)


if __name__ == "__main__":
    unittest.main()
