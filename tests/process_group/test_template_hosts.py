# SPDX-License-Identifier: BSD-3-Clause
"""The template starts where a trainer hardly does, and runs neither its ``__main__`` nor a host package again.

The usual ways to start a trainer are those of ``test_baby_starts``.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests import PACKAGE, load
from tests._support import LONG_S, GuardedTestCase, import_roots, run_python
from tests.process_group._template_tools import ENTRY

# What each trainer does: one child, and out comes what the child says of itself. It would say so twice, or start
# trainers without end, if the template or the child ran it again.
TRAINER = f"""
import importlib, json, socket, sys
sys.path[:0] = [root for root in {import_roots()!r} if root not in sys.path]
package = sys.argv[1] if len(sys.argv) > 1 and "." in sys.argv[1] else {PACKAGE!r}
template = importlib.import_module(package + ".process_group._template")
deadline = importlib.import_module(package + "._deadline")
template.ENTRY = {ENTRY!r}
here, there = socket.socketpair()
source = template.acquire()
child = source.fork(deadline.Deadline({LONG_S / 4}), there)
stream = here.makefile("rw")
pid = int(stream.readline())
code = "import sys; m = sys.modules; result = [[n for n in m if n.partition('.')[0] in ('acme', 'ftlite')], "
code += "m['__main__'].__file__.rpartition('/')[2], list(sys.flags), sys.warnoptions]"
print(json.dumps(code), file=stream, flush=True)
named, main, flags, warned = json.loads(stream.readline())
print(pid == child.pid, named, main, flags == list(sys.flags), warned == sys.warnoptions)
stream.close()
here.close()
child.wait(9)
child.close()
source.release()
"""
SAID = "True [] _boot.py True True\n"


class Hosts(GuardedTestCase):
    limit_s = LONG_S

    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.script = self.folder / "train.py"
        self.script.write_text(TRAINER)

    def holds(self, *args: str, said: str = SAID, **options: object) -> None:
        done = run_python(*args, limit_s=LONG_S / 2, **options)
        self.assertEqual((done.stdout, done.stderr, done.returncode), (said, "", 0))

    def test_optimized_isolated_and_strict(self) -> None:
        # -I: no PYTHON* variable counts, and the user's site is left out; the warning is one of torch 2.6
        strict = ("-W", "error", "-W", "ignore:Failed to initialize NumPy", "-X", "faulthandler")
        self.holds("-OO", "-I", *strict, str(self.script))

    def test_folder_with_a_module_that_torch_would_take_for_its_own(self) -> None:
        # in the current folder, and so on the path of python -c, but not on that of a script elsewhere
        for name in ("torch", "typing_extensions", "json"):
            (self.folder / f"{name}.py").write_text("raise ImportError('the wrong one')")
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        self.script = self.script.rename(elsewhere / "train.py")
        self.holds(str(self.script), cwd=self.folder)

    def test_copy_in_a_host_package(self) -> None:
        vendor = self.folder / "acme" / "_vendor"
        shutil.copytree(
            Path(str(load().__file__)).parent, vendor / "ftlite", ignore=shutil.ignore_patterns("__pycache__")
        )
        (vendor / "__init__.py").touch()
        # the trainer may import it; nobody else
        refuse = "import os\nif os.getpid() != int(os.environ['TRAINER']): raise RuntimeError('acme was run')\n"
        (self.folder / "acme" / "__init__.py").write_text(refuse)
        script = f"import os, sys\nos.environ['TRAINER'] = str(os.getpid())\nsys.path.insert(0, {str(self.folder)!r})\n"
        self.script.write_text(script + TRAINER)
        self.holds(str(self.script), "acme._vendor.ftlite")
