# SPDX-License-Identifier: BSD-3-Clause
"""The tests, and the one place that names the package under test.

A host that keeps a copy sets FTLITE_TEST_PACKAGE (``acme._vendor.ftlite``) and runs the same tests
against its copy. So no test imports the package by name: ``load("checkpointing._layout")`` does it.
"""

from __future__ import annotations

import importlib
import os
import unittest
import warnings
from types import ModuleType

# torch 2.6 says so at its import where numpy is missing, which is how these tests run
NO_NUMPY = "Failed to initialize NumPy"
warnings.filterwarnings("ignore", NO_NUMPY, UserWarning)

# torch asks for the name of every address that it connects to, and the C library waits 5 s for a packet that a name
# server never saw: as long as a whole test may take. Read when the first name is asked for, so also in here in time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

PACKAGE = os.environ.get("FTLITE_TEST_PACKAGE") or "ftlite"


def load(name: str = "") -> ModuleType:
    """Import the package under test, or its module ``name`` ("_errors", "checkpointing._layout")."""
    return importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)


def not_in_a_copy() -> None:
    """Leave the calling module out where a copy inside another package is tested: it takes minutes of kills and
    waits, none of which depends on where the package lies, and runs against the checkout on every torch.
    """
    if "." in PACKAGE:
        raise unittest.SkipTest("takes minutes, and depends in nothing on where the package lies")
