# SPDX-License-Identifier: BSD-3-Clause
"""Messages and frames. What must hold: a message comes out as it went in; whatever else a frame holds, and however
it is damaged, it gives a ProtocolError and nothing of it runs; nothing crosses but builtins.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import resource
import struct
import subprocess
import typing
import unittest
from typing import Any

from tests import load
from tests._support import GuardedTestCase

errors = load("_errors")
messages = load("process_group._messages")

TENSOR = ("t", 0, 4096, 6, (2, 3))
SAMPLES = [
    messages.Configure(1, "gloo", "host:29500/x", 0, 2, 30.0, (4, 9)),
    messages.Run(0, -1, 3, 30.0, ((TENSOR, TENSOR),), (0, 0, None, -1, False, 2.0, "x", (1, (2,)))),
    messages.Run(7, 6, 3, 0.0, ((((TENSOR,), (TENSOR,)), (TENSOR,)), 1, (-1, 2)), ()),
    messages.Segment(0, 1 << 40),
    messages.DropSegment(3),
    messages.Bye(),
    messages.Hello(4242),
    messages.Ready(1),
    messages.ConfigureFailed("RuntimeError", "no", "Traceback ...\n"),
    messages.Done(2**62),
    messages.Done(3, 1),
    messages.OpFailed(5, "RuntimeError", "connection reset \udcff\u20ac", "", True),
    messages.Broken("SystemExit", "3", ""),
    messages.Unsupported(5, "gloo has no reduce_scatter of this kind"),
    messages.Phase("rendezvous"),
    messages.DeviceMemory(1, "cuda", 0, b"\0" * 64, 1 << 36, 512),
    messages.DropMemory(1),
    messages.DeviceEvents(1, "cuda", 7, b"r" * 64, b"d" * 64),
    messages.RunOnDevice(0, 1, 3, 30.0, ((("d", 1, 512, 6, (2, 3)),),), (0,)),
    messages.Dropped(1),
]


# How many fields of each cross as integers; the others follow as a pickle.
INTEGERS = {
    "Configure": 1,
    "Run": 3,
    "RunOnDevice": 3,
    "Segment": 2,
    "DropSegment": 1,
    "Bye": 0,
    "Hello": 1,
    "Ready": 1,
    "ConfigureFailed": 0,
    "Done": 2,
    "OpFailed": 1,
    "Broken": 0,
    "Unsupported": 1,
    "Phase": 0,
    "DeviceMemory": 1,
    "DropMemory": 1,
    "DeviceEvents": 1,
    "Dropped": 1,
}


def integers(message: Any) -> int:
    return INTEGERS[message.__name__]


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


class RoundTrip(unittest.TestCase):
    def test_every_message_comes_out_as_it_went_in(self) -> None:
        self.assertEqual({type(sample) for sample in SAMPLES}, set(messages.MESSAGES))
        for sample in SAMPLES:
            with self.subTest(type(sample).__name__):
                frame = messages.encode(sample)
                self.assertIsInstance(frame, bytes)
                self.assertEqual(messages.decode(frame), sample)
                self.assertIs(type(messages.decode(frame)), type(sample))

    def test_the_union_and_the_table_name_the_same(self) -> None:
        self.assertEqual(set(typing.get_args(messages.Message)), set(messages.MESSAGES))

    def test_a_message_cannot_be_changed(self) -> None:
        for sample in SAMPLES:
            for name in sample._fields:
                with self.assertRaises(AttributeError):
                    setattr(sample, name, 0)

    def test_no_frame_names_a_class_or_a_module(self) -> None:
        for sample in SAMPLES:
            text = messages.encode(sample)[1 + 8 * integers(type(sample)) :]
            names = {opcode.name for opcode, _, _ in pickletools.genops(text)} if text else set()
            self.assertFalse(names & {"GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "NEWOBJ", "BUILD"}, sample)

    def test_a_time_may_be_whole(self) -> None:
        again = messages.decode(messages.encode(messages.Run(0, -1, 0, 30, (), ())))
        self.assertEqual(again.timeout_s, 30)


class Hostile(GuardedTestCase):
    def refused(self, data: bytes, what: str = "") -> str:
        with self.assertRaises(errors.ProtocolError) as caught:
            messages.decode(data)
        text = str(caught.exception)
        self.assertIn(what, text)
        self.assertLess(len(text), 1000)
        return text

    def frame(self, name: str, *values: Any) -> bytes:
        """As ``encode`` would write it, with any values behind the integers."""
        number, count = self.number(name), INTEGERS[name]
        head = struct.pack(f"<B{count}q", number, *values[:count])
        return head + pickle.dumps(values[count:], 5) if len(values) > count else head

    def number(self, name: str) -> int:
        return [message.__name__ for message in messages.MESSAGES].index(name)

    def test_a_class_that_is_named_is_refused_and_nothing_runs(self) -> None:
        path = f"/tmp/nobody-makes-this-{os.getpid()}"
        head = bytes([self.number("Phase")])
        for protocol in range(6):
            for what in (
                (Evil(path),),
                Evil(path),
                (os.system,),
                (subprocess.Popen,),
                (complex(1),),
                ({1},) if protocol < 4 else (range(3),),
                SAMPLES[0],
            ):
                with self.subTest(protocol=protocol, what=repr(what)[:60]):
                    self.refused(head + pickle.dumps(what, protocol))
                    self.refused(pickle.dumps(what, protocol))
        self.assertFalse(os.path.exists(path))
        self.refused(head + pickle.dumps((Evil(path),), 5), "names posix.mkdir, and only builtins cross the pipe")
        # the oldest ways to call something, as no pickler writes them any more
        self.refused(head + b"cposix\nsystem\n(S'false'\ntR.", "posix.system")
        self.refused(head + b"(S'false'\niposix\nsystem\n.", "posix.system")
        self.refused(head + b"Pname\n.")
        self.refused(head + b"\x80\x02\x82\x01.")  # a class by its number in copyreg's registry

    def test_what_is_no_message(self) -> None:
        last = len(messages.MESSAGES) - 1
        for data in (b"", bytes([last + 1]), b"\x80\x05", b"\xff" * 100):
            with self.subTest(data):
                self.refused(data, f"a frame of {len(data)} bytes begins with no message's number (0 to {last})")
        for value in (None, 5, "x", [], ["text"], {}, {"text": 1}):
            with self.subTest(value):
                self.refused(bytes([self.number("Phase")]) + pickle.dumps(value, 5), "Phase came with no fields")

    def test_a_wrong_number_of_fields(self) -> None:
        for message in messages.MESSAGES:
            name, head, count = message.__name__, [0] * integers(message), len(message._fields) - integers(message)
            for wrong in {0, count - 1, count + 1, count + 100} - {count, -1}:
                frame = self.frame(name, *head) + pickle.dumps((0,) * wrong, 5)
                self.refused(frame, f"{name} came with {wrong} fields after its integers, not {count}")
            for size in range(1, len(self.frame(name, *head))):
                self.refused(self.frame(name, *head)[:size], f"a frame of {size} bytes is too short for {name}")

    def test_every_field_is_checked(self) -> None:
        """Each field in turn, of each message, with what no field may be."""
        numbers = (-5, -(2**63))
        never = (
            *numbers,
            [],
            b"x",
            {1: 2},
            {"a": None},
            -(2**70),
            2**64,
            float("nan"),
            float("inf"),
            -0.5,
            ((((((((),),),),),),),),
        )
        for sample in SAMPLES:
            cls, values = type(sample).__name__, list(sample)
            for place, name in enumerate(sample._fields):
                for wrong in numbers if place < integers(type(sample)) else never:
                    with self.subTest(message=cls, field=name, wrong=repr(wrong)):
                        frame = self.frame(cls, *values[:place], wrong, *values[place + 1 :])
                        self.refused(frame, f"{cls}.{name} is a {type(wrong).__name__}")

    def test_a_bool_is_no_number_and_a_number_no_bool(self) -> None:
        self.refused(self.frame("DeviceMemory", 0, "cuda", True, b"", 0, 0), "DeviceMemory.device is a bool (True)")
        self.refused(self.frame("OpFailed", 1, "", "", "", 1), "OpFailed.broken is a int (1)")
        self.refused(self.frame("Run", 1, 1, 1, 1.0, (True,), ()), "Run.args")

    def test_what_was_refused_once_is_refused_again(self) -> None:
        """What follows the integers is read once, and known: not so what did not fit."""
        good, bad = (self.frame("Run", 0, -1, 1, 1.0, args, ()) for args in ((TENSOR,), (("x",),)))
        for _ in range(3):
            self.assertEqual(messages.decode(good).args, (TENSOR,))
            self.refused(bad, "Run.args")
        # the same bytes after the integers of another message are not what they are in this one
        self.assertEqual(messages.decode(b"".join([self.frame("Phase"), pickle.dumps(("x",), 5)])).text, "x")
        self.refused(self.frame("ConfigureFailed") + pickle.dumps(("x",), 5), "ConfigureFailed came with 1 fields")

    def test_long_ones_are_not_kept(self) -> None:
        before = messages._known.cache_info().currsize
        for length in (10_000, 20_000):
            args = (TENSOR,) * length
            self.assertEqual(messages.decode(self.frame("Run", 0, -1, 1, 1.0, args, ())).args, args)
        self.assertEqual(messages._known.cache_info().currsize, before)

    def test_arguments(self) -> None:
        wrong: list[object] = [
            ("t",),
            ("t", 0, 0, 0),
            ("t", 0, 0, 0, [1]),
            ("t", 0, 0, 0, (1, -1)),
            ("t", 0, 0, 0, (1.0,)),
            ("t", -1, 0, 0, ()),
            ("t", 0, 0, 0, (), 0),
            ("x", 0, 0, 0, ()),
            (0, "t"),
            "t",
            None,
            1.5,
            2**63,
            -(2**63) - 1,
        ]
        for one in wrong:
            for args in ((one,), ((one,),), (TENSOR, (TENSOR, one))):
                with self.subTest(args):
                    self.refused(self.frame("Run", 0, 0, 0, 1.0, args, ()), "Run.args is a tuple that does not fit")
        ends = (2**63 - 1, -(2**63))
        self.assertEqual(messages.decode(self.frame("Run", 0, 0, 0, 1.0, ends, ())).args, ends)

    def test_huge_numbers_are_refused_without_being_written_out(self) -> None:
        huge = 1 << 1_000_000  # its decimal digits would take seconds, and Python 3.11 on refuses to make them
        for place in range(3, 6):
            values: list[Any] = [0, 0, 0, 1.0, (), ()]
            values[place] = (huge,) if place > 3 else huge
            self.refused(self.frame("Run", *values), "Run.")

    def test_deep_nesting(self) -> None:
        for opening, closing in ((b"(", b"t"), (b"]", b"a"), (b"}I1\n", b"s")):
            for depth in (10, 1000, 200_000):
                data = self.frame("Run", 0, 0, 0) + b"\x80\x05(F1.0\n" + opening * depth + b"I1\n" + closing * depth
                self.refused(data + b")t.", "Run.args")
        shared: object = (1,)
        for _ in range(100):  # 2**100 leaves, were it walked to its end
            shared = (shared, shared)
        self.refused(self.frame("Run", 0, 0, 0, 1.0, shared, shared), "Run.args")
        self.refused(self.frame("Run", 0, 0, 0, 1.0, (), shared), "Run.options")

    def test_every_beginning_of_a_frame_is_refused(self) -> None:
        for sample in SAMPLES:
            frame = messages.encode(sample)
            for end in range(len(frame)):
                self.refused(frame[:end])
            self.refused(frame + b"\0", type(sample).__name__)
            self.refused(frame + frame)

    def test_altered_frames_are_another_message_or_refused(self) -> None:
        # A damaged frame can ask for gigabytes (a memo's place is an index): here that has to fail, not to be had.
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", encoding="ascii") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        rng = random.Random(20)
        frames = [messages.encode(sample) for sample in SAMPLES]
        refused = 0
        for _ in range(60_000):
            frame = bytearray(rng.choice(frames))
            for _ in range(rng.randint(1, 4)):
                what, place = rng.randrange(4), rng.randrange(len(frame))
                if what == 0:
                    frame[place] = rng.randrange(256)
                elif what == 1:
                    frame[place] ^= 1 << rng.randrange(8)
                elif what == 2 and len(frame) > 1:
                    del frame[place]
                else:
                    frame.insert(place, rng.randrange(256))
            if BYTEARRAY8 in frame:  # CPython complains on stderr when it cannot have the memory for that one
                continue
            try:
                again = messages.decode(bytes(frame))
            except errors.ProtocolError:
                refused += 1
            else:
                self.assertIn(type(again), messages.MESSAGES)
                self.assertEqual(messages.decode(messages.encode(again)), again)
        self.assertGreater(refused, 20_000)

    def test_noise_is_refused(self) -> None:
        rng = random.Random(21)
        opcodes = bytes(ord(opcode.code) for opcode in pickletools.opcodes)
        likely, any_byte = (bytes(set(some) - MEMORY) for some in (opcodes, range(256)))
        for _ in range(20_000):
            body = bytes(rng.choice(likely if rng.random() < 0.7 else any_byte) for _ in range(rng.randint(0, 20)))
            self.refused(self.frame("OpFailed", 0) + b"\x80\x05" + body + b".")


# PUT and LONG_BINPUT have CPython make and clear a memo of any size, up to 64 GB, and it complains on stderr when it
# cannot have the memory for a BYTEARRAY8: a child that wants to use our memory is not what frames protect against.
BYTEARRAY8 = 0x96
MEMORY = {ord("p"), ord("r"), BYTEARRAY8}

if __name__ == "__main__":
    unittest.main()
