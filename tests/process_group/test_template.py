# SPDX-License-Identifier: BSD-3-Clause
"""One template, many children: what a child is given, how it ends, how it is ended, and what is left of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import torch

from tests import PACKAGE, load
from tests._support import GRACE_S, LONG_S, SCALE, WAIT_S, GuardedTestCase, Holdings, leaks_since, wait_until
from tests.process_group._template_tools import ENTRY, Talk, caught_stderr, ended, lives, soon, template

errors = load("_errors")

# A native call of ten minutes, with the GIL held and without.
SLEEP_WITH_GIL = "import ctypes; end.sendall(b'null\\n'); ctypes.PyDLL(None).sleep(600)"
SLEEP_WITHOUT_GIL = "import ctypes; end.sendall(b'null\\n'); ctypes.CDLL(None).sleep(600)"


class SharedTemplate(GuardedTestCase):
    """Tests that need nothing but a template that is up; its user's stderr is the file ``stderr``."""

    limit_s = LONG_S
    # what the template and its children are started with
    entry = ENTRY

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        before = Holdings.now()
        cls.addClassCleanup(cls.look, before)
        context = caught_stderr()
        cls.stderr = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        cls.template = template.Template(cls.entry).hold()
        cls.addClassCleanup(cls.template.release)
        with Talk(cls.template):
            pass

    @classmethod
    def look(cls, before: Holdings) -> None:
        left = leaks_since(before)
        if left:
            raise AssertionError("left behind:\n  " + "\n  ".join(left))

    def talk(self) -> Talk:
        talk = Talk(self.template)
        self.addCleanup(talk.__exit__, None, None, None)
        return talk

    def shown(self) -> str:
        return self.stderr.read_text(errors="replace")


class Present(SharedTemplate):
    """A child inherits the template's past and is given the trainer's present."""

    def test_environment_is_the_present_one_whole(self) -> None:
        names = {
            "A_NEW": "ä = 1",
            "A_RAW": os.fsdecode(b"\xff\xfe"),
            "OPENBLAS_NUM_THREADS": "3",
            "A_LONG": "x" * 300_000,
        }
        os.environ["A_OLD"] = "1"
        with Talk(self.template) as first:
            self.assertEqual(first.ask("import os; result = os.environ.get('A_OLD')"), "1")
        del os.environ["A_OLD"]
        old = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            talk = self.talk()
            wanted = dict(os.environ)
        finally:
            for name, value in old.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self.assertEqual(talk.ask("import os; result = dict(os.environ)"), wanted)
        # what C and C++ will read
        getenv = (
            "import ctypes; g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p; result = [str(g(n)) for n in {}]"
        )
        self.assertEqual(talk.ask(getenv.format("(b'OPENBLAS_NUM_THREADS', b'A_OLD')")), ["b'3'", "None"])

    def test_folder(self) -> None:
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            self.assertEqual(self.talk().ask("import os; result = os.getcwd()"), os.path.realpath(folder))
        # it is gone, and where we are has no name
        self.assertEqual(self.talk().ask("result = 1 + 1"), 2)

    def test_threads_log_level_and_debug_level(self) -> None:
        logger = logging.getLogger(PACKAGE)
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        self.addCleanup(logger.setLevel, logger.level)
        torch.set_num_threads(3)
        logger.setLevel(logging.INFO)
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        self.addCleanup(os.environ.pop, "TORCH_DISTRIBUTED_DEBUG")
        talk = self.talk()
        self.assertEqual(talk.ask("import torch; result = torch.get_num_threads()"), 3)
        self.assertEqual(
            talk.ask("import torch.distributed; result = torch.distributed.get_debug_level().name"), "INFO"
        )
        talk.ask(
            "import logging, sys; name = next(n for n in sys.modules if n.endswith('._template_main'));"
            "logger = logging.getLogger(name); logger.info('told'); logger.debug('not told')"
        )
        talk.order("code = 0")
        tail = talk.child.wait(WAIT_S).stderr_tail
        self.assertRegex(tail, rf"INFO .*_template_main \(pid {talk.child.pid}\): told")
        self.assertNotIn("not told", tail)

    def test_nothing_of_the_trainers_is_imported_and_the_path_is_its(self) -> None:
        talk = self.talk()
        found = talk.ask("import sys; result = list(sys.modules)")
        top = {name.partition(".")[0] for name in found}
        self.assertFalse(top & {PACKAGE.partition(".")[0], "tests"})
        self.assertEqual(talk.ask("import sys; result = sys.path"), sys.path)
        self.assertEqual(talk.ask("import sys; result = list(sys.flags)"), list(sys.flags))
        self.assertEqual(talk.ask("result = sys.executable"), sys.executable)

    def test_one_thread_and_no_device_in_the_template(self) -> None:
        talk = self.talk()
        self.assertEqual(talk.ask("import os; result = os.getppid()"), self.template.pid())
        self.assertEqual(len(os.listdir(f"/proc/{self.template.pid()}/task")), 1)
        self.assertFalse(talk.ask("import torch; result = torch.cuda.is_initialized()"))

    def test_descriptors_are_the_socket_and_the_standard_ones(self) -> None:
        others = [self.talk() for _ in range(3)]
        self.assertEqual(len(others), 3)
        code = (
            "import os\nresult = {}\n"
            "for n in os.listdir('/proc/self/fd'):\n"
            "    try: result[n] = os.readlink('/proc/self/fd/' + n)\n"
            "    except OSError: pass"
        )
        found = self.talk().ask(code)
        self.assertEqual(found.pop("0"), os.devnull)
        self.assertRegex(found.pop("2"), "pipe:")
        found.pop("1")
        self.assertEqual([target.partition(":")[0] for target in found.values()], ["socket"], found)

    @unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
    def test_device(self) -> None:
        index = torch.cuda.device_count() - 1
        here, there = socket.socketpair()
        with here:
            child = self.template.fork(soon(), there, ("cuda", index))
            stream = here.makefile("rw")
            self.assertEqual(int(stream.readline()), child.pid)
            stream.write('"import torch; result = torch.cuda.current_device()"\n')
            stream.flush()
            self.assertEqual(int(stream.readline()), index)
            stream.close()
        self.assertIsNotNone(child.wait(WAIT_S))
        child.close()

    def test_signals_of_a_job_are_the_trainers(self) -> None:
        talk = self.talk()
        for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            for pid in (self.template.pid(), talk.child.pid):
                os.kill(pid, getattr(signal, number))
        self.assertEqual(talk.ask("result = 'alive'"), "alive")
        with Talk(self.template) as another:
            self.assertEqual(another.ask("result = 'alive'"), "alive")


class Deaths(SharedTemplate):
    """How a child ends is told, with what it wrote last."""

    def after(self, code: str) -> object:
        """How a child ends after ``code``: at the end of its file and within the time that a trainer waits."""
        talk = self.talk()
        talk.order(code)
        self.assertTrue(talk.at_end())
        death = talk.child.wait(0.2 * SCALE)
        self.assertIsNotNone(death, "no report within 200 ms of the end of file")
        self.assertEqual(death.pid, talk.first)
        return death

    def test_exit_codes(self) -> None:
        for code, wanted in {
            "code = 0": 0,
            "code = 3": 3,
            "raise SystemExit": 0,
            "raise SystemExit(5)": 5,
            "import os; os._exit(9)": 9,
        }.items():
            with self.subTest(code):
                death = self.after(code)
                self.assertEqual((death.exit_code, death.signal_name, death.stderr_tail), (wanted, None, ""))
                self.assertEqual(death.text(), f"process {death.pid} exited with code {wanted}")

    def test_exit_with_a_text(self) -> None:
        death = self.after("raise SystemExit('no more')")
        self.assertEqual((death.exit_code, death.stderr_tail), (1, "no more\n"))

    def test_exception_is_told_with_its_traceback(self) -> None:
        death = self.after("raise KeyError('which')")
        self.assertEqual(death.exit_code, 70)
        self.assertIn("Traceback (most recent call last)", death.stderr_tail)
        self.assertIn("KeyError: 'which'", death.stderr_tail)
        wait_until(lambda: "KeyError: 'which'" in self.shown(), "the user sees it as well")

    def test_signals(self) -> None:
        for name in ("SIGKILL", "SIGSEGV", "SIGABRT"):
            with self.subTest(name):
                death = self.after(f"import os, signal; os.kill(os.getpid(), signal.{name})")
                self.assertEqual((death.exit_code, death.signal_name), (None, name))
                self.assertEqual(death.text(), f"process {death.pid} was killed by {name}")
                if name == "SIGSEGV":
                    self.assertIn("Fatal Python error: Segmentation fault", death.stderr_tail)
                    self.assertIn("_template_entry.py", death.stderr_tail)

    def test_a_signal_without_a_name(self) -> None:
        self.assertEqual(self.after("import os; os.kill(os.getpid(), 40)").signal_name, "signal 40")

    def test_no_exit_hook_runs_and_what_was_written_is_flushed(self) -> None:
        death = self.after(
            "import atexit, sys; atexit.register(sys.stderr.write, 'hook'); sys.stderr.write('x'); code = 0"
        )
        self.assertEqual((death.exit_code, death.stderr_tail), (0, "x"))

    def test_the_last_8_kb_of_stderr_are_kept_and_all_of_it_is_shown(self) -> None:
        before = len(self.shown())
        death = self.after("import os\nfor i in range(2000): os.write(2, b'%099d\\n' % i)\ncode = 4")
        self.assertEqual(len(death.stderr_tail), 8192)
        self.assertTrue(death.stderr_tail.endswith(f"{1999:099d}\n"))
        wait_until(lambda: len(self.shown()) - before >= 200_000, "all of it is shown")
        self.assertIn(f"{0:099d}\n", self.shown())

    def test_a_child_that_closes_its_stderr_lives(self) -> None:
        talk = self.talk()
        talk.ask("import os; os.close(2)")
        time_s = self.cpu_of_the_template()
        self.assertEqual(talk.ask("import time; time.sleep(0.3); result = 1"), 1)
        self.assertLess(self.cpu_of_the_template() - time_s, 0.2, "the template spins")
        talk.order("code = 6")
        self.assertEqual(talk.child.wait(WAIT_S).exit_code, 6)

    def cpu_of_the_template(self) -> float:
        fields = Path(f"/proc/{self.template.pid()}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def test_a_grandchild_that_holds_stderr_holds_nothing_up(self) -> None:
        death = self.after(
            "import subprocess, sys; print('last', file=sys.stderr, flush=True);"
            "subprocess.Popen(['sleep', '2'], close_fds=True); code = 8"
        )
        self.assertEqual((death.exit_code, death.stderr_tail), (8, "last\n"))

    def test_our_end_is_closed_at_once_and_the_child_sees_the_end_of_the_other(self) -> None:
        here, there = socket.socketpair()
        with here:
            child = self.template.fork(soon(), there)
            self.addCleanup(child.close)
            self.assertEqual(there.fileno(), -1)
            self.assertEqual(int(here.recv(64)), child.pid)
        self.assertEqual(child.wait(WAIT_S).exit_code, 0)


class Kill(SharedTemplate):
    """By the pidfd, whatever the child is doing."""

    def test_in_native_calls(self) -> None:
        for code in (SLEEP_WITH_GIL, SLEEP_WITHOUT_GIL):
            with self.subTest(code):
                talk = self.talk()
                talk.ask(code)
                start_s = time.monotonic()
                talk.child.kill()
                self.assertTrue(talk.at_end())
                self.assertEqual(talk.child.wait(WAIT_S).signal_name, "SIGKILL")
                self.assertLess(time.monotonic() - start_s, 1 * SCALE)
                self.assertFalse(lives(talk.first))

    def test_again_late_and_after_close(self) -> None:
        talk = self.talk()
        self.assertIsNone(talk.child.wait(0))
        talk.child.close()
        talk.child.close()
        self.assertEqual(talk.child.fileno(), -1)
        talk.child.kill()  # through the template now
        self.assertEqual(talk.child.wait(WAIT_S).signal_name, "SIGKILL")
        talk.child.kill()

    def test_pidfd_tells_the_end(self) -> None:
        talk = self.talk()
        self.assertFalse(ended(talk.child.fileno(), 0))
        talk.order("code = 0")
        self.assertTrue(ended(talk.child.fileno(), WAIT_S))
        talk.child.kill()
        self.assertEqual(talk.child.wait(WAIT_S).exit_code, 0)

    def test_in_a_fork_of_the_trainer_nothing_is_of_use_and_nothing_is_ended(self) -> None:
        talk = self.talk()
        pid = os.fork()
        if pid == 0:
            try:
                here, there = socket.socketpair()
                try:
                    self.template.fork(soon(), there)
                except errors.StateError as error:
                    said = str(os.getppid()) in str(error) and there.fileno() == -1
                talk.child.kill()
                talk.child.close()
                self.template.release()
                here.close()
            except BaseException:
                os._exit(1)
            os._exit(0 if said else 2)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertEqual(talk.ask("result = 'alive'"), "alive")
        with Talk(self.template) as another:
            self.assertEqual(another.ask("result = 'alive'"), "alive")


class OldKernel(Kill):
    """The same where there is no pidfd: the template kills."""

    entry = str(Path(__file__).with_name("_template_entry_old.py"))

    def test_pidfd_tells_the_end(self) -> None:
        self.assertEqual(self.talk().child.fileno(), -1)


class Many(SharedTemplate):
    def test_fifty_forks_leave_nothing(self) -> None:
        def held() -> tuple[int, int, int, int]:
            pid = self.template.pid()
            tasks = threading.active_count(), len(os.listdir(f"/proc/{pid}/task"))
            return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid}/fd")), *tasks

        before = held()
        for number in range(50):
            with Talk(self.template) as talk:
                if number % 2:  # a half is killed, a half ends by itself
                    talk.order("code = 0")
                    self.assertTrue(talk.at_end())
            self.assertIsNotNone(talk.child.wait(WAIT_S))
        self.assertEqual(held(), before)
        self.assertEqual(children_of(self.template.pid()), [])

    def test_from_many_threads_at_once(self) -> None:
        failures: list[BaseException] = []
        pids: list[int] = []

        def some() -> None:
            try:
                for _ in range(4):
                    with Talk(self.template) as talk:
                        self.assertEqual(talk.first, talk.child.pid)
                        self.assertEqual(talk.ask("import os; result = os.getpid()"), talk.first)
                        pids.append(talk.first)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=some) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(len(pids), 32)
        wait_until(lambda: children_of(self.template.pid()) == [], "all are reaped", GRACE_S)

    def test_messages_that_come_together(self) -> None:
        """Nothing else happens that could have whoever reads them look again."""
        talks = [Talk(self.template) for _ in range(3)]
        pipe = self.template._process._pipe
        receive = pipe.receive

        def late() -> bytes:
            wait_until(lambda: not children_of(self.template.pid()), "all are reaped, and told of")
            frame: bytes = receive()
            return frame

        with mock.patch.object(pipe, "receive", late):
            for talk in talks:
                talk.child.kill()
            for talk in talks:
                self.assertIsNotNone(talk.child.wait(GRACE_S))
        for talk in talks:
            talk.__exit__(None, None, None)

    def test_the_child_outlives_the_thread_that_asked_for_it(self) -> None:
        made: list[Talk] = []
        thread = threading.Thread(target=lambda: made.append(Talk(self.template)))
        thread.start()
        thread.join()
        with made[0] as talk:
            self.assertEqual(talk.ask("result = 'alive'"), "alive")

    def test_a_fork_that_nobody_waits_for_any_more_is_ended(self) -> None:
        pid = self.template.pid()
        here, there = socket.socketpair()
        with here:  # open, or the child would end by itself
            os.kill(pid, signal.SIGSTOP)
            try:
                with self.assertRaises(errors.DeadlineExceeded) as caught:
                    self.template.fork(soon(0.2), there)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.assertIn("fork a child", str(caught.exception))
            with Talk(self.template):
                pass  # the template goes on, and has forked the other before
            wait_until(lambda: children_of(pid) == [], "the late child is ended")


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
