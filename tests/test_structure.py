# SPDX-License-Identifier: BSD-3-Clause
"""The rules of the house, held mechanically; each is also shown a tree that breaks it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests import PACKAGE, _rules, load
from tests._rules import LICENCE, Tree
from tests._support import LONG_S, GuardedTestCase, child_env, import_roots, run_python

FOLDER = Path(str(load().__file__)).parent
TESTS = Path(__file__).parent
TOP = TESTS.parent
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Rules(unittest.TestCase):
    """Each rule, one test."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.package = Tree(FOLDER)
        cls.tests = Tree(TESTS)

    def holds(self, rule: str, tree: Tree) -> None:
        findings = getattr(_rules, rule)(tree)
        self.assertFalse(findings, "\n" + "\n".join(findings))

    def test_relative_imports(self) -> None:
        self.holds("relative_imports", self.package)

    def test_no_import_cycle(self) -> None:
        self.holds("no_cycle", self.package)

    def test_walls_between_rooms(self) -> None:
        self.holds("walls", self.package)

    def test_no_import_in_function(self) -> None:
        self.holds("no_import_in_function", self.package)

    def test_no_assert(self) -> None:
        self.holds("no_assert", self.package)

    def test_no_print(self) -> None:
        self.holds("no_print", self.package)

    def test_size_of_modules(self) -> None:
        self.holds("size_of_modules", self.package)

    def test_size_of_functions(self) -> None:
        self.holds("size_of_functions", self.package)

    def test_licence_line(self) -> None:
        self.holds("licence_line", self.package)
        self.holds("licence_line", self.tests)

    def test_nothing_left_to_do(self) -> None:
        self.holds("nothing_left_to_do", self.package)
        self.holds("nothing_left_to_do", self.tests)

    def test_own_name_in_no_string(self) -> None:
        self.holds("own_name_in_no_string", self.package)

    def test_tests_name_the_package_once(self) -> None:
        self.holds("tests_load_the_package", self.tests)

    def test_set_up_calls_super(self) -> None:
        self.holds("set_up_calls_super", self.tests)

    def test_the_exceptions_stay_a_handful(self) -> None:
        self.assertLessEqual(len(_rules.NAMED) + len(_rules.GAPS), 8)


class Files(unittest.TestCase):
    def test_package_carries_licence_and_type_marker(self) -> None:
        self.assertTrue((FOLDER / "py.typed").is_file())
        self.assertIn("BSD 3-Clause License", (FOLDER / "LICENSE").read_text())

    def test_both_licences_are_equal(self) -> None:
        if not (TOP / "LICENSE").is_file():
            self.skipTest("no LICENSE beside the tests")
        self.assertEqual((FOLDER / "LICENSE").read_bytes(), (TOP / "LICENSE").read_bytes())

    def test_pyproject_holds_the_build_system_alone(self) -> None:
        if not (TOP / "pyproject.toml").is_file():
            self.skipTest("no pyproject.toml beside the tests")
        lines = (TOP / "pyproject.toml").read_text().splitlines()
        self.assertEqual([line for line in lines if line.startswith("[")], ["[build-system]"])

    def test_the_package_under_test_is_the_one_named(self) -> None:
        self.assertEqual(load().__name__, PACKAGE)
        if PACKAGE != "ftlite":
            # or a test of the copy might quietly reach the original
            self.assertIsNone(importlib.util.find_spec("ftlite"))


class Doors(unittest.TestCase):
    def doors(self) -> list[str]:
        return [name for name, module in Tree(FOLDER).modules.items() if module.is_package]

    @unittest.skipUnless(HAS_TORCH, "needs torch")
    def test_every_listed_name_resolves(self) -> None:
        for name in self.doors():
            door = load(name)
            for public in getattr(door, "__all__", []):
                with self.subTest(f"{door.__name__}.{public}"):
                    self.assertIsNotNone(getattr(door, public))

    def test_dir_lists_what_is_public(self) -> None:
        for name in self.doors():
            door = load(name)
            self.assertLessEqual(set(getattr(door, "__all__", [])), set(dir(door)), door.__name__)

    def test_unknown_name_is_an_attribute_error(self) -> None:
        with self.assertRaisesRegex(AttributeError, f"module '{PACKAGE}' has no attribute 'HTTPTransprot'"):
            _ = load().HTTPTransprot

    def test_version_is_a_literal(self) -> None:
        # the build reads it without running the file, so without torch
        self.assertIn(f'\n__version__ = "{load().__version__}"\n', (FOLDER / "__init__.py").read_text())


class Import(GuardedTestCase):
    """Importing does nothing, seen in a fresh interpreter."""

    limit_s = LONG_S

    def probe(self, root: str, package: str, *first: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, str(TESTS / "_import_probe.py"), root, package, *first],
            env=child_env({"PYTHONPATH": None}),
            timeout=LONG_S / 2,
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        findings: list[str] = json.loads(done.stdout.splitlines()[-1])
        return findings

    def test_of_the_package_has_no_side_effect(self) -> None:
        first = ["torch", "torch.distributed"] if HAS_TORCH else []
        findings = self.probe(import_roots()[0], PACKAGE, *first)
        self.assertFalse(findings, "\n" + "\n".join(findings))

    def test_of_the_door_needs_no_torch(self) -> None:
        code = "import importlib, sys; importlib.import_module(sys.argv[1]); print('torch' in sys.modules)"
        done = run_python("-c", code, PACKAGE, check=True)
        self.assertEqual((done.stdout, done.stderr), ("False\n", ""))

    def test_of_the_pure_modules_needs_no_torch(self) -> None:
        pure = ("_errors", "_deadline", "_net", "_interfaces", "checkpointing")
        names = [name for name in pure if name in Tree(FOLDER).modules]
        code = (
            "import importlib, sys; [importlib.import_module(n) for n in sys.argv[1:]]; print('torch' in sys.modules)"
        )
        done = run_python("-c", code, *(f"{PACKAGE}.{name}" for name in names), check=True)
        self.assertEqual((done.stdout, done.stderr), ("False\n", ""))

    def test_probe_sees_each_side_effect(self) -> None:
        samples = {
            "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "child process": "import subprocess\nchild = subprocess.Popen(['sleep', '1'])",
            "descriptor": "import socket\ns = socket.socket()",
            "signal handler": "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
            "log handler": "import logging\nlogging.getLogger(__name__).addHandler(logging.StreamHandler())",
            "hook": "import sys\nsys.excepthook = lambda *args: None",
            "socket default": "import socket\nsocket.setdefaulttimeout(3)",
            "search path": "import sys\nsys.path.append('/nowhere')",
            "exit hook": "import atexit\natexit.register(int)",
            "environment: reads HOME": "import os\nhome = os.environ.get('HOME')",
            "environment: reads PATH": "import os\npath = os.getenv('PATH')",
            "environment: sets A": "import os\nos.environ['A'] = '1'",
            "warning filter": "import warnings\nwarnings.simplefilter('ignore')",
        }
        with tempfile.TemporaryDirectory() as root:
            for number, (wanted, code) in enumerate(samples.items()):
                with self.subTest(wanted):
                    package = write_tree(Path(root, f"sample{number}"), {"__init__.py": "", "_a.py": code})
                    findings = self.probe(root, package.name)
                    self.assertTrue(any(wanted in finding for finding in findings), findings)
            # what a clean package may do: import a module that registers exit hooks of its own
            clean = write_tree(Path(root, "clean"), {"__init__.py": "import multiprocessing.util, concurrent.futures"})
            self.assertEqual(self.probe(root, clean.name), [])


class RulesCanFail(unittest.TestCase):
    """Each rule finds what it is for, in a tree that breaks it, and nothing in a tree that does not."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def test_clean_tree(self) -> None:
        clean = {
            "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .manager import M",
            "_errors.py": "'''ftlite, in a docstring'''\nclass FtliteError(Exception): ...\n__all__ = ['FtliteError']",
            "checkpointing/__init__.py": "from ._layout import L",
            "checkpointing/_layout.py": "from .._errors import FtliteError\nfrom typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from ._pg_transport import P",
            "checkpointing/_pg_transport.py": "from ..process_group import G\nfrom ._layout import L",
            "process_group/__init__.py": "G = 1",
            "manager/__init__.py": "from ..checkpointing import L\nfrom ..process_group import G\nM = 1",
            "bench/http.py": "from ..manager import M\ndef run():\n    import json\n    print(json)",
            "__main__.py": "from .bench import http",
        }
        tree = Tree(write_tree(self.root / "ftlite", clean))
        for rule in {*_rules.PACKAGE_RULES, *_rules.TESTS_RULES}:
            with self.subTest(rule.__name__):
                self.assertEqual(rule(tree), [])

    def test_broken_trees(self) -> None:
        for number, (rule, files, wanted) in enumerate(BROKEN):
            with self.subTest(f"{rule}: {wanted}"):
                tree = Tree(write_tree(self.root / str(number) / "ftlite", files))
                findings = getattr(_rules, rule)(tree)
                self.assertEqual(len(findings), 1, findings)
                self.assertIn(wanted, findings[0])

    def test_every_rule_has_a_broken_tree(self) -> None:
        rules = {rule.__name__ for rule in [*_rules.PACKAGE_RULES, *_rules.TESTS_RULES]}
        self.assertEqual(rules, {rule for rule, _, _ in BROKEN})
        held = Path(__file__).read_text()
        for rule in rules:
            self.assertIn(f'self.holds("{rule}"', held)


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Write ``files`` below ``folder``, each with the licence line unless it says ``#!`` first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"{LICENCE}\n{text}\n")
    return folder


# rule, a tree that breaks it (line 1 is the licence line), what the one finding says
BROKEN: list[tuple[str, dict[str, str], str]] = [
    ("relative_imports", {"_a.py": "import ftlite._b"}, "_a.py:2: imports ftlite._b"),
    ("relative_imports", {"r/_a.py": "def f():\n    from ftlite import x"}, "_a.py:3: imports ftlite by name"),
    ("no_cycle", {"_a.py": "from ._b import b", "_b.py": "from . import _a"}, "_a -> _b -> _a"),
    ("no_cycle", {"r/__init__.py": "from ._a import a", "r/_a.py": "from . import a"}, "r -> r._a -> r"),
    ("no_cycle", {"__init__.py": "from ._a import a", "_a.py": "from . import b"}, "the door -> _a -> the door"),
    (
        "walls",
        {"process_group/_a.py": "from ..checkpointing import _b", "checkpointing/_b.py": ""},
        "_a.py:2: process_",
    ),
    ("walls", {"checkpointing/_a.py": "from ..process_group._b import b", "process_group/_b.py": ""}, "may not import"),
    ("walls", {"checkpointing/_a.py": "from ..manager import m", "manager/__init__.py": ""}, "may not import manager"),
    ("walls", {"_net.py": "from .checkpointing._a import a", "checkpointing/_a.py": ""}, "top may not import"),
    ("walls", {"manager/_a.py": "from ..bench.http import run", "bench/http.py": ""}, "manager may not import bench"),
    ("walls", {"manager/_a.py": "from .. import demo", "demo/__init__.py": ""}, "manager may not import demo"),
    ("walls", {"_net.py": "from . import __main__", "__main__.py": ""}, "top may not import __main__"),
    ("walls", {"_net.py": "from . import a", "__init__.py": ""}, "_net.py:2: imports its own door"),
    ("walls", {"manager/_a.py": "from . import b", "manager/__init__.py": ""}, "imports its own door"),
    ("walls", {"attic/__init__.py": ""}, "attic is a new room"),
    ("walls", {"_net.py": "from ._gone import a"}, "_net.py:2: imports _gone, which does not exist"),
    ("no_import_in_function", {"_a.py": "def f():\n    if f:\n        import os"}, "_a.py:4: import inside"),
    ("no_assert", {"demo/_a.py": "def f(x):\n    assert x"}, "_a.py:3: assert"),
    ("no_print", {"_a.py": "print(1)"}, "_a.py:2: print()"),
    ("size_of_modules", {"_a.py": "\n" * 399}, "_a.py:1: 401 lines"),
    ("size_of_functions", {"_a.py": "class A:\n    def f():\n" + "        f\n" * 60}, "_a.py:3: f has 61 lines"),
    ("licence_line", {"_a.py": "#!/usr/bin/env python"}, "_a.py:1: the first line"),
    ("nothing_left_to_do", {"_a.py": "\na = 1  # TO" + "DO: b"}, "_a.py:3: TO" + "DO"),
    ("own_name_in_no_string", {"_a.py": "a = 'ftlite._errors'"}, "_a.py:2: the package's own name"),
    ("own_name_in_no_string", {"_a.py": "a = b'X-Ftlite-Sum'"}, "_a.py:2: the package's own name"),
    ("own_name_in_no_string", {"_a.py": "a = f'{1} in FTLITE_UNKNOWN'"}, "_a.py:2: the package's own name"),
    ("tests_load_the_package", {"test_a.py": "from ftlite._errors import StateError"}, "test_a.py:2: imports ftlite"),
    ("set_up_calls_super", {"test_a.py": "class A(Guarded):\n    def setUp(self):\n        self.a = 1"}, "A.setUp"),
]


if __name__ == "__main__":
    unittest.main()
