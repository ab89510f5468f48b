# SPDX-License-Identifier: BSD-3-Clause
"""The children of the benches and the demo: what they say arrives, what goes wrong is told, none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time

from tests import PACKAGE, load
from tests._support import WAIT_S, GuardedTestCase, import_roots, run_python, wait_until

workers = load("bench._workers")
errors = load("_errors")
deadline = load("_deadline")

# A child's main function follows; it gets the link and its options.
CHILD = f"""
import sys
sys.path[:0] = {import_roots()!r}
import os, signal, time
from {PACKAGE}.bench._link import serve
def main(link, options):
    {{}}
print("an import that talks", flush=True)
sys.exit(serve(main))
"""


def alive(pid: int) -> bool:
    """Whether ``pid`` runs, or is a zombie that somebody has yet to reap."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class CrewTest(GuardedTestCase):
    def soon(self) -> object:
        return deadline.Deadline(WAIT_S)

    def start(self, crew: object, body: str, **options: object) -> object:
        worker = crew.add("child", [sys.executable, "-c", CHILD.format(body)])
        worker.send("options", **options)
        return worker

    def test_events_commands_and_progress(self) -> None:
        seen = []
        with workers.Crew(lambda worker, message: seen.append(message["done"])) as crew:
            child = self.start(
                crew,
                "link.send('second', n=options['n']); link.send('first'); link.progress('x', 3, 3);"
                "link.send('got', text=link.expect('say', 9)['text'])",
                n=7,
            )
            crew.expect(child, "first", self.soon())
            self.assertEqual(crew.expect(child, "second", self.soon())["n"], 7)
            child.send("say", text="ä\n")
            self.assertEqual(crew.expect(child, "got", self.soon())["text"], "ä\n")
        self.assertEqual(seen, [3])

    def test_a_child_that_is_done_stays_until_the_end(self) -> None:
        with workers.Crew() as crew:
            first = self.start(crew, "link.send('done')")
            second = self.start(crew, "time.sleep(0.5); link.send('done')")
            crew.expect(first, "done", self.soon())
            crew.expect(second, "done", self.soon())
            self.assertTrue(alive(first.pid))

    def test_an_exception_in_a_child_is_told_with_its_traceback(self) -> None:
        with self.assertRaises(errors.RemoteFailure) as caught, workers.Crew() as crew:
            crew.expect(self.start(crew, "raise KeyError('which')"), "never", self.soon())
        self.assertIn("KeyError: 'which'", str(caught.exception))
        self.assertIn("child (pid ", str(caught.exception))

    def test_the_death_of_another_child_ends_the_wait(self) -> None:
        start_s = time.monotonic()
        with self.assertRaises(errors.ChildDied) as caught, workers.Crew() as crew:
            waited_for = self.start(crew, "time.sleep(600)")
            self.start(crew, "os.kill(os.getpid(), signal.SIGKILL)")
            crew.expect(waited_for, "never", deadline.Deadline(10 * WAIT_S))
        self.assertIn("SIGKILL", str(caught.exception))
        self.assertLess(time.monotonic() - start_s, WAIT_S)

    def test_an_exit_code_is_told(self) -> None:
        with self.assertRaises(errors.ChildDied) as caught, workers.Crew() as crew:
            crew.expect(self.start(crew, "os._exit(7)"), "never", self.soon())
        self.assertIn("exit code 7", str(caught.exception))

    def test_a_wait_has_a_limit(self) -> None:
        with self.assertRaises(errors.DeadlineExceeded) as caught, workers.Crew() as crew:
            crew.expect(self.start(crew, "time.sleep(600)"), "never", deadline.Deadline(0.2))
        self.assertIn("'never'", str(caught.exception))

    def test_an_interrupt_leaves_no_child(self) -> None:
        with self.assertRaises(KeyboardInterrupt), workers.Crew() as crew:
            child = self.start(crew, "link.send('up'); time.sleep(600)")
            crew.expect(child, "up", self.soon())
            raise KeyboardInterrupt
        self.assertFalse(alive(child.pid))

    def test_a_killed_parent_leaves_no_child(self) -> None:
        body = "link.send('up'); time.sleep(600)"
        parent = (
            f"import os, signal, sys; from {PACKAGE}.bench._workers import Crew;"
            f"from {PACKAGE}._deadline import Deadline;"
            f"crew = Crew(); child = crew.add('child', [sys.executable, '-c', {CHILD.format(body)!r}]);"
            "child.send('options'); crew.expect(child, 'up', Deadline(10)); print(child.pid, flush=True);"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = run_python("-c", parent)
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        pid = int(done.stdout)
        wait_until(lambda: not alive(pid), f"child {pid} ends with its parent")


class ModuleCommandTest(GuardedTestCase):
    def test_another_interpreter_gets_this_copy_and_its_own_path(self) -> None:
        # -I and an empty environment stand for an interpreter that does not know where this copy is
        command = workers.module_command(PACKAGE, "--version", python=sys.executable)
        command.insert(1, "-I")
        done = run_python("-c", f"import subprocess, sys; sys.exit(subprocess.run({command!r}, cwd='/').returncode)")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn(load().__version__, done.stdout)
