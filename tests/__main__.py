# SPDX-License-Identifier: BSD-3-Clause
"""Run the tests and count them: ``python -m tests [--pure] [--jobs N] [MODULE ...]``.

By default every test module runs, those under ``tests.interop`` aside; ``python -m unittest discover -t . -s
tests`` runs the same. ``--pure`` runs what can run where torch is not installed, and names what it leaves out.
The counts end the output and, if FTLITE_TEST_COUNTS names a file, are added to it as one line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from ._run import run, run_apart


def module_names() -> list[str]:
    """Every test module, found by its file, so that nothing has to be imported for it."""
    folder = Path(__file__).parent
    files = sorted(path.relative_to(folder.parent) for path in folder.rglob("test_*.py"))
    return [".".join(file.with_suffix("").parts) for file in files if file.parts[1] != "interop"]


def needs_torch(name: str) -> bool:
    """Whether a module cannot be imported for want of torch."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return (error.name or "").partition(".")[0] == "torch"
    except Exception:
        return False  # unittest's loader will report it
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description="Run the tests and count them.")
    parser.add_argument("--pure", action="store_true", help="run without torch what needs none")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="in so many processes, each a module at a time"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="name every test")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="tests.test_errors, ... (default: all)")
    arguments = parser.parse_args()
    names = arguments.modules or module_names()
    if arguments.pure:
        if importlib.util.find_spec("torch") is not None:
            parser.error("torch is installed here, so --pure would prove nothing")
        left_out = [name for name in names if needs_torch(name)]
        names = [name for name in names if name not in left_out]
        print("left out, for they need torch:", ", ".join(left_out) or "none", file=sys.stderr)
    verbosity = 2 if arguments.verbose else 1
    counts = run(names, verbosity) if arguments.jobs == 1 else run_apart(names, verbosity, arguments.jobs)
    for line in counts.skips:
        print(f"skipped: {line}", file=sys.stderr)
    print(counts, file=sys.stderr)
    if counts_file := os.environ.get("FTLITE_TEST_COUNTS"):
        with open(counts_file, "a", encoding="utf-8") as file:
            file.write(f"{counts.passed} {counts.failed} {len(counts.skips)}\n")
    # no test at all is no success
    return 0 if counts.passed and not counts.failed else 1


if __name__ == "__main__":
    sys.exit(main())
