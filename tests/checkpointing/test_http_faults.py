# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that are wrong, missing or late: what the receiver makes of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch

from tests import load
from tests._support import SCALE
from tests.checkpointing import _wire
from tests.checkpointing._faults import STEP, FaultTestCase, HTTPTransport, errors, recorded, small_state
from tests.checkpointing._transport_states import block, clone, noise, scrambled
from tests.checkpointing._wire import Asked, FakeDonor, Proxy, Recording, Reply

checksum = load("checkpointing._checksum")
client = load("checkpointing._client")
client_tries = load("checkpointing._fetch").TRIES


class FlippedBytes(FaultTestCase):
    def test_in_a_chunk(self) -> None:
        recording = recorded(small_state())
        self.assertEqual(len(recording.chunks), 3)
        for chunk in recording.chunks:
            size = len(recording.answers[chunk][1])
            for at in (0, 1, 4095, 4096, size // 2, size - 1):
                with self.subTest(chunk=chunk, at=at):
                    own = scrambled(small_state())
                    error = self._flipped(recording, chunk, at, self.receiver(own), errors.IntegrityError)
                    self.assertIn(f"chunk {chunk} ", str(error))
                    self.assertIn("bytes ", str(error))
                    self.assertTrue(error.destination_dirty)
                    self.assertIn("undefined", str(error))
                    self.assertTrue(error.keys)
                    self.assertEqual(error.bytes_total, recording.total)

    def test_in_the_metadata(self) -> None:
        recording = recorded(small_state())
        size = len(recording.answers["metadata"][1])
        receiver = self.receiver(own := scrambled(small_state()))
        before = clone(own)
        for at in (0, 1, size // 3, size // 2, size - 2, size - 1):
            with self.subTest(at=at):
                error = self._flipped(recording, "metadata", at, receiver, errors.IntegrityError)
                self.assertFalse(error.destination_dirty)
                self.assertTrue(all(torch.equal(x, y) for x, y in zip(own["b"], before["b"])))

    def test_in_the_pickle_of_a_stream(self) -> None:
        """Which is no reason to trust the donor with code, as the loader advises."""
        state = {f"a rather long name {number}": number for number in range(20)}
        recording = recorded(state, 0)
        receiver = self.receiver(num_chunks=0)
        for at in range(0, len(recording.answers["full"][1]), 53):
            with self.subTest(at=at):
                self._flipped(recording, "full", at, receiver, errors.IntegrityError)

    def test_in_the_stream(self) -> None:
        recording = recorded(small_state(), 0)
        size = len(recording.answers["full"][1])
        receiver = self.receiver(own := scrambled(small_state()), num_chunks=0)
        before = clone(own)
        for at in (0, 200, size // 2, size - 1):
            with self.subTest(at=at):
                error = self._flipped(recording, "full", at, receiver, errors.IntegrityError)
                self.assertFalse(error.destination_dirty)
                self.assertTrue(torch.equal(own["a"], before["a"]))

    def _flipped(self, recording: Recording, what: str, at: int, receiver: Any, kind: Any) -> Any:
        body = bytearray(recording.answers[what][1])
        body[at] ^= 0x10

        def answer(asked: Asked) -> Reply:
            return recording.with_body(asked, bytes(body)) if asked.what == what else recording.reply(asked)

        with FakeDonor(answer) as donor:
            return self.fails(donor.url, kind, receiver)


class BrokenConnections(FaultTestCase):
    def test_a_body_that_ends_early(self) -> None:
        """The donor answers once, in part, and then is gone."""
        recording = recorded(small_state(), 1)
        for what, num_chunks in (("metadata", None), ("0", None), ("full", 0)):
            size = len(recording.answers[what][1])
            for cut_at in (0, 10, size // 2, size - 1):
                with self.subTest(what=what, cut_at=cut_at):
                    own = scrambled(small_state())
                    self._ends_at(recording, what, cut_at, self.receiver(own, num_chunks=num_chunks))

    def _ends_at(self, recording: Recording, what: str, cut_at: int, receiver: Any) -> None:
        size = len(recording.answers[what][1])
        gone = threading.Event()

        def answer(asked: Asked) -> Reply | None:
            if asked.what != what:
                return recording.reply(asked)
            if gone.is_set():
                return None
            gone.set()
            return recording.reply(asked, cut_at=cut_at, length=size)

        with FakeDonor(answer) as donor:
            began_s = time.monotonic()
            error = self.fails(donor.url, errors.IncompleteTransfer, receiver)
            self.assertLess(time.monotonic() - began_s, 2 * SCALE)
        self.assertIn(f"{cut_at} of {size} bytes", str(error))
        self.assertEqual((error.bytes_done, error.bytes_total), (cut_at, size))
        self.assertEqual(error.destination_dirty, what == "0" and cut_at > 0)

    def test_a_head_that_ends_early(self) -> None:
        """To http.client the end of a connection is the end of a head as well; the next answer is whole."""
        recording = recorded(small_state(), 1)
        name = next(iter(recording.answers["metadata"][0]))
        for cut_at in (3, 20, 40):

            class Half(_wire._Server):
                asked = 0

                def talk(self, sock: Any, cut_at: int = cut_at) -> None:
                    type(self).asked += 1
                    sock.recv(1 << 16)
                    sock.sendall(f"HTTP/1.1 200 OK\r\n{name}: a value that is long enough\r\n".encode()[:cut_at])

            with self.subTest(cut_at=cut_at), Half() as donor:
                url = f"http://127.0.0.1:{donor.port}/{'5ec7e7' * 5}ab/checkpoint/"
                self.fails(url, errors.IncompleteTransfer, self.receiver(own := scrambled(small_state())))
                self.assertEqual(Half.asked, client_tries)
                self.assertEqual(own.keys(), small_state().keys())

    def test_a_range_goes_on_where_it_broke(self) -> None:
        state = {"x": block(5 << 20), "y": noise(40)}
        recording = recorded(state, 2)
        size = len(recording.answers["0"][1])
        cuts = iter([0, 10, 1 << 20, (1 << 20) + 5000, 0])

        def answer(asked: Asked) -> Reply:
            rest = size - asked.start
            if asked.what == "0" and (cut_at := next(cuts, None)) is not None:
                return recording.reply(asked, cut_at=cut_at, length=rest)
            return recording.reply(asked)

        with FakeDonor(answer) as donor:
            moved = self.receiver(own := scrambled(state)).recv_checkpoint(0, donor.url, STEP)
            starts = [asked.start for asked in donor.asked if asked.what == "0"]
            self.assertEqual(donor.sent["0"], size)
            self.assertEqual(donor.sent["1"], len(recording.answers["1"][1]))
        self.assertEqual(starts, [0, 0, 10, 10 + (1 << 20), 5010 + (2 << 20), 5010 + (2 << 20)])
        self.assertIs(moved["x"], own["x"])
        self.assertTrue(torch.equal(own["x"], state["x"]) and torch.equal(own["y"], state["y"]))

    def test_metadata_that_breaks_is_asked_for_again(self) -> None:
        recording = recorded(state := small_state())
        size = len(recording.answers["metadata"][1])
        cuts = iter([size - 1, 0, 10])

        def answer(asked: Asked) -> Reply:
            if asked.what == "metadata" and (cut_at := next(cuts, None)) is not None:
                return recording.reply(asked, cut_at=cut_at, length=size)
            return recording.reply(asked)

        with FakeDonor(answer) as donor:
            moved = self.receiver().recv_checkpoint(0, donor.url, STEP)
            self.assertEqual(sum(asked.what == "metadata" for asked in donor.asked), 4)
        self.assertTrue(torch.equal(moved["a"], state["a"]))

    def test_metadata_that_always_breaks(self) -> None:
        recording = recorded(small_state())
        size = len(recording.answers["metadata"][1])
        with FakeDonor(lambda asked: recording.reply(asked, cut_at=20, length=size)) as donor:
            error = self.fails(donor.url, errors.IncompleteTransfer)
            self.assertEqual(len(donor.asked), 4)
        self.assertEqual((error.bytes_done, error.bytes_total), (20, size))

    def test_connections_that_are_reset(self) -> None:
        state = {"x": block(6 << 20)}
        resets = iter(range(3))
        donor = HTTPTransport(timeout=20 * SCALE, num_chunks=3, host="127.0.0.1")
        self.addCleanup(donor.shutdown)
        donor.send_checkpoint([], STEP, state)

        def on_bytes(data: bytes, passed: int) -> bytes | None:
            return None if passed > 1 << 20 and next(resets, None) is not None else data

        with Proxy(_wire.address(donor.metadata()), on_bytes) as proxy:
            moved = self.receiver().recv_checkpoint(0, _wire.through(donor.metadata(), proxy.port), STEP)
            # the bytes of the state once; those in flight at a cut, the heads and the metadata besides
            self.assertLess(proxy.passed, (6 << 20) * 1.5)
        self.assertTrue(torch.equal(moved["x"], state["x"]))
        self.assertIsNone(next(resets, None))

    def test_a_donor_that_is_not_there(self) -> None:
        with FakeDonor(lambda _: None) as donor:
            url = donor.url
        began_s = time.monotonic()
        error = self.fails(url, errors.IncompleteTransfer)
        self.assertLess(time.monotonic() - began_s, 2 * SCALE)
        self.assertFalse(error.destination_dirty)

    def test_a_donor_that_moves_on_in_the_middle(self) -> None:
        recording = recorded(small_state())

        def answer(asked: Asked) -> Reply:
            if asked.what != "2":
                return recording.reply(asked)
            return Reply(b"step 5 is served here, not step 4", {"Heal-Protocol": "1"}, status=409)

        with FakeDonor(answer) as donor:
            error = self.fails(donor.url, errors.NotServing, self.receiver(scrambled(small_state())))
        self.assertIn("step 5 is served here", str(error))
        self.assertTrue(error.destination_dirty)


class WrongAnswers(FaultTestCase):
    def test_heads_that_lie(self) -> None:
        recording = recorded(small_state())
        (_, document), (_, chunk) = recording.answers["metadata"], recording.answers["1"]
        ours = recording.answers["metadata"][0]
        no_sum = {name: value for name, value in ours.items() if name != "Heal-Sum"}
        for what, reply in (
            ("metadata", Reply(document, no_sum)),
            ("metadata", Reply(document, {**ours, "Heal-Sum": "soon"})),
            ("metadata", Reply(document, {**ours, "Heal-Sum": "0"})),
            ("metadata", Reply(document, {**ours, "Content-Length": "soon"})),
            ("metadata", Reply(b"", ours, length=1 << 40, cut_at=0)),
            ("metadata", Reply(document, ours, length=len(document) - 1, cut_at=0)),
            ("1", Reply(chunk, length=len(chunk) + 1, cut_at=len(chunk))),
            ("1", Reply(chunk, length=len(chunk) - 1, cut_at=0)),
            ("1", Reply(b"", length=1 << 40, cut_at=0)),
            ("1", Reply(chunk, {"Content-Length": "-5"}, cut_at=len(chunk))),
            ("1", Reply(b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})),
            ("1", Reply(chunk, status=206)),
            ("1", Reply(chunk, status=302)),
            ("1", Reply(chunk, status=500)),
        ):
            donor = FakeDonor(lambda a, w=what, r=reply: r if a.what == w else recording.reply(a))
            with self.subTest(what=what, head=f"{reply.status} {reply.length} {reply.headers}"), donor:
                self.fails(donor.url, errors.TransferError, timeout=5 * SCALE)

    def test_the_whole_for_a_range(self) -> None:
        recording = recorded(small_state(), 1)
        size = recording.total

        def answer(asked: Asked) -> Reply:
            if asked.what != "0":
                return recording.reply(asked)
            if not asked.start:
                return recording.reply(asked, cut_at=1000, length=size)
            return Reply(recording.answers["0"][1])

        with FakeDonor(answer) as donor:
            error = self.fails(donor.url, errors.IntegrityError)
        self.assertEqual(error.bytes_done, 1000)

    def test_another_servers_page(self) -> None:
        for status, kind in ((404, errors.NotServing), (403, errors.NotServing), (200, errors.LayoutError)):
            with self.subTest(status=status):
                page = Reply(b"<html>hello</html>", {"Server": "nginx"}, status=status)
                with FakeDonor(lambda _, page=page: page) as donor:
                    error = self.fails(donor.url, kind)
                self.assertNotIn("html", str(error))
                if status == 200:
                    self.assertIn("num_chunks=0", str(error))

    def test_no_http_at_all(self) -> None:
        class Babble(_wire._Server):
            def talk(self, sock: Any) -> None:
                sock.recv(100)
                sock.sendall(b"\x00\x01\x02 220 mail ready\r\n" * 10)

        with Babble() as server:
            self.fails(f"http://127.0.0.1:{server.port}/s3cr3t/checkpoint/", errors.TransferError)

    def test_nothing_like_an_address(self) -> None:
        for metadata in ("", "ftp://a:1/s3cr3t/", "http://[::1/s3cr3t/", "http://a/s3cr3t", [], ["http://h:1/x"] * 2):
            with self.subTest(metadata=metadata):
                self.fails(metadata, ValueError)


class LateBytes(FaultTestCase):
    def test_a_donor_that_drips(self) -> None:
        """No single wait is long, so only a limit for all of it ends this."""
        recording = recorded(small_state())
        for what, num_chunks, timeout in (
            ("metadata", None, 0.6), ("1", None, timedelta(seconds=0.6)), ("full", 0, 0.6),
        ):  # fmt: skip
            donor = FakeDonor(lambda a, w=what: recording.reply(a, **({"pace": (1, 0.1)} if a.what == w else {})))
            with self.subTest(what=what), donor:
                receiver = self.receiver(scrambled(small_state()), num_chunks=num_chunks)
                began_s = time.monotonic()
                error = self.fails(donor.url, errors.DeadlineExceeded, receiver, timeout=timeout)
                took_s = time.monotonic() - began_s
                self.assertGreaterEqual(took_s, 0.6)
                self.assertLess(took_s, 0.6 + 0.8 * SCALE)
                self.assertIn("limit 0.6 s", str(error))
                self.assertRegex(str(error), rf"\b\d+ of {error.bytes_total} bytes")
                self.assertGreater(error.bytes_done, 0)
                self.assertEqual(error.destination_dirty, what == "1")

    def test_a_head_that_drips(self) -> None:
        class Slow(_wire._Server):
            def talk(self, sock: Any) -> None:
                while not self._stopped.wait(0.05):
                    sock.sendall(b"H")

        with Slow() as server:
            url = f"http://127.0.0.1:{server.port}/s3cr3t/checkpoint/"
            began_s = time.monotonic()
            self.fails(url, errors.DeadlineExceeded, timeout=0.5)
            self.assertLess(time.monotonic() - began_s, 0.5 + 0.8 * SCALE)

    def test_a_donor_that_falls_silent(self) -> None:
        recording = recorded(small_state(), 1)
        for what, num_chunks in (("metadata", None), ("0", None), ("full", 0)):
            with self.subTest(what=what), mock.patch.object(client, "IDLE_S", 0.2):
                silence = {"cut_at": 100, "length": len(recording.answers[what][1]), "hold": threading.Event()}
                self.addCleanup(silence["hold"].set)

                def answer(asked: Asked, what: str = what, silence: Any = silence) -> Reply:
                    if asked.what == what and asked.start:
                        return recording.reply(asked, **{**silence, "cut_at": 0, "length": silence["length"] - 100})
                    return recording.reply(asked, **silence if asked.what == what else {})

                with FakeDonor(answer) as donor:
                    self.addCleanup(silence["hold"].set)
                    began_s = time.monotonic()
                    error = self.fails(donor.url, errors.IncompleteTransfer, self.receiver(num_chunks=num_chunks))
                    self.assertLess(time.monotonic() - began_s, 3 * SCALE)
                    silence["hold"].set()
                self.assertIn("idle limit", str(error))
                self.assertIn("0.2 s", str(error))
                self.assertEqual(error.bytes_done, 100)

    def test_a_silent_donor_is_given_up_once(self) -> None:
        """Not asked again: the idle limit is one, however often a connection could be made."""
        recording = recorded(small_state(), 1)
        for what, num_chunks in (("metadata", None), ("0", None), ("full", 0)):
            with self.subTest(what=what), mock.patch.object(client, "IDLE_S", 0.6):
                hold = threading.Event()
                self.addCleanup(hold.set)

                def answer(asked: Asked, what: str = what, hold: threading.Event = hold) -> Reply:
                    return recording.reply(asked, **({"cut_at": 0, "hold": hold} if asked.what == what else {}))

                with FakeDonor(answer) as donor:
                    began_s = time.monotonic()
                    self.fails(donor.url, errors.IncompleteTransfer, self.receiver(num_chunks=num_chunks))
                    self.assertLess(time.monotonic() - began_s, 1.2)
                    self.assertEqual(sum(asked.what == what for asked in donor.asked), 1)
                    hold.set()

    def test_a_host_that_does_not_answer_is_given_up_once(self) -> None:
        with socket.socket() as listener, contextlib.ExitStack() as waiting:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(4):  # its queue is full, and who comes now is not answered
                sock = waiting.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            with mock.patch.object(client, "IDLE_S", 0.6):
                began_s = time.monotonic()
                self.fails(
                    f"http://127.0.0.1:{listener.getsockname()[1]}/s3cr3t/checkpoint/", errors.IncompleteTransfer
                )
                self.assertLess(time.monotonic() - began_s, 1.2)

    def test_a_stream_that_falls_silent_leaves_its_range_to_the_others(self) -> None:
        recording = recorded(state := {"x": block(5 << 20)}, 4)
        hold = threading.Event()
        self.addCleanup(hold.set)
        silenced = iter([True])

        def answer(asked: Asked) -> Reply:
            if asked.what == "1" and next(silenced, False):
                return recording.reply(asked, cut_at=1000, length=len(recording.answers["1"][1]), hold=hold)
            return recording.reply(asked)

        with mock.patch.object(client, "IDLE_S", 0.5), FakeDonor(answer) as donor:
            moved = self.receiver(num_chunks=2).recv_checkpoint(0, donor.url, STEP)
            self.assertEqual([asked.start for asked in donor.asked if asked.what == "1"], [0, 1000])
            hold.set()
        self.assertTrue(torch.equal(moved["x"], state["x"]))

    def test_progress_that_raises_ends_the_transfer(self) -> None:
        recording = recorded(small_state())

        def progress(_done: int, _total: int) -> None:
            raise KeyError("the caller's own")

        with FakeDonor(lambda a: recording.reply(a, pace=(5000, 0.01))) as donor, self.assertRaises(KeyError):
            self.receiver(progress=progress).recv_checkpoint(0, donor.url, STEP)

    def test_progress_is_told(self) -> None:
        recording = recorded(small_state())
        told: list[tuple[int, int]] = []
        with FakeDonor(lambda a: recording.reply(a, pace=(20_000, 0.03))) as donor:
            self.receiver(progress=lambda done, total: told.append((done, total))).recv_checkpoint(0, donor.url, STEP)
        self.assertEqual(told[-1], (recording.total, recording.total))
        self.assertEqual(told, sorted(told))
        self.assertGreater(len(told), 2)
