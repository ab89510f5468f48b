# SPDX-License-Identifier: BSD-3-Clause
"""English text that every Python has: the help topics that CPython ships, else the docstrings of its library.

Rules of this file: nothing is downloaded and no module is imported to read its docstrings; the same Python gives
the same text in every process.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

from .._errors import StateError

__all__ = ["corpus", "docstrings"]

# Less than this and a model has nothing to learn from: a stripped Python may have the module, and it empty.
_ENOUGH = 20_000

# Pure Python everywhere, well documented, and in every version from 3.10 on.
_DOCUMENTED = (
    "argparse", "ast", "bdb", "calendar", "cmd", "codecs", "collections", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "doctest", "email", "enum", "fractions", "functools", "gettext",
    "glob", "heapq", "inspect", "ipaddress", "json", "locale", "logging", "mailbox", "mimetypes", "optparse", "os",
    "pathlib", "pickle", "platform", "pprint", "random", "shelve", "shutil", "socket", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback", "typing", "unittest",
    "urllib", "uuid", "weakref", "zipfile",
)  # fmt: skip


def corpus() -> tuple[str, str]:
    """The text, and what it is in words.

    Raises:
        StateError: this Python has neither help topics nor the sources of its library.
    """
    text = _topics()
    if len(text) >= _ENOUGH:
        return text, "English text (Python's help topics)"
    text = docstrings(_DOCUMENTED)
    if len(text) >= _ENOUGH:
        return text, "English text (docstrings of Python's library)"
    raise StateError(
        "this Python has neither pydoc_data.topics nor the sources of its standard library, so there is no text to "
        "train on: run the demo with a complete Python",
        state="no text",
        attempted="demo",
    )


def docstrings(modules: tuple[str, ...]) -> str:
    """The docstrings in the sources of ``modules``; those without a source are passed over."""
    parts = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            continue
        try:
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                parts.append(ast.get_docstring(node) or "")
    return "\n\n".join(part for part in parts if part)


def _topics() -> str:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return ""
    return "\n\n".join(str(topics[name]) for name in sorted(topics))
