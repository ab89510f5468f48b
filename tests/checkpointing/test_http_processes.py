# SPDX-License-Identifier: BSD-3-Clause
"""HTTPTransport between real processes: donors and receivers that are killed, silence, little privilege."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests import load
from tests._support import (
    LONG_S,
    SCALE,
    WAIT_S,
    GuardedTestCase,
    child_env,
    requires_netns,
    requires_root,
    run_python,
)
from tests.checkpointing import _wire
from tests.checkpointing._transport_child import STEP, digest, process_state
from tests.checkpointing._transport_states import block, scrambled

HTTPTransport = load("checkpointing").HTTPTransport
errors = load("_errors")

CHILD = "tests.checkpointing._transport_child"
START_S = 60 * SCALE


@contextlib.contextmanager
def child(*args: str, command: tuple[str, ...] = ("-m", CHILD)) -> Iterator[Any]:
    """A child that talks through pipes; killed at the end if it still runs."""
    flags = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    process = subprocess.Popen(
        [sys.executable, *flags, *command, *args],
        env=child_env({"OMP_NUM_THREADS": "1"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(5 * SCALE)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def line_of(process: Any) -> str:
    """The next line of the child's output; its stderr where there is none."""
    line: str = process.stdout.readline().strip()
    if not line:
        process.kill()
        raise AssertionError(f"the child said nothing: {process.stderr.read()}")
    return line


# An interpreter that has torch and a state of 16 MB, and nothing that is tested. For each line that it reads it forks
# a donor, or a receiver where the line is an address, and says so when that has ended.
FORKER = """
import os, signal, sys
from tests.checkpointing import _transport_child as child
state = child.process_state(16)
expected = child.digest(state)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        made = child._transport()
        if line.strip():
            made.recv_checkpoint(0, line.strip(), child.STEP)
        else:
            made.send_checkpoint([], child.STEP, state)
            print(os.getpid(), made.metadata(), expected, flush=True)
            signal.pause()
        os._exit(0)
    if line.strip():
        print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class Killed(GuardedTestCase):
    limit_s = LONG_S

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        context = child(command=("-c", FORKER))
        cls.forker = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)

    def fork(self, line: str = "") -> list[str]:
        """Order a process; what is said of it, its pid first."""
        self.forker.stdin.write(line + "\n")
        self.forker.stdin.flush()
        said = line_of(self.forker).split()
        self.addCleanup(self.kill, int(said[0]))
        self.running = int(said[0])
        return said

    def kill(self, pid: int) -> None:
        """Kill that process, if it runs, and wait for its end."""
        if pid == self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.assertEqual(line_of(self.forker), "ended")
            self.running = 0

    def test_a_donor_that_is_killed(self) -> None:
        for percent in (0, 30, 99):
            with self.subTest(percent=percent):
                pid, url, expected = self.fork()
                if not percent:
                    self._stopped_and_continued(int(pid), url, expected)
                self._killed_at(int(pid), url, percent)
                # its port is there for the next one
                HTTPTransport(host="127.0.0.1", port=_wire.address(url)[1]).shutdown()

    def _stopped_and_continued(self, donor: int, url: str, expected: str) -> None:
        os.kill(donor, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (donor, signal.SIGCONT))
        timer.start()
        receiver = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1")
        self.addCleanup(receiver.shutdown)
        self.assertEqual(digest(receiver.recv_checkpoint(0, url, STEP)), expected)
        timer.join()

    def _killed_at(self, donor: int, url: str, percent: int) -> None:
        own = scrambled(process_state(16))
        total = 16 << 20
        # what passes before the state: the manifest, its head, and the first chunk's head
        before = len(_wire.ask(url, STEP, "metadata")) + 400
        killed: list[float] = []
        receiver = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1", state_dict=lambda: own)
        self.addCleanup(receiver.shutdown)

        def on_bytes(data: bytes, passed: int) -> bytes | None:
            if not killed and passed >= before + total * percent // 100:
                self.kill(donor)
                killed.append(time.monotonic())
                proxy.refuse()
            return None if killed else data

        with _wire.Proxy(_wire.address(url), on_bytes) as proxy:
            with self.assertRaises(errors.IncompleteTransfer) as caught:
                receiver.recv_checkpoint(0, _wire.through(url, proxy.port), STEP)
            self.assertLess(time.monotonic() - killed[0], 2.0 * SCALE)
        error = caught.exception
        self.assertGreater(error.bytes_total, total)
        self.assertGreaterEqual(error.bytes_done, total * percent // 100 - (1 << 20))
        self.assertLess(error.bytes_done, error.bytes_total)
        self.assertIn(f"{error.bytes_total} bytes", str(error))
        self.assertEqual(error.destination_dirty, error.bytes_done > 0)
        # nothing was there any more: the next try says so at once
        began_s = time.monotonic()
        with self.assertRaises(errors.IncompleteTransfer):
            receiver.recv_checkpoint(0, url, STEP)
        self.assertLess(time.monotonic() - began_s, 2.0 * SCALE)

    def test_a_receiver_that_is_killed(self) -> None:
        """The donor does not wait for who is gone."""
        donor = HTTPTransport(timeout=20 * SCALE, host="127.0.0.1")
        self.addCleanup(donor.shutdown)
        donor.send_checkpoint([], STEP, {"x": block(20 << 20)})
        reached, over = threading.Event(), threading.Event()

        def on_bytes(data: bytes, passed: int) -> bytes:
            if passed > 2 << 20:
                reached.set()
                over.wait(WAIT_S)
            return data

        with _wire.Proxy(_wire.address(donor.metadata()), on_bytes) as proxy:
            (receiver,) = self.fork(_wire.through(donor.metadata(), proxy.port))
            self.assertTrue(reached.wait(START_S))
            self.kill(int(receiver))
            over.set()
            began_s = time.monotonic()
            donor.disallow_checkpoint()
            self.assertLess(time.monotonic() - began_s, 2.0 * SCALE)


class Processes(GuardedTestCase):
    limit_s = LONG_S

    def test_from_one_process_to_another(self) -> None:
        with child("donor", "2") as donor, child("receiver") as receiver:
            url, expected = line_of(donor), line_of(donor)
            receiver.stdin.write(url + "\n")
            receiver.stdin.flush()
            self.assertEqual([line_of(receiver) for _ in range(3)], [expected] * 3)
            self.assertEqual(receiver.wait(START_S), 0)
            self.assertEqual(receiver.stderr.read(), "")
            donor.stdin.close()
            self.assertEqual(donor.wait(START_S), 0)
            self.assertEqual(donor.stderr.read(), "")

    def test_thirty_transfers_and_an_end_without_shutdown_say_nothing(self) -> None:
        code = (
            "from tests.checkpointing._transport_child import _round_trips, _transport\n"
            "_round_trips(30)\n"
            "t = _transport(); t.send_checkpoint([], 1, {}); _transport().recv_checkpoint(0, t.metadata(), 1)\n"
            "print('end')\n"
        )
        done = run_python("-c", code, limit_s=START_S)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "end\n", ""))

    @requires_root
    @requires_netns
    def test_without_ipv6_numpy_and_privileges(self) -> None:
        if not os.path.exists("/proc/sys/net/ipv6/conf/all/disable_ipv6"):
            self.skipTest("this kernel has no IPv6 at all")
        unshare = shutil.which("unshare")
        done = subprocess.run(
            [unshare, "--net", sys.executable, "-m", CHILD, "confined"],
            env=child_env({"PYTHONWARNINGS": "ignore"}),
            capture_output=True,
            text=True,
            timeout=LONG_S / 2,
            check=False,
        )
        if "Read-only file system" in done.stderr or "disable_ipv6" in done.stderr:
            self.skipTest("IPv6 cannot be switched off here")
        self.assertEqual((done.returncode, done.stdout), (0, "127.0.0.1 65534\n127.0.0.1 65534\n"), done.stderr)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn("no other machine can reach", lines[0])
