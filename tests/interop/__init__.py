# SPDX-License-Identifier: BSD-3-Clause
"""Together with torchft, where it is installed (``tox -e interop``)."""

from __future__ import annotations

import importlib.util
import unittest

if importlib.util.find_spec("torchft") is None:
    raise unittest.SkipTest("needs torchft")
