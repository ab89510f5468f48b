# SPDX-License-Identifier: BSD-3-Clause
"""Whatever way a trainer ends, nothing of it is left; and what it prints is its own."""

from __future__ import annotations

import json
import os
import signal

from tests._support import LONG_S, SCALE, GuardedTestCase, run_python, wait_until
from tests.process_group._template_tools import lives
from tests.process_group._trainers import Trainer, Trainers

BEGIN = """
import json, os, signal, sys, threading, time
from tests.process_group import _template_tools as tools
from tests.process_group._template_tools import ENTRY, Talk, template
template.ENTRY = ENTRY
source = template.acquire()
"""
SLEEP = "import ctypes; end.sendall(b'null\\n'); ctypes.{}(None).sleep(600)"
STORE = (
    "import datetime, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, 1, True, datetime.timedelta(seconds=600));"
    "end.sendall(b'null\\n'); s.wait(['never'])"
)
# an orphan may live so long
ORPHAN_S = 2 * SCALE

trainers: Trainers


def setUpModule() -> None:
    global trainers
    trainers = Trainers()


def tearDownModule() -> None:
    trainers.close()


class EndsTestCase(GuardedTestCase):
    limit_s = LONG_S

    def all_gone(self, pids: list[int]) -> None:
        self.assertTrue(pids)
        wait_until(lambda: not any(map(lives, pids)), f"{pids} end", ORPHAN_S)

    def said_no_more(self, trainer: Trainer) -> None:
        """``trainer`` was killed, and it has printed its first line and nothing else."""
        self.assertEqual(trainer.ended(), (-signal.SIGKILL, trainer.lines()[0], ""))


class Killed(EndsTestCase):
    def test_children_in_every_state(self) -> None:
        states = ["", SLEEP.format("PyDLL"), SLEEP.format("CDLL"), STORE]
        code = f"""
talks = [Talk(source) for _ in range({len(states)})]
for talk, state in zip(talks, {states!r}):
    talk.ask(state)
# a data-loader worker: it holds a copy of every descriptor
worker = os.fork()
if worker == 0:
    time.sleep(600)
print(json.dumps([worker, source.pid(), *(talk.first for talk in talks)]), flush=True)
time.sleep(600)
"""
        with trainers.start(BEGIN + code) as trainer:
            worker, *pids = json.loads(trainer.lines()[0])
            self.assertTrue(all(map(lives, pids)))
            trainer.kill()
            try:
                self.all_gone(pids)
            finally:
                os.kill(worker, signal.SIGKILL)
            self.said_no_more(trainer)

    def test_together_with_the_template(self) -> None:
        # nobody is left to kill the child but the kernel
        code = f"""
talk = Talk(source)
talk.ask({SLEEP.format("PyDLL")!r})
print(json.dumps([source.pid(), talk.first]), flush=True)
time.sleep(600)
"""
        with trainers.start(BEGIN + code) as trainer:
            pids = json.loads(trainer.lines()[0])
            os.kill(trainer.pid, signal.SIGSTOP)
            os.kill(pids[0], signal.SIGKILL)
            self.all_gone(pids)

    def test_old_kernel(self) -> None:
        code = f"""
source.release()
source = template.Template(ENTRY.replace("_entry", "_entry_old")).hold()
talk = Talk(source)
talk.ask({SLEEP.format("PyDLL")!r})
worker = os.fork()
if worker == 0:
    time.sleep(600)
print(json.dumps([worker, source.pid(), talk.first]), flush=True)
time.sleep(600)
"""
        with trainers.start(BEGIN + code) as trainer:
            worker, *pids = json.loads(trainer.lines()[0])
            trainer.kill()
            try:
                self.all_gone(pids)
            finally:
                os.kill(worker, signal.SIGKILL)

    def test_template_in_its_import(self) -> None:
        # one that takes for ever, in a native call
        code = """
import tempfile
with tempfile.TemporaryDirectory() as folder:
    entry = os.path.join(folder, "entry.py")
    fifo = os.path.join(folder, "fifo")
    os.mkfifo(fifo)
    with open(entry, "w") as file:
        file.write(f"open({fifo!r}, 'w').close()\\nimport ctypes\\nctypes.PyDLL(None).sleep(600)")
    source = template.Template(entry).hold()
    open(fifo).close()
    print(json.dumps([source.pid()]), flush=True)
time.sleep(600)
"""
        with trainers.start(BEGIN + code) as trainer:
            pids = json.loads(trainer.lines()[0])
            trainer.kill()
            self.all_gone(pids)
            self.said_no_more(trainer)

    def test_an_interrupt_of_the_terminal_is_the_trainers(self) -> None:
        code = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
talk = Talk(source)
talk.ask("result = 1")
try:
    print(json.dumps([source.pid(), talk.first]), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print(talk.ask("result = 'alive'"), Talk(source).ask("result = 'as well'"), flush=True)
"""
        with trainers.start(BEGIN + code) as trainer:
            pids = json.loads(trainer.lines()[0])
            os.killpg(trainer.pid, signal.SIGINT)
            self.assertEqual(trainer.ended(), (0, f"{trainer.lines()[0]}alive as well\n", ""))
            self.all_gone(pids)


class Exits(EndsTestCase):
    """Without a shutdown: exit code 0, nothing printed, nothing left, no hang."""

    def exits(self, code: str, wanted: int = 0, *flags: str) -> None:
        if flags:
            done = run_python(*flags, "-c", BEGIN + code, limit_s=LONG_S / 4)
            ended, out, err = done.returncode, done.stdout, done.stderr
        else:
            ended, out, err = trainers.start(BEGIN + code).ended()
        self.assertEqual((ended, err), (wanted, ""))
        pids = json.loads(out)
        # the trainer has waited for them
        self.assertFalse([pid for pid in pids if lives(pid)])

    def test_with_children(self) -> None:
        code = f"""
talks = [Talk(source), Talk(source)]
talks[1].ask({SLEEP.format("PyDLL")!r})
print(json.dumps([source.pid(), *(talk.first for talk in talks)]))
"""
        self.exits(code)
        self.exits(code + "sys.exit(3)", 3)

    def test_while_it_starts_and_in_development_mode(self) -> None:
        code = "tools.wait_for = [time.sleep(0.001) for _ in iter(lambda: source.pid() is None, False)]\n"
        self.exits(
            code + "print(json.dumps([source.pid()]))", 0, "-X", "dev", "-W", "ignore:Failed to initialize NumPy"
        )

    def test_while_a_thread_waits_for_a_fork(self) -> None:
        code = """
def fork():
    try:
        Talk(source)
    except Exception:
        pass
threading.Thread(target=fork, daemon=True).start()
while source.pid() is None:
    time.sleep(0.001)
print(json.dumps([source.pid()]))
"""
        self.exits(code)

    def test_a_fork_that_exits_ends_nobody(self) -> None:
        code = """
talk = Talk(source)
worker = os.fork()
if worker == 0:
    talk.child.kill()
    source.release()
    sys.exit(7)  # with all that an interpreter does at its end
status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
if status == 7 and talk.ask("result = 'alive'") == Talk(source).ask("result = 'alive'"):
    print(json.dumps([source.pid(), talk.first]))
"""
        self.exits(code)

    def test_a_fork_that_makes_its_own(self) -> None:
        code = """
talk = Talk(source)
worker = os.fork()
if worker == 0:
    mine = template.acquire()
    other = Talk(mine)
    os._exit(0 if mine.pid() != source.pid() and other.ask("result = 1") == 1 and mine.release() is None else 1)
status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
if status == 0 and talk.ask("result = 'alive'") == 'alive':
    print(json.dumps([source.pid(), talk.first]))
"""
        self.exits(code)

    def test_three_rounds_print_nothing(self) -> None:
        code = """
pids = []
source.release()
for round_ in range(3):
    source = template.acquire()
    for _ in range(2):
        with Talk(source) as talk:
            talk.ask("result = 1")
            pids += [source.pid(), talk.first]
    if round_ != 1:  # the template of that round goes on into the next
        source.release()
if pids[0] == pids[4] or pids[4] != pids[8]: raise AssertionError(pids)
print(json.dumps(pids))
"""
        self.exits(code)
