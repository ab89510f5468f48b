# SPDX-License-Identifier: BSD-3-Clause
"""The first file of the template process: run by its path, it makes the package again under a private name.

Rules of this file: the standard library alone at its top, since it runs before the trainer's import path is set;
no module in this folder may be called as one of the standard library's.

So nothing of the trainer's is run a second time: not its ``__main__`` (with or without a main guard, a notebook's
or a ``-c`` text), and not the ``__init__`` of a package that a copy of this one lies in.

The contract: one argument, a JSON object with
    path     the trainer's sys.path
    trainer  its pid, which is the parent of this process
    control  the descriptor of the socket to it
    stderr   the descriptor of the user's stderr; until the template is ready, descriptor 2 is a pipe to the trainer
    entry    what the children run, see ``load_entry``
What comes then is the contract of ``_template_main``. An import that fails ends the process with its traceback and
exit code 1. Until it is ready, the process is killed by the kernel when the thread that started it ends: an import
from a cold disk can take longer than anybody would wait for an orphan, and sees nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["EXIT_ORPHAN", "PACKAGE", "die_with_parent", "live_on", "load_entry"]

# What the package is called in the template and its children. Nobody would call a package of theirs so.
PACKAGE = "_ft_child"
# The exit code of who finds that its parent is gone already. Nobody is left to be told; it shows in an audit log.
EXIT_ORPHAN = 71
# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; ``parent`` is that thread's process."""
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(EXIT_ORPHAN)


def live_on() -> None:
    """Take ``die_with_parent`` back."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(number: int) -> None:
    # a C library without prctl (or no C library to be found by name): the other signs of the end are left
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def load_entry(entry: str) -> Callable[[Any], int | None]:
    """The function that the children run: ``main`` of the module ``entry``.

    Args:
        entry: a module of the package ("process_group._child"), or the path of a file outside of it (tests have
            their stand-ins there).
    """
    if entry.endswith(".py"):
        return _module_at(f"{PACKAGE}.process_group._entry", Path(entry)).main  # type: ignore[no-any-return]
    return importlib.import_module(f"{PACKAGE}.{entry}").main  # type: ignore[no-any-return]


def _module_at(name: str, path: Path, folders: list[str] | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(argument: str) -> None:
    options = json.loads(argument)
    die_with_parent(options["trainer"])
    sys.path[:] = options["path"]
    folder = Path(__file__).parents[1]
    with warnings.catch_warnings():
        # the trainer has imported the same torch, and the user has read what that warns of
        warnings.simplefilter("ignore")
        _module_at(PACKAGE, folder / "__init__.py", [str(folder)])
        template = importlib.import_module(f"{PACKAGE}.process_group._template_main")
        entry = load_entry(options["entry"])
    template.main(options["trainer"], options["control"], options["stderr"], entry)


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an interpreter with torch in it takes one to five seconds for its own end, and somebody waits
