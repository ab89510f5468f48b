# SPDX-License-Identifier: BSD-3-Clause
"""Addresses of stores, and clients of them."""

from __future__ import annotations

import time
import unittest

from torch.distributed import TCPStore

from tests import load
from tests._support import SCALE, GuardedTestCase, free_port
from tests.process_group._contract_life import quiet_stderr

create_store_client = load("process_group").create_store_client
errors = load("_errors")
net = load("_net")


class Addresses(unittest.TestCase):
    def test_taken_apart(self) -> None:
        for text, parts in {
            "host:29500/a/b": ("host", 29500, "a/b"),
            "10.0.0.1:1": ("10.0.0.1", 1, ""),
            "[fe80::1%eth0]:65535/x": ("fe80::1%eth0", 65535, "x"),
            "::1:29500/x": ("::1", 29500, "x"),
        }.items():
            self.assertEqual(net.split_store_address(text), parts)

    def test_refused(self) -> None:
        for text in ("", "host", "host/x", "host:/x", ":1/x", "host:0/x", "host:65536/x", "host:port/x", "host:-1/x"):
            with self.subTest(text), self.assertRaises(ValueError) as caught:
                net.split_store_address(text)
            self.assertIn(repr(text), str(caught.exception))


class Clients(GuardedTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        """The first TCPStore of a process opens a pipe that stays."""
        super().setUpClass()
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def test_below_its_prefix(self) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        one = create_store_client(f"127.0.0.1:{server.port}/some/prefix", 5 * SCALE)
        other = create_store_client(f"127.0.0.1:{server.port}/other", 5 * SCALE)
        one.set("key", "value")
        self.assertEqual(one.get("key"), b"value")
        self.assertEqual(server.get("some/prefix/key"), b"value")
        self.assertEqual(other.add("key", 1), 1)

    def test_nobody_there(self) -> None:
        started_s = time.monotonic()
        with quiet_stderr(), self.assertRaises(errors.DeadlineExceeded) as caught:
            create_store_client(f"127.0.0.1:{free_port()}/x", 0.5 * SCALE)
        self.assertLess(time.monotonic() - started_s, 5 * SCALE)
        self.assertIn("127.0.0.1:", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
