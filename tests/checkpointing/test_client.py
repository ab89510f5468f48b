# SPDX-License-Identifier: BSD-3-Clause
"""A connection to a donor that ends each connection with its answer, as HTTP/1.0 and many proxies do."""

from __future__ import annotations

import socket
import threading
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest import mock

from tests import load
from tests._support import SHORT_S, WAIT_S, GuardedTestCase

client = load("checkpointing._client")
Deadline = load("_deadline").Deadline


class _Brief(BaseHTTPRequestHandler):
    """Says "later", and for the path that ends in 1 begins a body that it never finishes."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        begun = self.path.endswith("/1")
        self.send_response_only(200 if begun else 503)
        self.send_header("Content-Length", "100" if begun else "5")
        self.send_header("Heal-Protocol", "1")
        self.end_headers()
        self.wfile.write(b"later" if not begun else b"some")
        self.wfile.flush()
        if begun:
            self.rfile.read(1)  # until the client ends the connection


class Counting(GuardedTestCase):
    """What came before a break is counted, to the byte, whether it came with the head or after it."""

    def answer(self, body: bytes) -> tuple[Any, socket.socket]:
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        link = client.Link(client.Donor(f"http://127.0.0.1:{listener.getsockname()[1]}/s/"), "ab", Deadline(SHORT_S))
        self.addCleanup(link.close)
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(link.get(1, "0")))
        asking.start()
        sock, _ = listener.accept()
        self.addCleanup(sock.close)
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 200 x\r\nContent-Length: 5000000\r\n\r\n" + body)
        asking.join(WAIT_S)
        return found[0], sock

    def test_bytes_that_came_with_the_head(self) -> None:
        for count in (1, 1000, 8192, 30_000):
            for first in (0, 10):
                with self.subTest(count=count, first=first), mock.patch.object(client, "IDLE_S", 0.2):
                    body = bytes(i % 251 for i in range(count + first))
                    answer, _ = self.answer(body)
                    if first:
                        answer.fill(memoryview(bytearray(first)))
                    rest = bytearray(1 << 20)
                    with self.assertRaisesRegex(client.Broken, "idle limit"):
                        answer.fill(memoryview(rest))
                    self.assertEqual(answer.done, len(body))
                    self.assertEqual(rest[:count], body[first:])


class Ending(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        server = HTTPServer(("127.0.0.1", 0), _Brief)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        self.addCleanup(thread.join, SHORT_S)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        donor = client.Donor(f"http://127.0.0.1:{server.server_address[1]}/secret/checkpoint/")
        self.link = client.Link(donor, "ab", Deadline(SHORT_S))
        self.addCleanup(self.link.close)

    def test_the_next_request_makes_a_new_connection(self) -> None:
        for _ in range(3):
            with self.assertRaises(client.Later):
                self.link.get(1, "metadata")

    def test_an_answer_under_way_can_be_cut(self) -> None:
        answer = self.link.get(1, "1")
        failed: list[Exception] = []

        def read() -> None:
            try:
                answer.fill(memoryview(bytearray(100)))
            except client.Broken as e:
                failed.append(e)

        reader = threading.Thread(target=read)
        reader.start()
        self.link.cut()
        reader.join(5.0)  # far below the idle limit, which would end it as well
        self.assertFalse(reader.is_alive())
        self.assertEqual(len(failed), 1)
        self.assertLess(answer.done, 100)


if __name__ == "__main__":
    unittest.main()
