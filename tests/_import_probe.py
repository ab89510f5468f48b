# SPDX-License-Identifier: BSD-3-Clause
"""Run in a fresh interpreter: import every module of a package and say what that did to the process.

Arguments: the folder to import from, the package, then modules to import first, whose doings are not the
package's (torch). The last line on stdout is a JSON list of findings. A module that needs torch is left
out where there is none.

It imports everything twice. The first time, what counts is the process: threads, children, descriptors,
signal handlers, log handlers, hooks, filters. The second time, with everything else already imported, what
counts is what the standard library does as well at its own import: exit hooks and reads of the environment.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from unittest import mock


class Recorder(MutableMapping):
    """An environment that notes who looks into it."""

    def __init__(self, real: MutableMapping, findings: list[str]) -> None:
        self.real = real
        self.findings = findings

    def _note(self, what: str) -> None:
        caller = next(
            frame
            for frame in reversed(traceback.extract_stack())
            if Path(frame.filename).name not in {"os.py", "_collections_abc.py"} and frame.filename != __file__
        )
        self.findings.append(f"{caller.filename}:{caller.lineno}: environment: {what}")

    def __getitem__(self, name: str) -> str:
        self._note(f"reads {name}")
        return self.real[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._note(f"sets {name}")
        self.real[name] = value

    def __delitem__(self, name: str) -> None:
        self._note(f"removes {name}")
        del self.real[name]

    def __iter__(self) -> Iterator[str]:
        self._note("lists it")
        return iter(self.real)

    def __len__(self) -> int:
        return len(self.real)


def module_names(root: str, package: str) -> list[str]:
    folder = Path(root, *package.split("."))
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def import_all(names: list[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise


def children() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.append(path.parent.name)
        except OSError:  # it ended while we looked
            continue
    return found


def descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except OSError:  # the listing's own
            continue
    return found


def process_state() -> dict[str, list[str]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return {
        "thread": [repr(thread) for thread in threading.enumerate()],
        "child process": children(),
        "descriptor": descriptors(),
        "signal handler": [f"{number!r} {signal.getsignal(number)!r}" for number in signal.valid_signals()],
        "log handler": [
            f"{log.name} {handler!r}"
            for log in loggers
            if isinstance(log, logging.Logger)
            for handler in log.handlers
            if not isinstance(handler, logging.NullHandler)
        ],
        "hook": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "socket default": [repr(socket.getdefaulttimeout())],
        "search path": list(sys.path),
        "warning filter": [repr(entry) for entry in warnings.filters],
    }


def main(root: str, package: str, *first: str) -> None:
    findings: list[str] = []
    sys.path[0] = root  # instead of this script's folder
    for name in first:
        importlib.import_module(name)
    names = module_names(root, package)

    before = process_state()
    import_all(names)
    after = process_state()
    findings += [f"{kind}: {new}" for kind in after for new in after[kind] if new not in before[kind]]

    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        del sys.modules[name]
    hooks = atexit._ncallbacks()
    with mock.patch.object(os, "environ", Recorder(os.environ, findings)):
        import_all(names)
    if atexit._ncallbacks() != hooks:
        findings.append("exit hook: registered")
    print(json.dumps(findings))


if __name__ == "__main__":
    main(*sys.argv[1:])
