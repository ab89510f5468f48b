# SPDX-License-Identifier: BSD-3-Clause
"""Donor and receiver on unequal torch versions: the chunks do not care, the single stream is refused.

FTLITE_TEST_OTHER_PYTHON names an interpreter with another torch.
"""

from __future__ import annotations

import os
import subprocess
import unittest
from typing import Any

import torch

from tests import load
from tests._support import LONG_S, SCALE, GuardedTestCase, child_env
from tests.checkpointing._transport_states import block, noise
from tests.checkpointing.test_http_processes import START_S, child, line_of

HTTPTransport = load("checkpointing").HTTPTransport
errors = load("_errors")

OTHER = os.environ.get("FTLITE_TEST_OTHER_PYTHON", "")
STEP = 4


class SaidToBeUnequal(GuardedTestCase):
    """In one process, the donor says that it has another torch."""

    def pair(self, version: str, **options: Any) -> tuple[Any, Any]:
        donor, receiver = (HTTPTransport(timeout=20 * SCALE, host="127.0.0.1", **options) for _ in range(2))
        self.addCleanup(donor.shutdown)
        self.addCleanup(receiver.shutdown)
        donor._server.torch_version = version
        donor.send_checkpoint([], STEP, {"x": block(300_000), "y": noise(3)})
        return donor, receiver

    def test_the_stream_is_refused_in_one_sentence(self) -> None:
        for version in ("1.13.1", "99.0.0+cu999", "2", "nonsense"):
            with self.subTest(version=version):
                donor, receiver = self.pair(version, num_chunks=0)
                with self.assertRaises(errors.LayoutError) as caught:
                    receiver.recv_checkpoint(0, donor.metadata(), STEP)
                text = str(caught.exception)
                self.assertNotIn("\n", text)
                for word in (version, str(torch.__version__), "num_chunks"):
                    self.assertIn(word, text)

    def test_a_patch_release_is_the_same_version(self) -> None:
        major, minor = str(torch.__version__).split(".")[:2]
        donor, receiver = self.pair(f"{major}.{minor}.77+other", num_chunks=0)
        self.assertEqual(receiver.recv_checkpoint(0, donor.metadata(), STEP)["y"].tolist(), noise(3).tolist())

    def test_chunks_do_not_care(self) -> None:
        donor, receiver = self.pair("99.0.0")
        self.assertEqual(receiver.recv_checkpoint(0, donor.metadata(), STEP)["y"].tolist(), noise(3).tolist())


@unittest.skipUnless(OTHER, "needs FTLITE_TEST_OTHER_PYTHON, an interpreter with another torch")
class ReallyUnequal(GuardedTestCase):
    limit_s = LONG_S

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        done = subprocess.run(
            [OTHER, "-c", "import torch; print(torch.__version__)"],
            env=child_env({"PYTHONWARNINGS": "ignore"}), capture_output=True, text=True, timeout=START_S, check=True,
        )  # fmt: skip
        cls.other_version = done.stdout.strip()
        if cls.other_version.split(".")[:2] == str(torch.__version__).split(".")[:2]:
            raise unittest.SkipTest(f"the other interpreter has torch {cls.other_version} as well")

    def test_both_ways(self) -> None:
        for donor_python, receiver_python in (({}, {"python": OTHER}), ({"python": OTHER}, {})):
            with self.subTest(donor=donor_python), child("donor", "3", **donor_python) as donor:
                with child("receiver", **receiver_python) as chunks, child("stream", **receiver_python) as stream:
                    url, expected = line_of(donor), line_of(donor)
                    for each in (chunks, stream):
                        each.stdin.write(url + "\n")
                        each.stdin.flush()
                    self.assertEqual([line_of(chunks) for _ in range(3)], [expected] * 3)
                    refusal = line_of(stream)
                self.assertTrue(
                    refusal.startswith("LayoutError the single stream is good between equal torch"), refusal
                )
                self.assertIn(self.other_version, refusal)
