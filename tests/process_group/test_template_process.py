# SPDX-License-Identifier: BSD-3-Clause
"""The template process itself: counted, ended, replaced, and every way in which it fails to start or dies."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests import load
from tests._support import LONG_S, SCALE, WAIT_S, GuardedTestCase, wait_until
from tests.process_group._template_tools import ENTRY, Talk, caught_stderr, ended, lives, soon, template

errors = load("_errors")
process = load("process_group._template_process")


class Counted(GuardedTestCase):
    limit_s = LONG_S

    def test_one_for_all_and_the_last_release_ends_it(self) -> None:
        with mock.patch.object(template, "ENTRY", ENTRY), mock.patch.dict(template._templates, clear=True):
            made: list[Any] = []
            # the thread that is the first to ask ends before the template is up
            thread = threading.Thread(target=lambda: made.append(template.acquire()))
            thread.start()
            thread.join()
            first, second = made[0], template.acquire()
            self.assertIs(first, second)
            with Talk(first) as talk:
                pid = first.pid()
                first.release()
                self.assertEqual(talk.ask("result = 'alive'"), "alive")
                self.assertEqual(second.pid(), pid)
                start_s = time.monotonic()
                second.release()
                self.assertLess(time.monotonic() - start_s, 0.5 * SCALE)
                self.assertFalse(lives(pid))
                self.assertFalse(lives(talk.first))
                self.assertTrue(talk.at_end())
                self.assertEqual(talk.child.wait(WAIT_S).signal_name, "SIGKILL")
            second.release()  # once too often
            with self.assertRaises(errors.StateError):
                Talk(second)
            # and anew
            self.assertIs(template.acquire(), first)
            with Talk(first):
                self.assertNotEqual(first.pid(), pid)
            first.release()

    def test_released_while_it_starts(self) -> None:
        source = template.Template(ENTRY).hold()
        failures: list[BaseException] = []

        def fork() -> None:
            try:
                Talk(source)
            except (errors.ChildStartFailed, errors.StateError) as error:
                failures.append(error)

        thread = threading.Thread(target=fork)
        thread.start()
        wait_until(source.pid, "it is started")
        start_s = time.monotonic()
        source.release()
        thread.join()
        self.assertLess(time.monotonic() - start_s, 1 * SCALE)
        self.assertIn("the last release()", str(failures[0]))

    def test_from_two_threads(self) -> None:
        source = template.Template(ENTRY).hold()
        source.hold()
        threads = [threading.Thread(target=source.release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertIsNone(source.pid())


class Dies(GuardedTestCase):
    limit_s = LONG_S

    def test_each_end_has_a_successor(self) -> None:
        """One end after the other, since the successor of one is the template of the next."""
        self.template = template.Template(ENTRY).hold()
        self.addCleanup(self.template.release)
        for end in (self.while_a_fork_is_awaited, self.while_nobody_waits, self.one_that_does_not_listen_is_put_down):
            with self.subTest(end.__name__):
                end()

    def while_a_fork_is_awaited(self) -> None:
        with Talk(self.template) as talk:
            pid = self.template.pid()
            os.kill(pid, signal.SIGSTOP)
            caught: list[tuple[BaseException, float]] = []

            def fork() -> None:
                try:
                    Talk(self.template)
                except errors.ChildStartFailed as error:
                    caught.append((error, time.monotonic()))

            threads = [threading.Thread(target=fork) for _ in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(self.template._process._requests) == 3, "all are asked for")
            start_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
            self.assertEqual(len(caught), 3)
            for error, when_s in caught:
                self.assertEqual(str(error), f"the template process {pid} was killed by SIGKILL")
                self.assertLess(when_s - start_s, 1 * SCALE)
            # its children end with it
            self.assertTrue(ended(talk.child.fileno(), 2 * SCALE))
            death = talk.child.wait(WAIT_S)
            self.assertEqual((death.exit_code, death.signal_name), (None, None))
            self.assertEqual(
                death.text(), f"process {talk.first} ended with the template process that it was forked from"
            )
        # the next one has a new template
        with Talk(self.template) as talk:
            self.assertEqual(talk.ask("result = 'alive'"), "alive")
            self.assertNotEqual(self.template.pid(), pid)

    def while_nobody_waits(self) -> None:
        with Talk(self.template) as talk:
            talk.ask("import ctypes; end.sendall(b'null\\n'); ctypes.PyDLL(None).sleep(600)")
            pid = self.template.pid()
            os.kill(pid, signal.SIGKILL)
            self.assertTrue(ended(talk.child.fileno(), 2 * SCALE), "also one that holds the GIL")
            talk.child.wait(WAIT_S)
            talk.child.kill()
        wait_until(lambda: self.template._process.gone(), "its end is known")
        self.assertIs(self.template.hold(), self.template)
        self.assertNotEqual(self.template.pid(), pid)
        self.template.release()
        with Talk(self.template):
            pass

    def one_that_does_not_listen_is_put_down(self) -> None:
        with Talk(self.template), mock.patch.object(self.template._process._pipe, "write_limit_s", 0.2):
            pid = self.template.pid()
            os.kill(pid, signal.SIGSTOP)
            large = mock.patch.dict(os.environ, {f"A_{i}": "x" * 100_000 for i in range(10)})
            with large, self.assertRaises(errors.ChildStartFailed) as caught:
                Talk(self.template)
            self.assertIn("SIGKILL", str(caught.exception))
            self.assertFalse(lives(pid))

    def test_one_that_does_not_answer_has_a_successor(self) -> None:
        source = template.Template(ENTRY).hold()
        self.addCleanup(source.release)
        with Talk(source) as talk, mock.patch.object(process, "_ANSWER_S", 0.4 * SCALE):
            pid = source.pid()
            os.kill(pid, signal.SIGSTOP)
            # not for one who is in a hurry: it may only be busy
            with self.assertRaises(errors.DeadlineExceeded):
                Talk(source, 0.1 * SCALE)
            self.assertTrue(lives(pid))
            with self.assertRaisesRegex(errors.DeadlineExceeded, "was killed"):
                Talk(source, 0.5 * SCALE)
            self.assertTrue(ended(talk.child.fileno(), WAIT_S))
        wait_until(lambda: source._process.gone(), "its end is known")
        with Talk(source) as talk:
            self.assertEqual(talk.ask("result = 'alive'"), "alive")
            self.assertNotEqual(source.pid(), pid)

    def test_a_user_who_does_not_read_stderr_holds_up_no_fork(self) -> None:
        reader, writer = os.pipe()
        kept = os.dup(2)
        os.dup2(writer, 2)
        os.close(writer)
        source = template.Template(ENTRY).hold()
        try:
            with Talk(source) as loud:
                os.dup2(kept, 2)
                loud.order("import os\nfor i in range(1000): os.write(2, b'x' * 1000)\nend.sendall(b'null\\n')")
                # the pipe to the user is full, then the template's memory, then the pipe of the child
                wait_until(lambda: filled(reader), "nobody reads")
                with Talk(source, WAIT_S) as quiet:
                    self.assertEqual(quiet.ask("result = 'alive'"), "alive")
                self.assertFalse(select.select([loud.end], [], [], 0.2)[0], "it writes into the template's memory")
                shown = 0
                while shown < 1_000_000:
                    shown += len(os.read(reader, 65536))
                self.assertEqual(shown, 1_000_000)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(reader)
            source.release()


def filled(reader: int) -> bool:
    """Whether the pipe is as full as it gets: its usual 64 KB."""
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, count)
    return bool(select.select([reader], [], [], 0)[0]) and count[0] > 60_000


class StartFails(GuardedTestCase):
    limit_s = LONG_S

    def failure(self, source: str, executable: str | None = sys.executable) -> tuple[str, str]:
        """What is raised, and what the user sees, when the entry module says ``source``."""
        with tempfile.TemporaryDirectory() as folder, caught_stderr() as shown:
            entry = Path(folder, "entry.py")
            entry.write_text(source)
            with mock.patch.object(sys, "executable", executable):
                made = template.Template(str(entry)).hold()
                try:
                    with self.assertRaises(errors.ChildStartFailed) as caught:
                        Talk(made)
                finally:
                    made.release()
            return str(caught.exception), shown.read_text()

    def test_by_an_import_error(self) -> None:
        said, shown = self.failure("import time\nraise ImportError(f'no such thing at {time.monotonic()}')")
        late_s = time.monotonic() - float(said.rpartition("no such thing at ")[2].split()[0])
        self.assertRegex(
            said, r"^the template process \d+ exited with code 1 while it started; the end of its stderr:\n"
        )
        self.assertIn("ImportError: no such thing", said)
        self.assertIn("ImportError: no such thing", shown)
        self.assertLess(late_s, 2 * SCALE)

    def test_by_a_signal(self) -> None:
        said, _ = self.failure("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        self.assertRegex(said, r"^the template process \d+ was killed by SIGSEGV while it started")

    def test_out_of_memory(self) -> None:
        said, _ = self.failure("import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); bytearray(1 << 30)")
        self.assertRegex(said, r"exited with code 1 while it started")
        self.assertIn("MemoryError", said)

    def test_without_an_interpreter(self) -> None:
        said, _ = self.failure("", executable="/nowhere/python")
        self.assertIn("could not be started with '/nowhere/python'", said)
        said, _ = self.failure("", executable=None)
        self.assertIn("could not be started with None", said)

    def test_with_the_wrong_interpreter(self) -> None:
        said, _ = self.failure("", executable="/bin/false")
        self.assertRegex(said, r"exited with code 1 while it started")

    def test_it_has_threads(self) -> None:
        source = (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\nmain = None"
        )
        said, _ = self.failure(source)
        self.assertRegex(said, r"could not fork a child: the template process \d+ has 2 threads \(.+, .+\)")

    def test_it_is_slow(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            entry = Path(folder, "entry.py")
            entry.write_text("import ctypes; ctypes.PyDLL(None).sleep(600)")
            made = template.Template(str(entry)).hold()
            try:
                with self.assertRaises(errors.DeadlineExceeded) as caught:
                    made.fork(soon(0.2), mock.Mock())
                self.assertIn("imports torch", str(caught.exception))
            finally:
                start_s = time.monotonic()
                made.release()
            self.assertLess(time.monotonic() - start_s, 1 * SCALE)

    def test_no_descriptor_or_thread_is_left(self) -> None:
        for name, error in (
            ("Pipe.pair", OSError(24, "Too many open files")),
            ("threading.Thread.start", RuntimeError("no")),
        ):
            with self.subTest(name), mock.patch(f"{process.__name__}.{name}", side_effect=error):
                made = template.Template(ENTRY)
                with self.assertRaises(errors.ChildStartFailed) as caught:
                    made.hold()
                self.assertIn(str(error), str(caught.exception))
