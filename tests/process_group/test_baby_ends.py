# SPDX-License-Identifier: BSD-3-Clause
"""Trainers with groups in children: however they end, they print and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import unittest
from typing import Any

from tests import PACKAGE, not_in_a_copy
from tests._support import LONG_S, SCALE, GuardedTestCase, import_roots, run_python, wait_until
from tests.process_group._template_tools import lives
from tests.process_group._trainers import Trainers

not_in_a_copy()

# All that a trainer needs; it is no test, and runs without what the tests set up.
BEGIN = f"""
import atexit, gc, json, os, sys, threading, time
sys.path[:0] = [root for root in {import_roots()!r} if root not in sys.path]
import importlib
import torch
from torch.distributed import TCPStore
package = importlib.import_module({PACKAGE!r})
room = importlib.import_module({PACKAGE!r} + ".process_group")
TIMEOUT_S = {LONG_S / 4}
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
count = 0
def address():
    global count
    count += 1
    return f"127.0.0.1:{{store.port}}/{{count}}"
def make(): return room.ProcessGroupBabyGloo(timeout=TIMEOUT_S)
def one():
    group = make()
    group.configure(address(), "alone", 0, 1)
    return group
def two():
    groups, where = [make(), make()], address()
    threads = [threading.Thread(target=g.configure, args=(where, "r", r, 2)) for r, g in enumerate(groups)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return groups
def add(*groups):
    tensors = [torch.ones(5) for _ in groups]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors)]
    for work, tensor in zip(works, tensors):
        work.wait()
        if tensor.tolist() != [float(len(groups))] * 5: raise AssertionError(tensor)
def say(*groups):
    print(json.dumps([groups[0]._held.template.pid(), *(group.child_pid() for group in groups)]), flush=True)
"""
# how long what a trainer leaves may live
ORPHAN_S = 2 * SCALE


trainers: Trainers


def setUpModule() -> None:
    global trainers
    trainers = Trainers()


def tearDownModule() -> None:
    trainers.close()


class EndsTestCase(GuardedTestCase):
    limit_s = LONG_S

    def runs(self, code: str, *flags: str, wanted: int = 0) -> Any:
        """Run ``code`` as a trainer to its end: that is ``wanted``, stderr is empty; what it printed, from JSON."""
        if flags:
            done = run_python(*flags, "-c", BEGIN + code, limit_s=LONG_S / 2)
            ended, out, err = done.returncode, done.stdout, done.stderr
        else:
            ended, out, err = trainers.start(BEGIN + code).ended(LONG_S / 2)
        self.assertEqual((ended, err), (wanted, ""))
        return json.loads(out)

    def leaves_nothing(self, code: str, *flags: str, wanted: int = 0) -> None:
        """The same for one that prints process ids, which it has waited for."""
        pids = self.runs(code, *flags, wanted=wanted)
        self.assertTrue(pids)
        self.assertEqual([pid for pid in pids if lives(pid)], [])


class Exits(EndsTestCase):
    """Without a shutdown."""

    def test_idle_and_with_work_in_flight(self) -> None:
        self.leaves_nothing("group = one(); add(group); say(group)")
        code = """
first, second = two()
add(first, second)
works = [first.allreduce([torch.ones(1000)]), first.recv([torch.ones(1)], 1, 3)]
future = works[0].get_future()
future.add_done_callback(lambda future: None)
waiting = threading.Thread(target=works[1].wait, daemon=True)
waiting.start()
say(first, second)
"""
        self.leaves_nothing(code)
        self.leaves_nothing(code + "sys.exit(3)", wanted=3)

    def test_in_development_mode(self) -> None:
        # the store of this process is torch's, and so are warnings at its import
        flags = ("-X", "dev", "-W", "ignore:Failed to initialize NumPy")
        self.leaves_nothing("group = one(); add(group); group.empty([3]); say(group)", *flags)

    def test_while_it_starts(self) -> None:
        code = """
group = make()
while group._held.template.pid() is None: time.sleep(0.001)
print(json.dumps([group._held.template.pid()]))
"""
        self.leaves_nothing(code)

    def test_while_a_thread_configures(self) -> None:
        code = """
group = one()
threading.Thread(target=group.configure, args=(address(), "alone", 0, 2), daemon=True).start()
while group.child_pid() is None or not group._held.session._link.phase.startswith("meeting"): time.sleep(0.001)
say(group)
"""
        self.leaves_nothing(code)

    def test_shutdown_at_exit(self) -> None:
        code = """
groups = two()
add(*groups)
def end():
    started_s = time.monotonic()
    for group in groups:
        group.shutdown()
    took_s = time.monotonic() - started_s
    if took_s > 1.0: print("shutdown took", took_s, file=sys.stderr)
"""
        # ours runs before the package's own exit hook, which was registered earlier; and after it, when each group
        # waits half a second for its reader, which is not to go on before the interpreter stops it
        self.leaves_nothing(code + "say(*groups); atexit.register(end)")
        self.leaves_nothing("atexit.register(lambda: end())\n" + code + "say(*groups)")
        self.leaves_nothing(code + "groups[0].allreduce([torch.ones(3)]); say(*groups); atexit.register(end)")

    def test_collected_at_exit(self) -> None:
        self.leaves_nothing("kept = [one()]; add(*kept); say(*kept); atexit.register(kept.clear)")
        self.leaves_nothing("kept = []; atexit.register(kept.clear); kept.append(one()); add(*kept); say(*kept)")
        # in a cycle, and after that in what the interpreter clears last
        code = "group = one(); cycle = [group]; cycle.append(cycle); add(group); say(group); sys.kept = cycle"
        self.leaves_nothing(code)

    def test_ten_rounds_print_nothing(self) -> None:
        code = """
pids = []
groups = [make(), make()]
for round_ in range(10):
    where = address()
    threads = [threading.Thread(target=g.configure, args=(where, "r", r, 2)) for r, g in enumerate(groups)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    add(*groups)
    pids += [group.child_pid() for group in groups]
    if round_ % 2: groups[0].allreduce([torch.ones(3)])
    for group in groups: group.shutdown()
print(json.dumps(pids))
"""
        self.leaves_nothing(code)


class Forks(EndsTestCase):
    def test_a_fork_that_uses_the_group(self) -> None:
        code = """
first, second = two()
add(first, second)
pending = first.allreduce([torch.ones(3)])
told = first.recv([torch.ones(1)], 1, 4)
future = told.get_future()
done = second.allreduce([torch.ones(3)])  # and the other rank is there
pending.wait()
late = first.recv([torch.ones(1)], 1, 5)
kept = first.empty([4]).fill_(7.0)
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    said = []
    uses = [lambda: first.allreduce([torch.ones(1)]), lambda: first.configure(address(), "fork", 0, 1), first.abort]
    uses += [lambda: first.empty([3]), late.wait, late.get_future, late.is_completed, lambda: late.wait(0.1)]
    for use in uses:
        started_s = time.monotonic()
        try:
            said.append(repr(use()))
        except package.StateError as error:
            said.append("fork" if error.state == "forked" and "fork of" in str(error) else str(error))
        if time.monotonic() - started_s > 1: said.append("late")
    said.append([first.errored(), first.size(), kept.tolist(), done.wait() if done.is_over() else True])
    first.shutdown()
    own = one()
    add(own)
    own.shutdown()
    del first, pending, late
    gc.collect()
    os.write(writer, json.dumps(said).encode())
    sys.exit(7)  # with all that an interpreter does at its end
said = json.loads(os.read(reader, 65536))
status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
second.send([torch.full((1,), 5.0)], 0, 5).wait()
late.wait()
add(first, second)  # the trainer goes on
print(json.dumps([said, status]))
"""
        said, status = self.runs(code)
        self.assertEqual(status, 7)
        self.assertEqual(said, ["fork"] * 8 + [[None, 2, [7.0] * 4, True]])


class Killed(EndsTestCase):
    def test_the_trainer_is_killed_with_children_in_every_state(self) -> None:
        code = """
from tests.process_group._baby_tools import ENTRY, FAULT, template
template.ENTRY = ENTRY
idle = one()
add(idle)
hung, other = two()  # in a collective that nobody joins
hung.allreduce([torch.ones(4)])
meeting = make()
threading.Thread(target=meeting.configure, args=(address(), "alone", 0, 2), daemon=True).start()
sleeping = []
for fault in ("op sits in native code", "op sits in native code with the GIL"):
    os.environ[FAULT] = fault
    sleeping.append(one())
    sleeping[-1].allreduce([torch.ones(4)])
while meeting.child_pid() is None or not meeting._held.session._link.phase.startswith("meeting"): time.sleep(0.001)
time.sleep(0.1)  # the collectives have begun by now
# a data-loader worker, which has a copy of every descriptor
worker = os.fork()
if worker == 0: time.sleep(600)
print(worker)
say(idle, hung, other, meeting, *sleeping)
time.sleep(600)
"""
        with trainers.start(BEGIN + code) as trainer:
            worker, pids = map(json.loads, trainer.lines(2))
            try:
                self.assertEqual(len(pids), 7)
                self.assertTrue(all(map(lives, pids)))
                trainer.kill()
                wait_until(lambda: not any(map(lives, pids)), f"{pids} end", ORPHAN_S)
            finally:
                os.kill(worker, signal.SIGKILL)
            self.assertEqual(trainer.ended()[2], "")

    def test_an_interrupt_of_the_terminal(self) -> None:
        code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
groups = two()
add(*groups)
late = groups[0].recv([torch.ones(1)], 1, 5)
try:
    say(*groups)
    late.wait()
except KeyboardInterrupt:
    groups[1].send([torch.ones(1)], 0, 5).wait()
    late.wait()
    add(*groups)
    print("alive", flush=True)
"""
        with trainers.start(BEGIN + code) as trainer:
            pids = json.loads(trainer.lines()[0])
            os.killpg(trainer.pid, signal.SIGINT)
            self.assertEqual(trainer.ended(), (0, f"{trainer.lines()[0]}alive\n", ""))
        self.assertEqual([pid for pid in pids if lives(pid)], [])


if __name__ == "__main__":
    unittest.main()
