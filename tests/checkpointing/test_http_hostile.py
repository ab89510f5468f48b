# SPDX-License-Identifier: BSD-3-Clause
"""Donors that lie, and states that change while they are served: what the receiver makes of them."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from tests import load
from tests._support import SCALE, wait_until
from tests.checkpointing import _wire
from tests.checkpointing._faults import STEP, FaultTestCase, HTTPTransport, errors, recorded, small_state
from tests.checkpointing._transport_states import block, clone, noise, scrambled
from tests.checkpointing._wire import Asked, FakeDonor, Proxy, Recording, Reply

checksum = load("checkpointing._checksum")
client = load("checkpointing._client")


class Hostile:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class HostileDonors(FaultTestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.trace = Path(folder.name, "trace")

    def test_a_pickle_in_the_stream(self) -> None:
        recording = recorded({"x": noise(3), "bad": Hostile(self.trace)}, 0, weights_only=False)
        self.assertFalse(self.trace.exists(), "the donor must not run it")
        with FakeDonor(recording.reply) as donor:
            error = self.fails(donor.url, errors.LayoutError, self.receiver(num_chunks=0))
        self.assertFalse(self.trace.exists())
        self.assertIn("weights_only=False", str(error))

    def test_a_pickle_as_a_leaf(self) -> None:
        recording = recorded({"x": noise(3), "bad": Hostile(self.trace)}, weights_only=False)
        self.assertFalse(self.trace.exists(), "the donor must not run it")
        own = {"x": torch.zeros(3)}
        with FakeDonor(recording.reply) as donor:
            error = self.fails(donor.url, errors.LayoutError, self.receiver(own))
            self.assertFalse(self.trace.exists())
            self.assertIn("['bad']", str(error))
            self.assertEqual(error.destination_dirty, bool(own["x"].any()))
            # and who trusts the donor gets what it asked for
            self.receiver(weights_only=False).recv_checkpoint(0, donor.url, STEP)
            self.assertTrue(self.trace.exists())

    def test_a_stream_without_a_checksum(self) -> None:
        """As a peer's. One of ours has it, and a head that was damaged on the way may have lost it."""
        recording = recorded({"x": block(100_000)}, 0)
        body = bytearray(recording.answers["full"][1])
        body[-1000] ^= 1
        for damaged in ("Heal-Sum: 0", "Content\xff-Type: application/octet-stream"):
            lines = [f"{name}: {value}" for name, value in recording.answers["full"][0].items() if name != "Heal-Sum"]
            if "Type" in damaged:
                lines = [f"{name}: {value}" for name, value in recording.answers["full"][0].items()]
            head = "\r\n".join(["HTTP/1.1 200 x", f"Content-Length: {len(body)}", damaged, *lines, "", ""])

            class Once(_wire._Server):
                def talk(self, sock: Any, head: str = head) -> None:
                    sock.recv(1 << 16)
                    sock.sendall(head.encode("latin-1") + bytes(body))

            with self.subTest(damaged=damaged), Once() as donor:
                url = f"http://127.0.0.1:{donor.port}/{'5ec7e7' * 5}ab/checkpoint/"
                lost = "Type" in damaged  # with all lines behind it, which make a head one of ours
                kind = errors.IncompleteTransfer if lost else errors.IntegrityError
                error = self.fails(url, kind, self.receiver(num_chunks=0))
                self.assertIn("a head that none of ours has" if lost else "checksum", str(error))

    def test_texts_are_short_and_printable(self) -> None:
        """They end up in logs and on terminals."""
        recording = recorded({"x": noise(4)}, 0)
        rude = ("no\n\x1b[2J\r" * 5000).encode()
        headers = recording.answers["full"][0]
        for reply, num_chunks in (
            (Reply(rude, {"Heal-Protocol": "1"}, status=409), None),
            (Reply(b"", {**headers, "Heal-Torch": "9" * 60_000}), 0),
            (Reply(b"", {**headers, "Heal-Protocol": "9" * 60_000}), None),
        ):
            with FakeDonor(lambda _, reply=reply: reply) as donor:
                error = self.fails(donor.url, errors.TransferError, self.receiver(num_chunks=num_chunks))
            self.assertTrue(str(error).isprintable())
            self.assertLess(len(str(error)), 2000)
        recording = recorded({"x": noise(4)})
        whole = {"x" * 100_000: 1}
        error = self._with_document(recording, {"dtensors": [[0, whole]]}, self.receiver({"x": noise(4)}))
        self.assertLess(len(str(error)), 3000)
        error = self._with_document(recording, {"tree": ["d", {"y" * 100_000: ["p", 0]}]}, self.receiver({}))
        self.assertLess(len(str(error)), 3000)

    def test_a_tree_that_names_what_it_should_not(self) -> None:
        recording = recorded(small_state())
        nested: Any = 0
        for _ in range(2000):
            nested = ["l", [nested]]
        for number, tree in enumerate((
            ["n", "antigravity.fly", [1]],
            ["n", "os.mkdir", [str(self.trace)]],
            ["n", "subprocess.Popen", [["u", ["l", ["true"]]]]],
            ["dd", "os.mkdir", []],
            ["dd", ["l", []], []],
            ["p", 0], ["t", 99], ["t", -1], ["t", "0"], ["t"], ["p", 1.0], ["t", True],
            ["size", ["x"]], ["dev", "nonsense:7"], ["dtype", "os"], ["int", "nope"], ["f", "00"], ["b", "?"],
            ["map", [[["l", []], 1]]], ["map", [1]], ["set", [["l", []]]], ["unknown"], [], [[]], [None],
            ["d", []], ["d"], ["dq", -1, []], ["dq", 1], ["count", [["a"]]], ["c", "zz"],
            nested,
        )):  # fmt: skip
            with self.subTest(number=number):
                own = scrambled(small_state())
                before = clone(own)
                error = self._with_document(recording, {"tree": tree}, self.receiver(own))
                self.assertFalse(error.destination_dirty)
                self.assertTrue(torch.equal(own["a"], before["a"]))
        self.assertFalse(self.trace.exists())
        self.assertNotIn("antigravity", sys.modules)

    def test_a_document_that_is_none(self) -> None:
        recording = recorded(small_state())
        for text in (
            b"", b"{", b"null", b"[]", b"7", b"{}", b'"x"', b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"a":' * 5000,
            b'{"protocol": 1}', b'{"protocol": 2, "byteorder": "little"}', b"9" * 5000,
        ):  # fmt: skip
            with self.subTest(text=text[:40]), self._with_text(recording, text) as donor:
                self.fails(donor.url, errors.TransferError, timeout=5 * SCALE)

    def test_fields_that_make_no_sense(self) -> None:
        recording = recorded(small_state())
        document = json.loads(recording.answers["metadata"][1])
        shuffle = random.Random(7)
        state = small_state()
        odd = (-1, 1 << 70, 1.5, None, "x", [], {}, [[]], [1 << 62])
        for name in sorted(document.keys() - {"torch"}):
            for value in (*odd, *(self._bent(document[name], shuffle) for _ in range(4))):
                with self.subTest(name=name, value=str(value)[:60]):
                    self._typed_or_none(recording, {name: value}, scrambled(state))

    def _typed_or_none(self, recording: Recording, changes: dict[str, Any], own: Any) -> None:
        """Some changes describe another state of the same bytes, which nobody can tell; no other error may come."""
        before = clone(own)
        receiver = HTTPTransport(timeout=5 * SCALE, host="127.0.0.1", state_dict=lambda: own)
        try:
            with self._with_changes(recording, changes) as donor:
                receiver.recv_checkpoint(0, donor.url, STEP)
        except errors.TransferError as e:
            untouched = torch.equal(own["a"], before["a"]) and torch.equal(own["b"][0], before["b"][0])
            self.assertTrue(untouched or e.destination_dirty)
        finally:
            receiver.shutdown(wait=False)

    @staticmethod
    def _bent(value: Any, shuffle: random.Random) -> Any:
        """``value`` with one number or text somewhere in it replaced."""
        bent = json.loads(json.dumps(value))
        at, holder = bent, None
        while isinstance(at, (list, dict)) and at:
            key = shuffle.choice(list(range(len(at))) if isinstance(at, list) else list(at))
            holder, at = (at, key), at[key]
        if holder is not None:
            holder[0][holder[1]] = shuffle.choice([-1, 1 << 45, "complex32", None, 2.5, [[]]])
        return bent

    def test_a_state_of_a_terabyte(self) -> None:
        recording = recorded({"x": noise(4)})
        size = 1 << 40
        fields = {
            "sizes": [size], "ends": [size], "sums": [0], "large": 1,
            "specs": [["float32", [size // 4], [1], 0]],
        }  # fmt: skip
        for options in ({}, {"max_bytes": 1 << 30}):
            with self.subTest(options=options):
                error = self._with_document(recording, fields, self.receiver(**options))
                self.assertIsInstance(error, errors.LayoutError)
                self.assertIn(str(size), str(error))

    def test_a_stream_of_a_terabyte(self) -> None:
        recording = recorded({"x": noise(4)}, 0)
        for options in ({}, {"max_bytes": 1 << 20}):
            with self.subTest(options=options):
                with FakeDonor(lambda a: recording.reply(a, length=1 << 40, cut_at=100)) as donor:
                    error = self.fails(donor.url, errors.LayoutError, self.receiver(num_chunks=0, **options))
                self.assertIn(str(1 << 40), str(error))

    def _with_document(self, recording: Recording, changes: dict[str, Any], receiver: Any) -> Any:
        with self._with_changes(recording, changes) as donor:
            return self.fails(donor.url, errors.TransferError, receiver, timeout=5 * SCALE)

    def _with_changes(self, recording: Recording, changes: dict[str, Any]) -> FakeDonor:
        document = {**json.loads(recording.answers["metadata"][1]), **changes}
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)  # to write what the receiver is to refuse to read
        try:
            return self._with_text(recording, json.dumps(document).encode())
        finally:
            sys.setrecursionlimit(limit)

    def _with_text(self, recording: Recording, text: bytes) -> FakeDonor:
        headers = {**recording.answers["metadata"][0], "Heal-Sum": f"{checksum.checksum_of(text):08x}"}

        def answer(asked: Asked) -> Reply:
            if asked.what == "metadata":
                return Reply(text, headers)
            return recording.reply(asked) if asked.what in recording.answers else Reply(status=404)

        return FakeDonor(answer)


class ChangedStates(FaultTestCase):
    """The trainer writes to a tensor while it is served."""

    def test_a_large_tensor(self) -> None:
        for snapshot, fails in (("small", True), ("none", True), ("all", False)):
            with self.subTest(snapshot=snapshot):
                state = {"big": block(40 << 20), "small": noise(10)}
                published = clone(state)
                donor = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1", snapshot=snapshot)
                self.addCleanup(donor.shutdown)
                donor.send_checkpoint([], STEP, state)
                state["big"][-1] ^= 1
                receiver = self.receiver()
                if not fails:
                    moved = receiver.recv_checkpoint(0, donor.metadata(), STEP)
                    self.assertTrue(torch.equal(moved["big"], published["big"]))
                    continue
                error = self.fails(donor.metadata(), errors.IntegrityError, receiver)
                self.assertIn('snapshot="all"', str(error))
                self.assertIn("disallow_checkpoint()", str(error))

    def test_in_the_middle_of_a_transfer(self) -> None:
        state = {"big": block(40 << 20)}
        donor = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1")
        self.addCleanup(donor.shutdown)
        donor.send_checkpoint([], STEP, state)
        reached = threading.Event()

        def on_bytes(data: bytes, passed: int) -> bytes:
            if passed > 10 << 20 and not reached.is_set():
                state["big"][-100:] ^= 1
                reached.set()
            return data

        with Proxy(_wire.address(donor.metadata()), on_bytes) as proxy:
            url = _wire.through(donor.metadata(), proxy.port)
            error = self.fails(url, errors.IntegrityError, self.receiver(num_chunks=1))
        self.assertIn('snapshot="all"', str(error))
        wait_until(reached.is_set, "the change was made")

    def test_the_stream(self) -> None:
        state = {"big": block(40 << 20)}
        donor = HTTPTransport(timeout=20 * SCALE, num_chunks=0, host="127.0.0.1")
        self.addCleanup(donor.shutdown)
        donor.send_checkpoint([], STEP, state)
        receiver = self.receiver(num_chunks=0)
        receiver.recv_checkpoint(0, donor.metadata(), STEP)
        state["big"][-1] ^= 1
        error = self.fails(donor.metadata(), errors.IntegrityError, receiver)
        self.assertIn('snapshot="all"', str(error))
