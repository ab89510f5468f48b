# SPDX-License-Identifier: BSD-3-Clause
"""The pipe. What must hold: frames come out whole and in order, whoever sends; a write ends by its limit, and one
that failed is the last; whoever reads is woken by the end, from either side; no descriptor is lost, and none is
closed under a thread that uses it.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import struct
import threading
import time
import unittest
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests import load
from tests._support import WAIT_S, GuardedTestCase, descriptors, wait_until

errors = load("_errors")
pipe = load("process_group._pipe")

Pipe, PipeBroken = pipe.Pipe, pipe.PipeBroken
# far longer than any write here lasts when the other side reads
LONG_S = 6 * WAIT_S
# a limit that is meant to be reached
SHORT_LIMIT_S = 0.2


class PipeTestCase(GuardedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.threads: list[threading.Thread] = []
        self.addCleanup(self.join)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)

    def start(self, job: Callable[[], object]) -> list[Any]:
        """Run ``job`` on a thread; its result or what it raised, once there is one."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(job())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        return found

    def pair(self, write_limit_s: float = LONG_S) -> tuple[Any, Any]:
        """Both ends, as pipes."""
        ours, end = Pipe.pair(write_limit_s, is_greedy=True)
        theirs = Pipe(end, write_limit_s, is_greedy=True)
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)
        return ours, theirs

    def half(self, write_limit_s: float = LONG_S) -> tuple[Any, socket.socket]:
        """One pipe, and the plain socket at its other end."""
        ours, end = Pipe.pair(write_limit_s, is_greedy=True)
        self.addCleanup(ours.close)
        self.addCleanup(end.close)
        return ours, end

    def broken(self, call: Callable[[], object], text: str = "", *, ended: bool) -> Any:
        with self.assertRaises(PipeBroken) as caught:
            call()
        self.assertIn(text, caught.exception.reason)
        self.assertEqual(str(caught.exception), caught.exception.reason)
        self.assertEqual(caught.exception.ended, ended, caught.exception)
        return caught.exception

    def in_receive(self, one: Any) -> None:
        """Wait until a thread is in the kernel for ``one``, or at least on its way."""
        wait_until(lambda: one._users, "a reader")
        time.sleep(0.02)  # from the count into the call; either order has to work


class Frames(PipeTestCase):
    def test_both_ways_and_in_order(self) -> None:
        ours, theirs = self.pair()
        rng = random.Random(1)
        frames = [rng.randbytes(rng.choice((0, 1, 3, 4, 5, 100, 5000))) for _ in range(50)]
        for one, other in ((ours, theirs), (theirs, ours)):
            for frame in frames[:20]:
                one.send(frame)
            self.assertEqual([other.receive() for _ in frames[:20]], frames[:20])
            for frame in frames:
                one.send(frame)
                self.assertEqual(other.receive(), frame)

    def test_a_frame_that_fits_no_buffer(self) -> None:
        ours, theirs = self.pair()
        frame = random.Random(2).randbytes(5_000_003)
        got = self.start(theirs.receive)
        ours.send(frame)
        wait_until(lambda: got, "received")
        self.assertEqual(got, [frame])

    def test_the_other_end_may_be_a_connection(self) -> None:
        ours, end = self.half()
        with Connection(end.detach()) as theirs:
            for size in (0, 1, 100, 16_384, 16_385, 70_000):
                ours.send(bytes(size))
                self.assertEqual(theirs.recv_bytes(), bytes(size))
                theirs.send_bytes(b"x" * size)
                self.assertEqual(ours.receive(), b"x" * size)

    def test_one_call_to_the_kernel_writes_a_frame_and_one_reads_all_there_are(self) -> None:
        ours, theirs = self.pair()
        counted = {"send": 0, "recvmsg": 0}

        class Counting:
            def __init__(self, real: socket.socket) -> None:
                self.real = real

            def __getattr__(self, name: str) -> Any:
                if name in counted:
                    counted[name] += 1
                return getattr(self.real, name)

        ours._socket, theirs._socket = Counting(ours._socket), Counting(theirs._socket)
        for _ in range(10):
            ours.send(b"x" * 1000)
            theirs.receive()
        self.assertEqual(counted, {"send": 10, "recvmsg": 10})
        for number in range(10):
            ours.send(b"%d" % number)
        self.assertEqual([theirs.receive() for _ in range(10)], [b"%d" % number for number in range(10)])
        self.assertEqual(counted, {"send": 20, "recvmsg": 11})
        self.assertEqual(theirs._inbox._data, b"", "what was taken is not kept")

    def test_one_that_is_not_greedy_leaves_what_it_is_not_asked_for(self) -> None:
        """Or who waits for its descriptor would not hear of it."""
        ours, end = Pipe.pair(LONG_S)
        theirs = Pipe(end, LONG_S)
        for one in (ours, theirs):
            self.addCleanup(one.close)
        poll = select.poll()
        poll.register(theirs.fileno(), select.POLLIN)
        for number in range(5):
            ours.send(b"%d" % number, [ours.fileno()])
        for number in range(5):
            self.assertTrue(poll.poll(0), number)
            self.assertEqual(theirs.receive(), b"%d" % number)
            before = len(descriptors())
            os.close(theirs.receive_fd())
            self.assertEqual(len(descriptors()), before, "it was made by the call that asks for it")
        self.assertFalse(poll.poll(0))

    def test_frames_of_every_length_one_behind_the_other(self) -> None:
        """What has been read ahead ends anywhere in a frame, or in its length."""
        ours, theirs = self.pair()
        rng = random.Random(3)
        frames = [rng.randbytes(rng.choice((0, 1, 100, 1000, 5000, 40_000))) for _ in range(500)]
        sent = self.start(lambda: [ours.send(frame) for frame in frames])
        for frame in frames:
            self.assertTrue(theirs.poll(LONG_S))
            self.assertEqual(theirs.receive(), frame)
        wait_until(lambda: sent, "all sent")
        self.assertFalse(theirs.poll(0))

    def test_eight_threads_send(self) -> None:
        ours, theirs = self.pair()
        count = 300

        def send(number: int) -> None:
            rng = random.Random(number)
            for place in range(count):
                ours.send(struct.pack("!BH", number, place) + bytes([number]) * rng.choice((0, 10, 3000, 40_000)))

        for number in range(8):
            self.start(lambda number=number: send(number))
        places = [0] * 8
        for _ in range(8 * count):
            frame = theirs.receive()
            number, place = struct.unpack("!BH", frame[:3])
            self.assertEqual(place, places[number])
            self.assertEqual(frame[3:], bytes([number]) * (len(frame) - 3))
            places[number] += 1
        self.assertEqual(places, [count] * 8)

    def test_a_signal_in_the_middle_is_no_end(self) -> None:
        ours, theirs = self.pair()
        hits: list[int] = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: hits.append(number))
        self.addCleanup(signal.signal, signal.SIGUSR1, before)
        frame = random.Random(3).randbytes(20_000_000)
        main = threading.get_ident()
        over = threading.Event()

        def signals() -> None:
            while not over.wait(0.001):
                signal.pthread_kill(main, signal.SIGUSR1)

        self.start(signals)
        try:
            got = self.start(theirs.receive)
            ours.send(frame)
            wait_until(lambda: got, "received")
            self.assertEqual(got, [frame])
            self.start(lambda: ours.send(frame))
            self.assertEqual(theirs.receive(), frame)
            self.start(lambda: (time.sleep(0.05), ours.send(b"x")))
            self.assertEqual(theirs.receive(), b"x")
        finally:
            over.set()
            self.join()
        self.assertTrue(hits)


class Limits(PipeTestCase):
    def test_a_length_that_is_none(self) -> None:
        for size in (-1, -(2**31), pipe.MAX_FRAME_BYTES + 1, 2**31 - 1):
            with self.subTest(size):
                ours, end = self.half()
                end.sendall(struct.pack("!i", size) + b"x")
                with self.assertRaisesRegex(errors.ProtocolError, f"a frame of {size} bytes is announced"):
                    ours.receive()
                self.broken(ours.receive, "after a frame that could not be read", ended=False)

    def test_a_frame_that_the_other_side_would_refuse_is_not_sent(self) -> None:
        ours, theirs = self.pair()
        with self.assertRaisesRegex(errors.ProtocolError, "longer than the pipe takes"):
            ours.send(bytes(pipe.MAX_FRAME_BYTES + 1))
        ours.send(b"next")
        self.assertEqual(theirs.receive(), b"next")

    def test_ten_thousand_frames_that_nobody_reads(self) -> None:
        ours, end = self.half(SHORT_LIMIT_S)
        began_s = time.monotonic()
        with self.assertRaises(PipeBroken) as caught:
            for _ in range(10_000):
                last_s = time.monotonic()
                ours.send(b"x" * 100)
        now_s = time.monotonic()
        self.assertGreaterEqual(now_s - last_s, SHORT_LIMIT_S)
        self.assertLess(now_s - began_s, SHORT_LIMIT_S + WAIT_S / 2)
        late = caught.exception.__cause__
        self.assertIs(type(late), errors.DeadlineExceeded)
        self.assertEqual(late.limit_s, SHORT_LIMIT_S)
        # and from now on at once, with the same words
        began_s = time.monotonic()
        for _ in range(1000):
            again = self.broken(lambda: ours.send(b"x"), caught.exception.reason, ended=False)
        self.assertIs(again.__cause__, late)
        self.assertLess(time.monotonic() - began_s, 1000 * SHORT_LIMIT_S / 10)
        # both sides are told, and whoever reads here has the reason rather than an end of file
        self.assertIs(self.broken(ours.receive, caught.exception.reason, ended=False).__cause__, late)
        while end.recv(65536):
            pass

    def test_a_frame_that_is_read_in_drops_has_one_limit(self) -> None:
        ours, end = self.half(SHORT_LIMIT_S)
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.02):
                with contextlib.suppress(OSError):
                    end.recv(20_000, socket.MSG_DONTWAIT)

        self.start(drip)
        began_s = time.monotonic()
        try:
            self.broken(lambda: ours.send(bytes(60_000_000)), "does not read", ended=False)
        finally:
            over.set()
            self.join()
        self.assertLess(time.monotonic() - began_s, SHORT_LIMIT_S + WAIT_S / 2)

    def test_the_turn_of_others_counts(self) -> None:
        ours, _ = self.half(SHORT_LIMIT_S)
        began_s = time.monotonic()
        found = [self.start(lambda: ours.send(bytes(1_000_000))) for _ in range(6)]
        wait_until(lambda: all(found), "all six have failed")
        self.assertLess(time.monotonic() - began_s, SHORT_LIMIT_S + WAIT_S / 2)
        for [error] in found:
            self.assertIsInstance(error, PipeBroken)
            self.assertIsInstance(error.__cause__, errors.DeadlineExceeded)

    def test_a_reader_is_woken_when_a_writer_gives_up(self) -> None:
        ours, _ = self.half(SHORT_LIMIT_S)
        told = self.start(ours.receive)
        self.in_receive(ours)
        self.broken(lambda: ours.send(bytes(1_000_000)), "does not read", ended=False)
        wait_until(lambda: told, "the reader is told")
        self.assertIsInstance(told[0].__cause__, errors.DeadlineExceeded)
        self.assertFalse(told[0].ended)

    def test_a_write_that_is_broken_off_is_the_last(self) -> None:
        ours, end = self.half()
        real = ours._socket

        class Interrupted:
            def send(self, data: bytes, flags: int) -> int:
                real.send(data[:10], flags)
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        ours._socket = Interrupted()
        with self.assertRaises(KeyboardInterrupt):
            ours.send(b"x" * 100)
        ours._socket = real
        self.broken(lambda: ours.send(b"next"), "broken off", ended=False)
        self.assertEqual(len(end.recv(1000)), 10)
        self.assertEqual(end.recv(1000), b"")

    def test_a_read_that_is_broken_off_is_the_last(self) -> None:
        ours, theirs = self.pair()
        real = ours._socket

        class Interrupted:
            def recvmsg(self, *args: int) -> bytes:
                real.recvmsg(*args)
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        theirs.send(b"xyz")
        theirs.send(b"next")
        ours._socket = Interrupted()
        with self.assertRaises(KeyboardInterrupt):
            ours.receive()
        ours._socket = real
        self.broken(ours.receive, "a read from the pipe was broken off", ended=False)


class Ends(PipeTestCase):
    def test_what_was_said_last_is_read_before_the_end(self) -> None:
        ours, theirs = self.pair()
        theirs.send(b"last words")
        theirs.close()
        self.assertTrue(ours.poll(0))
        self.assertEqual(ours.receive(), b"last words")
        for _ in range(2):
            self.assertTrue(ours.poll(0))
            self.broken(ours.receive, "closed the pipe between two frames", ended=True)

    def test_last_words_outlive_a_failed_write(self) -> None:
        ours, theirs = self.pair()
        theirs.send(b"last words")
        theirs.close()
        for _ in range(2):
            self.broken(lambda: ours.send(b"x"), "cannot be written", ended=True)
        self.assertEqual(ours.receive(), b"last words")
        self.broken(ours.receive, "closed the pipe", ended=True)

    def test_an_end_with_something_unread_there(self) -> None:
        ours, theirs = self.pair()
        theirs.send(b"last words")
        ours.send(b"never read")
        theirs.close()
        self.assertEqual(ours.receive(), b"last words")
        self.broken(ours.receive, ended=True)  # the kernel calls it a reset

    def test_an_end_inside_a_frame(self) -> None:
        for part in (b"\0", b"\0\0\0", b"\0\0\0\x05", b"\0\0\0\x05abc"):
            ours, end = self.half()
            end.sendall(part)
            end.close()
            self.broken(ours.receive, "closed the pipe", ended=True)

    def test_a_reader_is_woken_by_cut_and_by_close(self) -> None:
        for end_it in ("cut", "close"):
            for wait in ("receive", "poll", "receive_fd"):
                with self.subTest(end_it=end_it, wait=wait):
                    ours, _ = self.half()
                    call = (lambda one=ours: one.poll(LONG_S)) if wait == "poll" else getattr(ours, wait)
                    told = self.start(call)
                    self.in_receive(ours)
                    getattr(ours, end_it)()
                    wait_until(lambda told=told: told, "woken")
                    if wait == "poll":
                        self.assertEqual(told, [True])
                    else:
                        self.assertIn("on this side", told[0].reason)
                        self.assertFalse(told[0].ended)

    def test_a_writer_is_woken_by_cut_and_by_close(self) -> None:
        for end_it in ("cut", "close"):
            with self.subTest(end_it):
                ours, _ = self.half()
                told = self.start(lambda ours=ours: ours.send(bytes(5_000_000)))
                self.in_receive(ours)
                getattr(ours, end_it)()
                wait_until(lambda told=told: told, "woken")
                self.assertIn("on this side", told[0].reason)
                self.assertFalse(told[0].ended)

    def test_the_other_side_sees_a_cut(self) -> None:
        ours, theirs = self.pair()
        ours.send(b"before")
        ours.cut()
        ours.cut()
        self.assertEqual(theirs.receive(), b"before")
        self.broken(theirs.receive, "the other side", ended=True)
        self.broken(lambda: theirs.send(b"x"), ended=True)
        self.broken(lambda: ours.send(b"x"), "cut on this side", ended=False)

    def test_what_came_before_a_cut_can_be_read(self) -> None:
        ours, theirs = self.pair()
        theirs.send(b"before")
        ours.cut()
        self.assertEqual(ours.receive(), b"before")
        self.broken(ours.receive, "cut on this side", ended=False)

    def test_after_close(self) -> None:
        ours, _ = self.half()
        for _ in range(2):
            ours.close()
        ours.cut()
        self.assertEqual(ours.fileno(), -1)
        for call in (lambda: ours.send(b"x"), ours.receive, ours.receive_fd, lambda: ours.poll(0)):
            self.broken(call, "closed on this side", ended=False)

    def test_close_leaves_the_descriptor_to_who_uses_it(self) -> None:
        ours, _ = self.half()
        inside, go_on = threading.Event(), threading.Event()
        real = ours._socket

        class Slow:
            """Stands before the call that reads."""

            def recvmsg(self, *args: int) -> Any:
                inside.set()
                go_on.wait(WAIT_S)
                return real.recvmsg(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        ours._socket = Slow()
        told = self.start(ours.receive)
        self.assertTrue(inside.wait(WAIT_S))
        number = ours.fileno()
        ours.close()
        self.assertEqual(ours.fileno(), number)
        with open("/dev/null", "rb") as other:
            self.assertNotEqual(other.fileno(), number)
        go_on.set()
        wait_until(lambda: told, "the reader is out")
        self.assertIsInstance(told[0], PipeBroken)
        self.assertEqual(ours.fileno(), -1)

    def test_many_closed_while_they_are_read_and_written(self) -> None:
        rng = random.Random(5)
        for _ in range(150):
            ours, theirs = self.pair()

            def read(one: Any = theirs) -> None:
                with contextlib.suppress(PipeBroken):
                    while True:
                        if one.poll(LONG_S) and one.receive() != b"x" * 50:
                            raise AssertionError("something else was read")

            def write(one: Any = ours) -> None:
                with contextlib.suppress(PipeBroken):
                    while True:
                        one.send(b"x" * 50)

            jobs = [self.start(read), self.start(write), self.start(write)]
            time.sleep(rng.random() * 0.003)
            for one in rng.sample([ours, theirs], 2):
                one.close()
            wait_until(lambda jobs=jobs: all(jobs), "all three are out")
            self.assertEqual(jobs, [[None]] * 3)
            self.assertEqual((ours.fileno(), theirs.fileno()), (-1, -1))


class Polling(PipeTestCase):
    def test_nothing_something_and_the_time(self) -> None:
        ours, theirs = self.pair()
        self.assertFalse(ours.poll(0))
        began_s = time.monotonic()
        self.assertFalse(ours.poll(0.05))
        self.assertGreaterEqual(time.monotonic() - began_s, 0.05)
        theirs.send(b"x")
        self.assertTrue(ours.poll(0))
        self.assertTrue(ours.poll(LONG_S))

    def test_a_frame_wakes(self) -> None:
        ours, theirs = self.pair()
        told = self.start(lambda: ours.poll(LONG_S))
        self.in_receive(ours)
        theirs.send(b"x")
        wait_until(lambda: told, "woken")
        self.assertEqual(told, [True])

    def test_another_descriptor_wakes(self) -> None:
        ours, theirs = self.pair()
        reads, writes = os.pipe()
        self.addCleanup(os.close, reads)
        self.addCleanup(os.close, writes)
        told = self.start(lambda: ours.poll(LONG_S, reads))
        self.in_receive(ours)
        os.write(writes, b"!")
        wait_until(lambda: told, "woken")
        self.assertEqual(told, [False])
        self.assertFalse(ours.poll(LONG_S, reads))  # it was not read here
        theirs.send(b"x")
        self.assertTrue(ours.poll(LONG_S, reads))  # both
        os.read(reads, 1)
        self.assertTrue(ours.poll(LONG_S, reads))
        ours.receive()
        self.assertFalse(ours.poll(0.01, reads))

    def test_a_waiter_takes_over_from_the_reader(self) -> None:
        ours, theirs = self.pair()
        reads, writes = os.pipe()
        self.addCleanup(os.close, reads)
        self.addCleanup(os.close, writes)
        for number in range(50):
            told = self.start(lambda: ours.poll(LONG_S, reads))
            os.write(writes, b"!")
            wait_until(lambda told=told: told, "the reader has left")
            os.read(reads, 1)
            theirs.send(b"%d" % number)
            self.assertTrue(ours.poll(LONG_S))
            self.assertEqual(ours.receive(), b"%d" % number)

    def test_a_length_that_is_none_is_told_at_once(self) -> None:
        """Also one that was read ahead: nothing more will come to wake anybody."""
        for length in (-1, pipe.MAX_FRAME_BYTES + 1):
            ours, end = self.half()
            end.sendall(struct.pack("!i", 1) + b"x" + struct.pack("!i", length))
            self.assertEqual(ours.receive(), b"x")
            self.assertTrue(ours.poll(LONG_S))
            with self.assertRaisesRegex(errors.ProtocolError, "is announced"):
                ours.receive()


class Descriptors(PipeTestCase):
    def test_they_follow_their_frame(self) -> None:
        ours, theirs = self.pair()
        reads, writes = os.pipe()
        ours.send(b"two come", [reads, writes])
        ours.send(b"none come")
        os.close(reads)
        os.close(writes)
        self.assertEqual(theirs.receive(), b"two come")
        reads, writes = theirs.receive_fd(), theirs.receive_fd()
        self.assertEqual(theirs.receive(), b"none come")
        self.assertFalse(os.get_inheritable(reads))
        os.write(writes, b"through")
        self.assertEqual(os.read(reads, 100), b"through")
        os.close(reads)
        os.close(writes)

    def test_the_count_stays_flat(self) -> None:
        ours, theirs = self.pair()
        with open("/dev/null", "rb") as file:
            before = len(descriptors())
            for _ in range(5000):
                ours.send(b"segment", [file.fileno()])
                self.assertEqual(theirs.receive(), b"segment")
                os.close(theirs.receive_fd())
            self.assertEqual(len(descriptors()), before)

    def test_each_belongs_to_its_frame_when_all_are_there(self) -> None:
        ours, theirs = self.pair()
        counts = [1, 2, 0, 3, 1, 1]
        for number, count in enumerate(counts):
            fds = [os.memfd_create("x") for _ in range(count)]
            for at, fd in enumerate(fds):
                os.write(fd, b"%d %d" % (number, at))
            ours.send(b"%d" % number, fds)
            for fd in fds:
                os.close(fd)
        for number, count in enumerate(counts):
            self.assertEqual(theirs.receive(), b"%d" % number)
            for at in range(count):
                fd = theirs.receive_fd()
                self.assertEqual(os.pread(fd, 100, 0), b"%d %d" % (number, at))
                os.close(fd)
        self.assertFalse(theirs.poll(0))

    def test_one_that_nobody_asked_for_is_closed_with_the_pipe(self) -> None:
        ours, theirs = self.pair()
        before = len(descriptors())
        for _ in range(3):
            ours.send(b"segment", [ours.fileno()])
        for _ in range(2):  # the first of them before the second is asked for
            self.assertEqual(theirs.receive(), b"segment")
            os.close(theirs.receive_fd())
        self.assertEqual(theirs.receive(), b"segment")
        theirs.close()
        wait_until(lambda: len(descriptors()) < before, "it is closed")
        self.assertEqual(len(descriptors()), before - 1)

    def test_a_byte_read_ahead_is_no_descriptor(self) -> None:
        ours, theirs = self.pair()
        theirs.send(b"segment")
        theirs.send(b"", [theirs.fileno()])
        self.assertEqual(ours.receive(), b"segment")
        with self.assertRaisesRegex(errors.ProtocolError, "a byte of something else"):
            ours.receive_fd()

    def test_what_is_no_descriptor(self) -> None:
        ours, end = self.half()
        end.sendall(b"x")
        with self.assertRaisesRegex(errors.ProtocolError, "a byte of something else"):
            ours.receive_fd()
        end.close()
        self.broken(ours.receive_fd, "closed the pipe before a descriptor", ended=True)

    def test_too_many_at_once_are_closed(self) -> None:
        ours, end = self.half()
        with open("/dev/null", "rb") as file:
            before = len(descriptors())
            socket.send_fds(end, [b"\0"], [file.fileno()] * 5)
            with contextlib.suppress(PipeBroken):
                os.close(ours.receive_fd())
            self.assertEqual(len(descriptors()), before)

    def test_one_that_is_closed_breaks_the_pipe(self) -> None:
        ours, _ = self.half()
        reads, writes = os.pipe()
        os.close(reads)
        os.close(writes)
        self.broken(lambda: ours.send(b"segment", [reads]), "cannot be written", ended=False)
        self.broken(lambda: ours.send(b"x"), "cannot be written", ended=False)

    def test_none_is_free(self) -> None:
        ours, theirs = self.pair()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with open("/dev/null", "rb") as file:
            ours.send(b"segment", [file.fileno()])
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                self.assertEqual(theirs.receive(), b"segment")
                self.broken(theirs.receive_fd, "raise RLIMIT_NOFILE", ended=False)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Processes(PipeTestCase):
    def fork(self, job: Callable[[], object]) -> int:
        """Run ``job`` in a fork of this process, which is killed at the end of the test if it still runs."""
        with warnings.catch_warnings():
            # Python 3.12 on warns of locks that other threads hold, which is what some of these tests are about
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            self.addCleanup(os.waitpid, pid, 0)
            self.addCleanup(os.kill, pid, signal.SIGKILL)
            return pid
        with contextlib.suppress(BaseException):
            job()
        os._exit(0)

    def child(self, job: Callable[[Any], object], write_limit_s: float = LONG_S) -> tuple[Any, int]:
        """A pipe to a child that runs ``job`` with its own end of it, and the child's pid."""
        ours, end = Pipe.pair(write_limit_s)
        self.addCleanup(ours.close)

        def with_pipe() -> None:
            ours.close()
            job(Pipe(end, LONG_S))

        pid = self.fork(with_pipe)
        end.close()
        return ours, pid

    def test_a_child_that_is_killed_is_an_end(self) -> None:
        def echo(theirs: Any) -> None:
            while True:
                theirs.send(theirs.receive() * 2)

        ours, pid = self.child(echo)
        ours.send(b"ab")
        self.assertEqual(ours.receive(), b"abab")
        told = self.start(ours.receive)
        self.in_receive(ours)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: told, "the reader is told")
        self.assertIsInstance(told[0], PipeBroken)
        self.assertTrue(told[0].ended)

    def test_a_child_that_is_stopped_does_not_hold_up_a_write(self) -> None:
        def read(theirs: Any) -> None:
            while True:
                theirs.receive()

        ours, pid = self.child(read, SHORT_LIMIT_S)
        os.kill(pid, signal.SIGSTOP)
        with self.assertRaises(PipeBroken) as caught:
            for _ in range(10_000):
                ours.send(b"x" * 100)
        self.assertIsInstance(caught.exception.__cause__, errors.DeadlineExceeded)

    def test_a_fork_ends_nothing_here(self) -> None:
        ours, theirs = self.pair()
        told = self.start(ours.receive)
        self.in_receive(ours)
        reads, writes = os.pipe()
        self.addCleanup(os.close, reads)
        ours._using.acquire()  # as any thread may, when another one forks
        try:

            def end() -> None:
                ours.cut()
                ours.close()
                os.write(writes, b"closed" if ours.fileno() == -1 else b"open")

            self.fork(end)
        finally:
            ours._using.release()
        os.close(writes)
        self.assertEqual(os.read(reads, 100), b"closed")
        theirs.send(b"still there")
        wait_until(lambda: told, "received")
        self.assertEqual(told, [b"still there"])
        ours.send(b"and back")
        self.assertEqual(theirs.receive(), b"and back")


if __name__ == "__main__":
    unittest.main()
