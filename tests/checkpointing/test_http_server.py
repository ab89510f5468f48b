# SPDX-License-Identifier: BSD-3-Clause
"""The donor's server against strangers, laggards and crowds."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import random
import socket
import threading
import time
import weakref
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import torch

from tests._support import SCALE, WAIT_S, captured_logs, wait_until
from tests.checkpointing import _wire
from tests.checkpointing._serving import STEP, ServerTestCase, errors, server, serving_threads
from tests.checkpointing._transport_states import block, clone, noise


class Strangers(ServerTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = {
            "x": noise(64),
            "marker": torch.frombuffer(bytearray(b"MARKER-OF-THE-STATE" * 20), dtype=torch.uint8),
        }
        self.served = self.donor(self.state)
        self.secret = urlsplit(self.served.metadata()).path.split("/")[1]

    def get(self, path: str, **headers: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *(f"{n}: {v}" for n, v in headers.items())]
        return self.raw(self.served, "\r\n".join([*lines, "", ""]).encode("utf-8"))

    def test_the_secret_is_long_and_differs(self) -> None:
        other = urlsplit(self.transport().metadata()).path.split("/")[1]
        self.assertRegex(self.secret, r"^[0-9a-f]{32,}$")
        self.assertNotEqual(self.secret, other)
        self.assertRegex(self.served.metadata(), r"^http://127\.0\.0\.1:\d+/[0-9a-f]+/checkpoint/$")

    def test_requests_that_nobody_of_ours_makes(self) -> None:
        path = f"/{self.secret}/checkpoint"
        for bad in (
            "/", "", "//", f"/checkpoint/{STEP}/full",
            f"//checkpoint/{STEP}/metadata", f"/{'0' * 32}/checkpoint/{STEP}/0",
            f"/{self.secret[:-1]}/checkpoint/{STEP}/metadata", f"/{self.secret}0/checkpoint/{STEP}/metadata",
            f"/{self.secret.upper()}x/checkpoint/{STEP}/0", f"/käse/checkpoint/{STEP}/full",
            f"/%00/checkpoint/{STEP}/full", f"/x/../{self.secret}/checkpoint/{STEP}/full",
            f"/{self.secret}/other/{STEP}/full", f"{path}/{STEP}", f"{path}/{STEP}/", f"{path}/{STEP}/full/",
            path, path + "/",
            f"{path}/{STEP}/-1", f"{path}/{STEP}/1000000", f"{path}/{STEP}/{10**30}", f"{path}/{10**30}/metadata",
            f"{path}/-1/metadata", f"{path}/{STEP}.0/metadata", f"{path}/ {STEP}/0", f"{path}/{STEP}/0x0",
            f"{path}/{STEP}/..",
            f"{path}/{STEP}/../{STEP}/full", f"{path}/{STEP}/٣", f"{path}/{STEP}/%30", f"{path}/{STEP}/full?x=1",
            f"http://other/{self.secret}/checkpoint/{STEP}/full",
        ):  # fmt: skip
            with self.subTest(path=bad):
                self.refused(self.get(bad))
        for bad in ("bytes=-1", "bytes=5-1-", "bytes=99999999999-", "bytes=0-5", "bytes=" + "9" * 40 + "-", "x"):
            with self.subTest(range=bad):
                self.refused(self.get(f"{path}/{STEP}/0", Range=bad))
        self.heals(self.served, self.state)

    def refused(self, answer: bytes) -> None:
        self.assertRegex(answer.split(b"\r\n")[0], rb"^HTTP/1\.1 (400|404|409) ")
        for word in (b"MARKER", b"Traceback", b'File "', b"Python", b"BaseHTTP"):
            self.assertNotIn(word, answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        self.assertIn(b"Content-Length: %d" % len(body), head)

    def test_another_step_is_refused_with_the_reason(self) -> None:
        answer = self.get(f"/{self.secret}/checkpoint/{STEP + 1}/metadata")
        self.assertRegex(answer.split(b"\r\n")[0], rb"^HTTP/1\.1 409 ")
        self.assertIn(b"step 4 is served here, not step 5", answer)

    def test_what_is_no_request(self) -> None:
        path = f"/{self.secret}/checkpoint/{STEP}/0".encode()
        for bad in (
            b"\r\n", b"\0" * 100, b"x" * 20_000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.x\r\n\r\n",
            b"GET / FTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET " + path + b" HTTP/1.1\r\nno colon\r\n\r\n", b"GET " + path + b" HTTP/1.1 x\r\n\r\n",
            b"BREW " + path + b" HTTP/1.1\r\n\r\n", b"POST " + path + b" HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
            b"PUT " + path + b" HTTP/1.1\r\n\r\n", b"DELETE " + path + b" HTTP/1.1\r\n\r\n",
            b"HEAD " + path + b" HTTP/1.1\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n",
            b"GET " + b"/a" * 60_000 + b" HTTP/1.1\r\n\r\n",
        ):  # fmt: skip
            with self.subTest(request=bad[:40]):
                answer = self.raw(self.served, bad)
                if b"no colon" not in bad:  # which http.client's parser forgives
                    self.assertNotIn(b"MARKER", answer)
                self.assertNotIn(b"Traceback", answer)
                self.assertNotRegex(answer.split(b"\r\n")[0], rb" 500 ")
        self.heals(self.served, self.state)

    def test_a_head_that_does_not_end(self) -> None:
        """With the secret or without: it is not answered with state, and costs the server nothing."""
        for secret in (self.secret, "0" * 32):
            request = f"GET /{secret}/checkpoint/{STEP}/full HTTP/1.1\r\nX: ".encode()
            with self.subTest(known=secret == self.secret), self.connection(self.served) as sock:
                answer = b""
                with contextlib.suppress(ConnectionError):
                    sock.sendall(request + b"y" * (1 << 20) + b"\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    answer = sock.recv(1 << 16)
                self.assertNotIn(b" 200 ", answer[:20])
                self.assertNotIn(b"MARKER", answer)
        self.heals(self.served, self.state)

    def test_a_head_that_is_slow(self) -> None:
        with mock.patch.object(server, "HEAD_S", 0.3), self.connection(self.served) as sock:
            sock.sendall(f"GET /{self.secret}/checkpoint/{STEP}/full HTTP/1.1\r\n".encode())
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = sock.recv(1 << 16)
            self.assertEqual(answer, b"")

    def test_a_head_request_and_a_post_are_refused_in_our_form(self) -> None:
        for method in ("HEAD", "POST"):
            answer = self.raw(self.served, f"{method} /x HTTP/1.1\r\n\r\n".encode())
            self.assertRegex(answer.split(b"\r\n")[0], rb"^HTTP/1\.1 (400|404|405|501) ")
            self.assertNotIn(b"<", answer)
            self.assertIn(b"Connection: close", answer)

    def test_hundreds_of_random_requests(self) -> None:
        rng = random.Random(5)
        words = [
            b"GET ", b"/", self.secret.encode(), b"checkpoint", b"4", b"0", b"full", b"..", b" HTTP/1.1", b"\r\n",
            b"\0", b"Range: bytes=", b"-", b"metadatum",
            b"\xff", b"%2f", b"Content-Length: 99", b": ",
        ]  # fmt: skip
        for _ in range(600):
            request = b"".join(rng.choice(words) for _ in range(rng.randrange(1, 12)))
            with self.connection(self.served) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(request)
                if rng.random() < 0.1:
                    _wire.close_at_once(sock)
        wait_until(lambda: serving_threads() == 0, "the connections of strangers end")
        self.heals(self.served, self.state)

    def test_silent_connections(self) -> None:
        silent = [socket.create_connection(_wire.address(self.served.metadata()), WAIT_S) for _ in range(500)]
        try:
            began_s = time.monotonic()
            self.heals(self.served, self.state)
            self.assertLess(time.monotonic() - began_s, 3 * SCALE)
            self.assertLessEqual(serving_threads(), server.MAX_CONNECTIONS)
        finally:
            for sock in silent:
                sock.close()

    def test_one_connection_for_many_requests(self) -> None:
        connection = http.client.HTTPConnection(*_wire.address(self.served.metadata()), timeout=WAIT_S)
        try:
            sock = None
            for what, status in (
                ("metadata", 200),
                ("0", 200),
                ("9", 404),
                ("full", 200),
                ("nonsense", 400),
                ("0", 200),
            ):
                connection.request("GET", f"/{self.secret}/checkpoint/{STEP}/{what}")
                response = connection.getresponse()
                self.assertEqual((response.status, response.version), (status, 11))
                self.assertEqual(len(response.read()), int(response.headers["Content-Length"]))
                self.assertIn(sock, (None, connection.sock))
                sock = connection.sock
            self.assertEqual(serving_threads(), 1)
        finally:
            connection.close()


class Readers(ServerTestCase):
    def test_a_reader_that_stops_reading(self) -> None:
        """Nobody waits for it longer than the constructor's timeout, and what follows works at once."""
        state = {"x": block(40 << 20)}
        for what in ("0", "full"):
            with self.subTest(what=what):
                donor = self.donor(state, timeout=0.5, num_chunks=1)
                path = urlsplit(donor.metadata()).path
                with self.connection(donor) as sock:
                    sock.sendall(f"GET {path}{STEP}/{what} HTTP/1.1\r\n\r\n".encode())
                    self.assertTrue(sock.recv(1))
                    began_s = time.monotonic()
                    donor.disallow_checkpoint()
                    took_s = time.monotonic() - began_s
                    self.assertGreaterEqual(took_s, 0.4)
                    self.assertLess(took_s, 0.5 + 1.0 * SCALE)
                    donor.send_checkpoint([], STEP, state)
                    self.heals(donor, state)
                    began_s = time.monotonic()
                    donor.disallow_checkpoint()
                    self.assertLess(time.monotonic() - began_s, 0.4)
                wait_until(lambda: serving_threads() == 0, "the laggard's thread ends")

    def test_a_reader_that_was_cut_off_knows(self) -> None:
        state = {"x": block(40 << 20)}
        donor = self.donor(state, timeout=0.5)
        reached = threading.Event()
        over = threading.Event()

        def on_bytes(data: bytes, passed: int) -> bytes:
            if passed > 5 << 20:
                reached.set()
                over.wait(WAIT_S)
            return data

        caught: list[BaseException] = []

        def read(url: str) -> None:
            try:
                self.transport().recv_checkpoint(0, url, STEP)
            except errors.TransferError as e:
                caught.append(e)

        with _wire.Proxy(_wire.address(donor.metadata()), on_bytes) as proxy:
            reader = threading.Thread(target=read, args=(_wire.through(donor.metadata(), proxy.port),))
            reader.start()
            self.assertTrue(reached.wait(WAIT_S))
            donor.disallow_checkpoint()
            donor.send_checkpoint([], STEP + 1, state)
            over.set()
            reader.join(WAIT_S)
        self.assertEqual(len(caught), 1)
        self.assertIsInstance(caught[0], (errors.NotServing, errors.IncompleteTransfer))

    def test_disallow_lets_a_reader_finish(self) -> None:
        state = {"x": block(20 << 20)}
        donor = self.donor(state)
        reached = threading.Event()

        def on_bytes(data: bytes, passed: int) -> bytes:
            if passed > 1 << 20:
                reached.set()
                time.sleep(0.001)
            return data

        moved: list[Any] = []
        with _wire.Proxy(_wire.address(donor.metadata()), on_bytes) as proxy:
            url = _wire.through(donor.metadata(), proxy.port)
            receiver = self.transport()
            reader = threading.Thread(target=lambda: moved.append(receiver.recv_checkpoint(0, url, STEP)))
            reader.start()
            self.assertTrue(reached.wait(WAIT_S))
            donor.disallow_checkpoint()
            reader.join(WAIT_S)
        self.assertTrue(torch.equal(moved[0]["x"], state["x"]))

    def test_a_new_step_does_not_wait_for_a_laggard_longer_than_it_says(self) -> None:
        state = {"x": block(40 << 20)}
        donor = self.donor(state, num_chunks=1)
        with self.connection(donor) as sock:
            sock.sendall(f"GET {urlsplit(donor.metadata()).path}{STEP}/0 HTTP/1.1\r\n\r\n".encode())
            self.assertTrue(sock.recv(1))
            for step, timeout in ((STEP + 1, 0), (STEP, 0.2)):
                began_s = time.monotonic()
                donor.send_checkpoint([], step, state, timeout)
                self.assertLess(time.monotonic() - began_s, 0.2 + 1.0 * SCALE)
            self.heals(donor, state)

    def test_a_fork_of_the_receiver_is_no_reader(self) -> None:
        """A worker that was forked in the middle of a transfer holds copies of its connections."""
        donor = self.donor({"x": block(20 << 20)})
        copies: list[int] = []

        def progress(_done: int, _total: int) -> None:
            if not copies:
                with os.scandir("/proc/self/fd") as entries:
                    numbers = [int(entry.name) for entry in entries if os.path.exists(entry.path)]
                copies.extend(os.dup(n) for n in numbers if os.readlink(f"/proc/self/fd/{n}").startswith("socket:"))

        try:
            self.transport(progress=progress).recv_checkpoint(0, donor.metadata(), STEP)
            self.assertTrue(copies)
            began_s = time.monotonic()
            donor.disallow_checkpoint()
            self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)
        finally:
            for number in copies:
                os.close(number)

    def test_a_fork_of_the_donor_keeps_nothing_open(self) -> None:
        """A DataLoader's worker, say: it must not hold the port, nor readers that the donor has lost."""
        donor = self.donor({"x": block(300_000)})
        self.heals(donor, {"x": block(300_000)})
        port = urlsplit(donor.metadata()).port
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:  # the fork: one byte for each thing that is right
            right = b""
            try:
                try:
                    donor.send_checkpoint([], STEP + 1, {})
                except errors.StateError:
                    right += b"s"
                donor.shutdown()
                right += b"d"
            finally:
                theirs.sendall(right or b"-")
                ours.close()
                theirs.recv(1)  # until the test is done with it
                os._exit(0)
        try:
            theirs.close()
            ours.settimeout(WAIT_S)
            self.assertEqual(ours.recv(10), b"sd")
            self.heals(donor, {"x": block(300_000)})  # the fork has ended nothing of the donor's
            donor.shutdown()
            self.transport(port=port)
        finally:
            ours.close()
            os.waitpid(pid, 0)

    def test_an_earlier_state_is_not_kept(self) -> None:
        donor = self.transport(snapshot="none")
        for num_chunks in (None, 0):
            tensor = block(2 << 20)
            gone = weakref.ref(tensor)
            donor.send_checkpoint([], STEP, {"x": tensor})
            self.heals(donor, {"x": tensor}, num_chunks=num_chunks)
            del tensor
            donor.send_checkpoint([], STEP + 1, {})
            gc.collect()
            wait_until(lambda gone=gone: gone() is None, "the earlier state is let go")

    def test_two_replicas_heal_each_other_at_once(self) -> None:
        states = [{"x": block(3 << 20, seed=i)} for i in range(2)]
        both = [self.donor(state) for state in states]
        moved: dict[int, Any] = {}

        def read(i: int) -> None:
            moved[i] = both[i].recv_checkpoint(0, both[1 - i].metadata(), STEP)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for i in range(2):
            self.assertTrue(torch.equal(moved[i]["x"], states[1 - i]["x"]))

    def test_disallow_raises_nothing(self) -> None:
        donor = self.donor({"x": noise(3)})
        with captured_logs() as records, mock.patch.object(donor._gate, "close", side_effect=OSError("no")):
            donor.disallow_checkpoint()
        self.assertEqual([record.levelname for record in records], ["ERROR"])

    def test_allow_again(self) -> None:
        state = {"x": noise(3)}
        donor = self.donor(state)
        donor.disallow_checkpoint()
        with self.assertRaises(errors.StateError):
            donor.allow_checkpoint(STEP + 1)
        donor.allow_checkpoint(STEP)
        self.heals(donor, state)

    def test_many_readers_at_once(self) -> None:
        self.crowd(16, max_readers=16)

    def test_more_readers_than_may_come_in(self) -> None:
        self.crowd(8, max_readers=2)

    def crowd(self, count: int, max_readers: int) -> None:
        state = {"x": block(4 << 20), "y": noise(100)}
        donor = self.donor(clone(state), max_readers=max_readers)
        failures: list[BaseException] = []
        most = 0

        def read() -> None:
            nonlocal most
            try:
                moved = receivers.pop().recv_checkpoint(0, donor.metadata(), STEP)
                if not (torch.equal(moved["x"], state["x"]) and torch.equal(moved["y"], state["y"])):
                    raise ValueError("wrong bits")
            except BaseException as e:
                failures.append(e)

        receivers = [self.transport(num_chunks=4) for _ in range(count)]
        threads = [threading.Thread(target=read) for _ in range(count)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, len(donor._gate._gate.readers))
            time.sleep(0.001)
        self.assertEqual(failures, [])
        self.assertLessEqual(most, max_readers)

    def test_a_burst_of_connections_is_bounded(self) -> None:
        donor = self.donor({"x": noise(3)})
        path = urlsplit(donor.metadata()).path
        socks = []
        try:
            for _ in range(server.MAX_CONNECTIONS + 20):
                sock = socket.create_connection(_wire.address(donor.metadata()), WAIT_S)
                socks.append(sock)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(f"GET {path}{STEP}/metadata HTTP/1.1\r\nHeal-Reader: ab\r\n\r\n".encode())
                    sock.recv(100)
            self.assertLessEqual(serving_threads(), server.MAX_CONNECTIONS)
        finally:
            for sock in socks:
                sock.close()
        wait_until(lambda: serving_threads() == 0, "the connections end")
        self.heals(donor, {"x": noise(3)})
