# SPDX-License-Identifier: BSD-3-Clause
"""The single stream. What must hold: what was saved is loaded, whichever of torch's functions there are; and with
``weights_only`` no pickle runs code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import tempfile
import unittest
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import PACKAGE, load
from tests._support import captured_logs, run_python
from tests.checkpointing._states import noise, same

compat = load("_compat")
checksum = load("checkpointing._checksum")
stream = load("checkpointing._stream")


class Exact(io.BytesIO):
    """A source as the transport gives it: ``read(n)`` gives n bytes or raises."""

    def read(self, size: int | None = -1) -> bytearray:  # type: ignore[override]
        data = bytearray(super().read(size))
        if size is not None and size >= 0 and len(data) != size:
            raise EOFError(f"{len(data)} of {size} bytes")
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self.read(len(view))
        return len(view)


class Pieces(list):
    """A sink that keeps what it is given."""

    def write(self, data: Any) -> int:
        self.append(bytes(data))
        return len(data)

    def all(self) -> bytes:
        return b"".join(self)


@contextlib.contextmanager
def gates(**changes: Any) -> Iterator[None]:
    """Let ``_compat`` say that torch has less than it has."""
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(compat, name, value))
        yield


def branches() -> dict[str, dict[str, Any]]:
    """The combinations of what a torch may have; those that this one can play."""
    found: dict[str, dict[str, Any]] = {
        "this torch": {},
        "no streaming": {"streaming_save": None, "streaming_load": None},
        "nothing private": dict.fromkeys(("streaming_save", "streaming_load", "save_records", "load_records")),
    }
    if compat.streaming_save is not None:
        found["streaming load is not sound"] = {"streaming_load": None}
    return found


def state() -> dict[str, Any]:
    flat = noise((40,), seed=1)
    tied = torch.nn.Parameter(noise((3, 4), seed=2))
    return {
        "weights": OrderedDict(a=noise((5, 3), seed=3), b=noise((2, 2), torch.bfloat16)), "tied": tied, "twin": tied,
        "view": flat[3:9], "turned": noise((2, 3)).t(), "empty": torch.empty(0), "hollow": torch.empty(3, 0, 2),
        "scalar": torch.tensor(5), "plain": [1, (2.5, "x"), {"n": None}, True], "grad": noise((2,)).requires_grad_(),
        "large": noise((300_000,), seed=4),
    }  # fmt: skip


class RoundTrip(unittest.TestCase):
    @contextlib.contextmanager
    def branch(self, name: str) -> Iterator[None]:
        with self.subTest(name), gates(**branches()[name]), captured_logs():
            yield

    def saved(self, obj: Any) -> bytes:
        sink = Pieces()
        stream.save(obj, sink)
        return sink.all()

    def test_what_was_saved_is_loaded(self) -> None:
        for name in branches():
            with self.branch(name):
                for weights_only in (True, False):
                    out = stream.load(Exact(self.saved(state())), weights_only=weights_only)
                    same(self, out, state())
                    self.assertIs(out["tied"], out["twin"])

    def test_states_that_are_small_or_empty(self) -> None:
        for name in branches():
            with self.branch(name):
                for obj in ({}, None, torch.empty(0), [torch.empty(0), torch.empty(0, 3)], {"a": 1}, torch.zeros(1)):
                    same(self, stream.load(Exact(self.saved(obj)), weights_only=True), obj)

    def test_the_same_state_gives_the_same_bytes(self) -> None:
        kept = state()
        for name in branches():
            with self.branch(name):
                self.assertEqual(self.saved(kept), self.saved(kept))

    def test_the_result_can_be_written_to(self) -> None:
        for name in branches():
            with self.branch(name):
                out = stream.load(Exact(self.saved({"t": torch.zeros(4)})), weights_only=True)
                out["t"].add_(1)
                self.assertEqual(out["t"].tolist(), [1.0] * 4)

    def test_the_meter_measures_what_is_written(self) -> None:
        kept = state()
        for name in branches():
            with self.branch(name):
                meter = stream.Meter()
                stream.save(kept, meter)
                data = self.saved(kept)
                self.assertEqual((meter.sums.nbytes, meter.sums.value()), (len(data), checksum.checksum_of(data)))

    def test_a_stream_that_is_cut_short_is_an_error(self) -> None:
        for name in branches():
            with self.branch(name):
                data = self.saved(state())
                for at in (0, 1, 8, 40, len(data) // 2, len(data) - 1):
                    with self.assertRaises(Exception):  # noqa: B017 whatever a loader raises; the receiver turns it into its own
                        stream.load(Exact(data[:at]), weights_only=True)


class Compatible(unittest.TestCase):
    def test_ours_reads_what_torch_writes(self) -> None:
        if compat.streaming_save is None:
            self.skipTest("this torch has no streaming save")
        sink = Pieces()
        compat.streaming_save(state(), sink)
        with gates(streaming_load=None):
            same(self, stream.load(Exact(sink.all()), weights_only=True), state())

    def test_the_last_resort_is_told_of_once_a_call(self) -> None:
        sink = Pieces()
        with gates(**branches()["nothing private"]), captured_logs(logging.WARNING) as records:
            stream.save({"t": torch.zeros(2)}, sink)
            self.assertEqual(len(records), 1)
            self.assertIn("twice the memory", records[0].getMessage())
            stream.load(Exact(sink.all()), weights_only=True)
        self.assertEqual(len(records), 2)

    def test_otherwise_nothing_is_told(self) -> None:
        for name, changes in branches().items():
            if name == "nothing private":
                continue
            with gates(**changes), captured_logs() as records, warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                sink = Pieces()
                stream.save(state(), sink)
                stream.load(Exact(sink.all()), weights_only=True)
            self.assertEqual((records, [str(w.message) for w in warned]), ([], []), name)

    def test_torch_does_not_warn_of_what_it_does_itself(self) -> None:
        """In an interpreter that has not been warned yet: torch does most of it once."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), torch.eye(4).to_sparse_csr()]
            whole, alone = io.BytesIO(), io.BytesIO()
            stream.save(state, whole)
            torch.save(state, alone)
        child = (
            f"import io, sys, torch; from {PACKAGE}.checkpointing import _stream as stream\n"
            "class Exact(io.BytesIO):\n"
            "    def read(self, n=-1): return bytearray(super().read(n))\n"
            "how, trusted, data = sys.argv[1], sys.argv[2] == 'False', bytes.fromhex(sys.stdin.read())\n"
            "if how == 'whole': stream.load(Exact(data), weights_only=not trusted)\n"
            "else: stream.load_object(data, weights_only=not trusted)\n"
        )
        for how, weights_only, data in (("whole", "True", whole), ("alone", "False", alone)):
            with self.subTest(how=how):
                done = run_python("-c", child, how, weights_only, input=data.getvalue().hex(), check=True)
                self.assertEqual(done.stderr, "")

    def test_a_table_that_claims_too_much(self) -> None:
        head = (1 << 40).to_bytes(8, "little")
        with gates(streaming_save=None, streaming_load=None), self.assertRaisesRegex(ValueError, "a table of"):
            stream.load(Exact(head + b"[]"), weights_only=True)


class Hostile(unittest.TestCase):
    """A pickle that writes a file: the file does not exist afterwards."""

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name, "written")
        ignoring = warnings.catch_warnings()
        ignoring.__enter__()
        self.addCleanup(ignoring.__exit__, None, None, None)
        warnings.simplefilter("ignore")  # torch's, about the protocol of these pickles

    def evil(self) -> Any:
        path = str(self.file)

        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (path,)

        return Evil()

    def test_in_the_place_of_a_state(self) -> None:
        for name, changes in branches().items():
            with self.subTest(name), gates(**changes), captured_logs():
                for obj in (self.evil(), {"a": torch.zeros(1), "b": self.evil()}):
                    sink = Pieces()
                    stream.save(obj, sink)
                    with self.assertRaises(Exception):  # noqa: B017 the loader's own
                        stream.load(Exact(sink.all()), weights_only=True)
                    self.assertFalse(self.file.exists())
                stream.load(Exact(sink.all()), weights_only=False)  # which trusts the donor, as it says
                self.assertTrue(self.file.exists())
                self.file.rmdir()

    def test_in_the_place_of_the_table(self) -> None:
        if compat.streaming_save is None:
            self.skipTest("the table of this torch is JSON")
        data = pickle.dumps([self.evil()], protocol=2)
        for changes in ({}, {"streaming_load": None}):
            with gates(**changes):
                for weights_only in (True, False):
                    with self.assertRaises(Exception):  # noqa: B017 the loader's own
                        stream.load(Exact(data), weights_only=weights_only)
                    self.assertFalse(self.file.exists())

    def test_in_the_place_of_everything(self) -> None:
        data = pickle.dumps(self.evil())
        for name, changes in branches().items():
            with self.subTest(name), gates(**changes), captured_logs():
                with self.assertRaises(Exception):  # noqa: B017 the loader's own
                    stream.load(Exact(data), weights_only=True)
                self.assertFalse(self.file.exists())


class Reasons(unittest.TestCase):
    def test_of_the_safe_loader(self) -> None:
        buffer = io.BytesIO()
        torch.save(Path("somewhere"), buffer)
        buffer.seek(0)
        with self.assertRaises(pickle.UnpicklingError) as caught:
            torch.load(buffer, weights_only=True)
        reason = stream.first_line(caught.exception)
        self.assertRegex(reason, r"Unsupported.*pathlib")
        self.assertTrue(reason.isprintable())

    def test_of_anything(self) -> None:
        self.assertEqual(stream.first_line(ValueError("\n a line \n and another")), "a line ")
        self.assertEqual(stream.first_line(ValueError()), "ValueError")
        self.assertEqual(len(stream.first_line(ValueError("x" * 1000))), 200)
