# SPDX-License-Identifier: BSD-3-Clause
"""As ``_template_entry``, in a template that finds no pidfd (a kernel before 5.3, some sandboxes)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# at import, which is before the template looks for its trainer
del os.pidfd_open

_path = Path(__file__).with_name("_template_entry.py")
_spec = importlib.util.spec_from_file_location("_template_entry", _path)
if _spec is None or _spec.loader is None:
    raise ImportError(_path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
main = _module.main
