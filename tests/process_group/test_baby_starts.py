# SPDX-License-Identifier: BSD-3-Clause
"""A group works from wherever a trainer is started, and a child that does not come up is an error that says why."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import TCPStore

from tests import PACKAGE, load
from tests._support import LONG_S, SCALE, GuardedTestCase, child_env, free_port, import_roots, run_python, wait_until
from tests.process_group._baby_tools import (
    BabyCase,
    ProcessGroupBabyGloo,
    Waiter,
    child_of,
    errors,
    faulty,
    gone,
    template,
)
from tests.process_group._template_tools import caught_stderr

# From a failure until the caller knows of it.
TOLD_S = 2.0 * SCALE

# What the children run: the real thing, once each has told of itself in a file.
ENTRY = """
import importlib, json, os, sys
child = importlib.import_module(f"{__package__}._child")
def main(end):
    named = [name for name in sys.modules if name.partition(".")[0] in ("acme", "ftlite")]
    main = sys.modules["__main__"].__file__.rpartition("/")[2]
    with open(os.environ["CHILD_SAYS"], "a") as file:
        print(json.dumps([os.getpid(), named, main, list(sys.flags), sys.warnoptions]), file=file)
    return child.main(end)
"""
# A trainer without a main guard. It would start trainers without end, or print twice, if anybody ran it again.
# It ends without a shutdown of its last groups.
TRAINER = f"""
import importlib, json, os, sys, threading
sys.path[:0] = [root for root in {import_roots()!r} if root not in sys.path]
import torch
from torch.distributed import TCPStore
room = importlib.import_module({PACKAGE!r} + ".process_group")
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
os.environ["CHILD_SAYS"] = says = f"{{FOLDER}}/said{{rank}}"
importlib.import_module({PACKAGE!r} + ".process_group._template").ENTRY = f"{{FOLDER}}/entry.py"
def make():
    return room.ProcessGroupBabyGloo(timeout={LONG_S / 4})
def adds(group, rank, size):
    tensor = torch.full((4,), rank + 1.0)
    group.allreduce([tensor]).wait()
    return tensor.tolist() == [size * (size + 1) / 2] * 4
group = make()
port = int(os.environ.get("STORE_PORT", 0))
store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
addresses = [f"127.0.0.1:{{store.port}}/round{{round}}" for round in range(3)]
if size > 1:  # and at the store of torchrun
    addresses.append(f"{{os.environ['MASTER_ADDR']}}:{{os.environ['MASTER_PORT']}}/ours")
said = True
for address in addresses:
    group.configure(address, f"replica{{rank}}", rank, size)
    said = adds(group, rank, size) and said
    group.barrier().wait()
with open(says) as file:
    children = [json.loads(line) for line in file]
if children[-1][0] != group.child_pid():
    print("another child said", children[-1], "than", group.child_pid())
for child in children:
    if child[1:] != [[], "_boot.py", list(sys.flags), sys.warnoptions]:
        print("a child said", child, "and the trainer has", list(sys.flags), sys.warnoptions)
if "anew" in sys.argv:  # it was the only one, so that the next have another template
    group.shutdown()
own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pair = [make(), make()]
where = f"127.0.0.1:{{own.port}}/pair"
threads = [threading.Thread(target=one.configure, args=(where, "r", r, 2)) for r, one in enumerate(pair)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tensors = [torch.ones(5), torch.ones(5)]
for work in [one.allreduce([tensor]) for one, tensor in zip(pair, tensors)]: work.wait()
said = said and all(tensor.tolist() == [2.0] * 5 for tensor in tensors)
group.shutdown()
os.write(1, f"{{said}} {{__name__}}\\n".encode())  # in one piece, whoever else writes
"""


class Hosts(GuardedTestCase):
    """However a trainer is started: its groups work, and their children are neither it nor a host package."""

    limit_s = LONG_S

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "entry.py").write_text(ENTRY)
        self.code = f"FOLDER = {folder.name!r}\n{TRAINER}"
        self.script = self.folder / "train.py"
        self.script.write_text(self.code)

    def says(self, text: str, *args: str, **options: Any) -> None:
        done = run_python(*args, limit_s=LONG_S / 2, **options)
        self.assertEqual((done.stdout, done.stderr, done.returncode), (text, "", 0))

    def test_script_without_a_main_guard(self) -> None:
        self.says("True __main__\n", str(self.script), "anew")

    def test_command_line_text(self) -> None:
        self.says("True __main__\n", "-c", self.code)

    def test_standard_input(self) -> None:
        self.says("True __main__\n", "-", input=self.code)

    def test_module(self) -> None:
        self.says("True __main__\n", "-m", "train", cwd=self.folder)

    def test_notebook(self) -> None:
        # its main module has no __file__, cells run by exec, and a loop runs in the thread
        cell = f"async def cell():\n exec({self.code!r}, {{'__name__': 'cell'}})\n"
        run = "import __main__\n__main__.__dict__.pop('__file__', None)\nimport asyncio; asyncio.run(cell())"
        self.says("True cell\n", "-c", cell + run)

    def test_torchrun(self) -> None:
        # it prints lines of several processes as they come, and a word of its own about threads to stderr
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(self.script)],
            env={**child_env(), "OMP_NUM_THREADS": "1", "STORE_PORT": str(free_port())},
            cwd=self.folder,
            timeout=LONG_S / 2,
            capture_output=True,
            text=True,
            check=False,
        )
        # both write to the same pipe, a line maybe in two pieces
        self.assertEqual((done.stdout.replace("\n", ""), done.returncode), ("True __main__" * 2, 0), done.stderr)


class ChildFails(BabyCase):
    """The template is there, and its child does not come up."""

    def fails(self, kind: type[Exception], group: Any, address: str) -> str:
        """What ``configure`` says, soon; ``errored()`` says it as well, and ops do."""
        started_s = time.monotonic()
        with self.assertRaises(kind) as caught:
            group.configure(address, "alone", 0, 1)
        self.assertLess(time.monotonic() - started_s, TOLD_S)
        self.assertIsInstance(group.errored(), kind)
        with self.assertRaises(kind):
            group.allreduce([torch.ones(1)])
        return str(caught.exception)

    def test_the_exit_code_and_the_end_of_stderr_are_told(self) -> None:
        cases = {
            "exits": ("exited with code 3", "no room in the inn"),
            "raises": ("exited with code 70", "ImportError: no module of that name"),
        }
        with self.team(1) as team:
            for fault, texts in cases.items():
                with self.subTest(fault):
                    with faulty(fault):
                        said = self.fails(errors.ChildStartFailed, team.groups[0], team.address())
                    for text in texts:
                        self.assertIn(text, said)
                    self.heals(team)

    def test_a_backend_that_there_is_not(self) -> None:
        class Wrong(load("process_group._baby").ProcessGroupBaby):  # type: ignore[misc]
            backend = "carrier pigeons"

        with self.assertRaisesRegex(errors.UnsupportedOp, "carrier pigeons.*gloo"):
            Wrong()
        group = load("process_group").ProcessGroupBabyXCCL(timeout=20 * SCALE)
        self.addCleanup(group.shutdown)
        with self.team(1) as team:
            self.assertIn("without XCCL", self.fails(errors.RemoteFailure, group, team.address()))
        gone(child_of(group))

    def test_no_memory(self) -> None:
        """A limit that the child inherits from the template: it may start, and get no further."""
        pid = self.template.pid()
        old = resource.prlimit(pid, resource.RLIMIT_AS)
        size = int(re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024
        with self.team(1) as team:
            resource.prlimit(pid, resource.RLIMIT_AS, (size + 1024 * 1024, old[1]))
            try:
                said = self.fails(errors.ChildError, team.groups[0], team.address())
            finally:
                resource.prlimit(pid, resource.RLIMIT_AS, old)
            self.assertTrue(re.search("emory|allocate|start new thread|SIGABRT|unavailable", said), said)
            self.heals(team)


class TemplateFails(GuardedTestCase):
    """There is not even a template."""

    limit_s = LONG_S

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # libuv opens a pipe once, and keeps it

    @contextlib.contextmanager
    def group(self, text: str) -> Iterator[tuple[Any, str, Path]]:
        """A group whose children would run ``text``, an address, and a file of what is said on stderr."""
        with tempfile.TemporaryDirectory() as folder, caught_stderr() as stderr:
            entry = Path(folder, "entry.py")
            entry.write_text(text)
            kept = template._templates.pop(os.getpid(), None)
            template._templates[os.getpid()] = template.Template(str(entry))
            group = ProcessGroupBabyGloo(timeout=LONG_S / 4)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            try:
                yield group, f"127.0.0.1:{store.port}/alone", stderr
            finally:
                group.shutdown()
                del template._templates[os.getpid()]
                if kept is not None:
                    template._templates[os.getpid()] = kept

    def test_an_import_fails(self) -> None:
        text = "import time\nraise ImportError(f'libfoo.so.3: no such file, at {time.time()}.')\n"
        with self.group(text) as (group, address, stderr):
            for _ in range(2):
                with self.assertRaises(errors.ChildStartFailed) as caught:
                    group.configure(address, "alone", 0, 1)
                said = str(caught.exception)
                failed_s = float(re.findall(r"no such file, at (\d+\.\d+)\.", said)[-1])
                self.assertLess(time.time() - failed_s, TOLD_S)
                self.assertIn("exited with code 1", said)
                self.assertIn("ImportError: libfoo.so.3", said)
                self.assertIsInstance(group.errored(), errors.ChildStartFailed)
            self.assertIn("libfoo.so.3", stderr.read_text())

    def test_no_memory(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder, "python")
            python.write_text(f'#!/bin/sh\nulimit -c 0\nulimit -v 60000\nexec {sys.executable} "$@"\n')
            python.chmod(0o755)
            started = mock.patch.object(sys, "executable", str(python))
            with started, self.group("main = None\n") as (group, address, _):
                with self.assertRaises(errors.ChildStartFailed) as caught:
                    group.configure(address, "alone", 0, 1)
                said = str(caught.exception)
                self.assertTrue(re.search(r"exited with code \d+|killed by SIG", said), said)
                self.assertTrue(re.search("emory|map|alloc", said), said)

    def test_it_is_killed_while_it_starts(self) -> None:
        with self.group("import time\ntime.sleep(600)\n") as (group, address, _):
            pid = wait_until(lambda: template._templates[os.getpid()].pid(), "the process is started")
            configured = Waiter(lambda: group.configure(address, "alone", 0, 1))
            time.sleep(0.2)  # it waits by now; one that comes later gets another template
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            error = configured.join()
            self.assertIsInstance(error, errors.ChildStartFailed)
            self.assertLess(configured.over_s - killed_s, TOLD_S)
            self.assertIn("killed by SIGKILL", str(error))


if __name__ == "__main__":
    unittest.main()
