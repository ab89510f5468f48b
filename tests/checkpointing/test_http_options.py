# SPDX-License-Identifier: BSD-3-Clause
"""Addresses and ports, the constructor's options, what the log says."""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
import time
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import torch

from tests import load
from tests._support import SCALE, WAIT_S, captured_logs, free_port, wait_until
from tests.checkpointing import _wire
from tests.checkpointing._serving import STEP, HTTPTransport, ServerTestCase, errors, has_ipv6
from tests.checkpointing._transport_states import block, noise

transport = load("checkpointing._http_transport")


class Addresses(ServerTestCase):
    def test_proxy_variables_are_ignored(self) -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        names = ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")
        with mock.patch.dict(os.environ, dict.fromkeys(names, dead)):
            os.environ.pop("no_proxy", None)
            self.heals(self.donor({"x": noise(3)}), {"x": noise(3)})

    def test_ports(self) -> None:
        first = self.transport(port=free_port())
        port = _wire.address(first.metadata())[1]
        with self.assertRaises(errors.TransferError) as caught:
            HTTPTransport(host="127.0.0.1", port=port)
        self.assertIn(str(port), str(caught.exception))
        taken = [first, *(self.transport(port=range(port, port + 10)) for _ in range(2))]
        ports = [_wire.address(each.metadata())[1] for each in taken]
        self.assertEqual(len(set(ports)), 3)
        self.assertTrue(all(port <= each < port + 10 for each in ports))
        with self.assertRaises(errors.TransferError) as caught:
            HTTPTransport(host="127.0.0.1", port=range(port, port + 1))
        self.assertIn(f"tried {port}", str(caught.exception))

    def test_the_port_is_free_after_shutdown(self) -> None:
        port = free_port()
        for _ in range(3):
            made = HTTPTransport(host="127.0.0.1", port=port)
            made.send_checkpoint([], STEP, {"x": noise(3)})
            self.heals(made, {"x": noise(3)})
            made.shutdown()

    def test_an_interface_by_name(self) -> None:
        for options, environ in (({"interface": "lo"}, {}), ({}, {"FTLITE_INTERFACE": "lo"})):
            with self.subTest(options=options, environ=environ), mock.patch.dict(os.environ, environ):
                donor = self.transport(host=None, **options)
                self.assertEqual(_wire.address(donor.metadata())[0], "127.0.0.1")
        for options, environ in (({"interface": "no-such0"}, {}), ({}, {"FTLITE_INTERFACE": "no-such0"})):
            with mock.patch.dict(os.environ, environ), self.assertRaises(ValueError) as caught:
                HTTPTransport(host=None, **options)
            self.assertIn("no-such0", str(caught.exception))

    def test_another_address_to_bind_to(self) -> None:
        donor = self.transport(host="127.0.0.2", bind="0.0.0.0")
        donor.send_checkpoint([], STEP, {"x": noise(3)})
        self.assertEqual(_wire.address(donor.metadata())[0], "127.0.0.2")
        self.heals(donor, {"x": noise(3)})

    def test_it_binds_to_what_it_advertises_only(self) -> None:
        donor = self.donor({"x": noise(3)})
        port = _wire.address(donor.metadata())[1]
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), WAIT_S)

    def test_ipv6(self) -> None:
        if not has_ipv6():
            self.skipTest("this machine has no IPv6")
        for num_chunks in (None, 0):
            donor = self.donor({"x": noise(3)}, host="::1", num_chunks=num_chunks)
            self.assertRegex(donor.metadata(), r"^http://\[::1\]:\d+/")
            self.heals(donor, {"x": noise(3)}, num_chunks=num_chunks)

    def test_a_name_that_appears_late_is_looked_up_until_then_and_not_again(self) -> None:
        donor = self.donor({"x": block(3 << 20)})
        port = _wire.address(donor.metadata())[1]
        real, asked = socket.getaddrinfo, []

        def slow(host: Any, *args: Any, **kwargs: Any) -> Any:
            if host != "donor.invalid":
                return real(host, *args, **kwargs)
            asked.append(host)
            if len(asked) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "not yet")
            return real("127.0.0.1", *args, **kwargs)

        url = donor.metadata().replace(f"127.0.0.1:{port}", f"donor.invalid:{port}")
        with mock.patch.object(socket, "getaddrinfo", slow):
            moved = self.transport(num_chunks=3).recv_checkpoint(0, url, STEP)
        self.assertEqual(tuple(moved["x"].shape), (3 << 20,))
        self.assertEqual(len(asked), 3)

    def test_a_resolver_that_hangs(self) -> None:
        over = threading.Event()
        self.addCleanup(over.set)
        real = socket.getaddrinfo

        def hanging(host: Any, *args: Any, **kwargs: Any) -> Any:
            if host == "donor.invalid":
                over.wait(WAIT_S)
                raise socket.gaierror(socket.EAI_NONAME, "no")
            return real(host, *args, **kwargs)

        receiver = self.transport()
        with mock.patch.object(socket, "getaddrinfo", hanging):
            began_s = time.monotonic()
            with self.assertRaises(errors.DeadlineExceeded):
                receiver.recv_checkpoint(0, "http://donor.invalid:1/x/checkpoint/", STEP, timeout=0.3)
            self.assertLess(time.monotonic() - began_s, 0.3 + 2 * SCALE)
            over.set()
            wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("heal-recv")], "threads end")


class NoTime(ServerTestCase):
    """A timeout of 0 tries once."""

    def test_a_donor_that_serves(self) -> None:
        donor = self.donor({"x": noise(3)})
        for num_chunks in (None, 0):
            with mock.patch.object(transport, "_ONE_TRY_S", WAIT_S):  # this machine may be busy
                receiver = self.transport(num_chunks=num_chunks)
                self.assertTrue(torch.equal(receiver.recv_checkpoint(0, donor.metadata(), STEP, 0)["x"], noise(3)))

    def test_a_donor_that_does_not(self) -> None:
        donor = self.transport()
        began_s = time.monotonic()
        with self.assertRaises(errors.DeadlineExceeded):
            self.transport().recv_checkpoint(0, donor.metadata(), STEP, 0)
        self.assertLess(time.monotonic() - began_s, 1.0 * SCALE)


class Arguments(ServerTestCase):
    def test_that_make_no_sense(self) -> None:
        for options in (
            {"num_chunks": -1}, {"num_chunks": 2.0}, {"num_chunks": True}, {"snapshot": "some"}, {"max_readers": 0},
            {"max_bytes": -1}, {"timeout": None}, {"timeout": -1}, {"port": 70_000}, {"port": range(0)},
            {"host": "127.0.0.1", "interface": "lo"}, {"bind": "localhost"}, {"device": "nonsense"},
        ):  # fmt: skip
            with self.subTest(options=options), self.assertRaises((ValueError, RuntimeError)):
                HTTPTransport(**{"host": "127.0.0.1", **options})
        with self.assertRaises(TypeError):
            HTTPTransport(timeout="soon")

    def test_the_two_sides_need_not_agree_on_chunks(self) -> None:
        state = {"x": block(300_000), "y": noise(50), "n": 1}
        counts = (0, 1, 3, 8, 64, None)
        receivers = {count: self.transport(num_chunks=count) for count in counts}
        for at_donor in counts:
            donor = self.donor(state, num_chunks=at_donor)
            for at_receiver, receiver in receivers.items():
                with self.subTest(donor=at_donor, receiver=at_receiver):
                    moved = receiver.recv_checkpoint(0, donor.metadata(), STEP)
                    self.assertTrue(torch.equal(moved["x"], state["x"]) and torch.equal(moved["y"], state["y"]))

    def test_max_bytes(self) -> None:
        donor = self.donor({"x": noise(1000)})
        for num_chunks in (None, 0):
            with self.assertRaises(errors.LayoutError) as caught:
                self.transport(max_bytes=3999, num_chunks=num_chunks).recv_checkpoint(0, donor.metadata(), STEP)
            self.assertIn("max_bytes", str(caught.exception))
        self.transport(max_bytes=4000).recv_checkpoint(0, donor.metadata(), STEP)

    def test_a_device_for_what_is_new(self) -> None:
        donor = self.donor({"x": noise(3)})
        moved = self.transport(device="cpu").recv_checkpoint(0, [donor.metadata()], STEP)
        self.assertEqual(moved["x"].device.type, "cpu")

    def test_bytes_sent_are_those_of_distinct_memory(self) -> None:
        big = block(16 << 20)
        views = [big[i << 21 : (i + 1) << 21] for i in range(8)]
        weight = noise(256, 1024)
        for name, state, distinct in (
            ("tied", {"a": weight, "b": weight, "c": weight.t()}, 1 << 20),
            ("views of one buffer", dict(enumerate(views)), 16 << 20),
            ("overlapping views", {"a": big[: 3 << 20], "b": big[1 << 20 : 4 << 20]}, 4 << 20),
            ("a small slice", {"x": big[1000:2024]}, 1024),
            ("expanded", {"x": noise(1, 8).expand(1 << 20, 8)}, 32),
        ):
            with self.subTest(name):
                told: list[int] = []
                donor = self.donor(state)
                receiver = self.transport(progress=lambda _, total, told=told: told.append(total))
                receiver.recv_checkpoint(0, donor.metadata(), STEP)
                self.assertLessEqual(told[-1], distinct * 1.01)


class Logs(ServerTestCase):
    def test_one_line_for_a_transfer(self) -> None:
        with captured_logs(20) as records:
            donor = self.donor({"x": block(3 << 20)})
            self.transport(num_chunks=2).recv_checkpoint(7, donor.metadata(), STEP)
        lines = [record.getMessage() for record in records if "healed" in record.getMessage()]
        host, port = _wire.address(donor.metadata())
        self.assertEqual(len(lines), 1)
        self.assertRegex(
            lines[0],
            rf"^healed to step 4 from rank 7 at {host}:{port}: {3 << 20} bytes in [\d.]+ s, [\d.]+ GB/s, "
            r"\d streams, checked$",
        )

    def test_no_secret_in_any_text(self) -> None:
        texts: list[str] = []
        stderr = io.StringIO()
        with captured_logs() as records, mock.patch.object(sys, "stderr", stderr):
            donor = self.donor({"x": noise(3)})
            url = donor.metadata()
            self.heals(donor, {"x": noise(3)})
            self.heals(donor, {"x": noise(3)}, num_chunks=0)
            self.raw(donor, f"GET {urlsplit(url).path}{STEP}/nonsense HTTP/1.1\r\n\r\n".encode())
            for bad_url, step in ((url, STEP + 1), (url + "x/", STEP), (url.replace("http", "https"), STEP)):
                try:
                    self.transport(timeout=1).recv_checkpoint(0, bad_url, step)
                except Exception as e:
                    texts.append(f"{e} {e!r} {e.__cause__} {e.__context__}")
            donor.shutdown()
            try:
                self.transport(timeout=1).recv_checkpoint(0, url, STEP)
            except errors.FtliteError as e:
                texts.append(f"{e} {e.__cause__}")
        texts += [record.getMessage() + str(record.exc_text) for record in records]
        secret = urlsplit(url).path.split("/")[1]
        self.assertEqual(len(texts) - len(records), 4)
        self.assertFalse([text for text in texts if secret in text])
        self.assertEqual(stderr.getvalue(), "")

    def test_what_is_left_alone_is_named(self) -> None:
        donor = self.donor({"x": noise(3)})
        own = {"x": torch.zeros(3), "mine": torch.zeros(2), "other": {"y": torch.zeros(1)}}
        with captured_logs(20) as records:
            self.transport(state_dict=lambda: own).recv_checkpoint(0, donor.metadata(), STEP)
        lines = [record.getMessage() for record in records if "left as they are" in record.getMessage()]
        self.assertEqual(len(lines), 1)
        self.assertIn("['mine']", lines[0])
        self.assertIn("['other']['y']", lines[0])
