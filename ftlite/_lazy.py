# SPDX-License-Identifier: BSD-3-Clause
"""How a door opens: a package names what it offers, and a name's module is imported when it is asked for.

So ``import ftlite`` costs milliseconds and needs no torch, and a pure module can be imported from its
room without the heavy ones beside it. PEP 562 does the work; the two functions here are the package's
``__getattr__`` and ``__dir__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["open_door"]


def open_door(package: str, where: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: the package's ``__name__``.
        where: which relative module has which public name; the module ``.x`` has the name ``x`` itself.
    """
    names = vars(sys.modules[package])

    def find(name: str) -> object:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(where[name], package)
        value: object = module if where[name] == f".{name}" else getattr(module, name)
        names[name] = value  # from now on Python finds it without asking here
        return value

    def listing() -> list[str]:
        return sorted({*names, *where})

    return find, listing
