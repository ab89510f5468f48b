# SPDX-License-Identifier: BSD-3-Clause
"""Make a host with a copy of the package: ``python tests/_vendor.py FOLDER``.

Afterwards FOLDER has ``acme/_vendor/ftlite``, the tests and the licence, and the suite runs in it with
FTLITE_TEST_PACKAGE=acme._vendor.ftlite. Nothing there has the package under its own name.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def main(folder: str) -> None:
    host = Path(folder)
    for part in ("acme", "tests"):
        shutil.rmtree(host / part, ignore_errors=True)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "ftlite", host / "acme" / "_vendor" / "ftlite", ignore=no_caches)
    shutil.copytree(CHECKOUT / "tests", host / "tests", ignore=no_caches)
    shutil.copy(CHECKOUT / "LICENSE", host)
    for package in (host / "acme", host / "acme" / "_vendor"):
        (package / "__init__.py").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
