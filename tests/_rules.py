# SPDX-License-Identifier: BSD-3-Clause
"""The mechanical rules of the house, as functions from a source tree to findings ("file:line: what").

Each rule looks at syntax trees only; nothing is imported. ``test_structure`` holds them against the package
and, so that none of them is a rule that cannot fail, against small trees that break them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

LICENCE = "# SPDX-License-Identifier: BSD-3-Clause"
MODULE_LINES = 400
FUNCTION_LINES = 60

# Which rooms a room may import from; "top" is _errors, _deadline and the other modules beside the door.
ROOMS = {
    "top": {"top"},
    "process_group": {"top"},
    "checkpointing": {"top"},
    "manager": {"top", "process_group", "checkpointing"},
}
# They stand on everything, talk to a person through print, and nobody imports them.
COMMAND_LINE = {"__main__", "bench", "demo"}
# (importer, imported room): the wall's one gap.
GAPS = {("checkpointing._pg_transport", "process_group")}  # it takes a group through the interface

# Strings that may hold the package's name, each with the reason.
NAMED = {
    "FtliteError": "the class, in __all__",
    "FTLITE_INTERFACE": "documented environment variable: the interface to advertise",
    "ftlite-baby-": "documented backend names: what it begins, with the backend's own after it",
}


@dataclass(frozen=True)
class Import:
    """One imported module; ``target`` is relative to the package's folder ("" is the door itself)."""

    target: str
    line: int
    typing_only: bool
    in_function: bool


@dataclass
class Module:
    """One source file of the package."""

    path: Path
    name: str  # "" for the door, "checkpointing" for a room's door, "checkpointing._layout"
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        first, _, rest = self.name.partition(".")
        return first if rest or self.is_package or first in COMMAND_LINE else "top"

    def at(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {text}"


class Tree:
    """The modules of one package folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            self.modules[name] = Module(path, name, text, ast.parse(text, str(path)))

    def library(self) -> list[Module]:
        return [module for module in self.modules.values() if module.room not in COMMAND_LINE]

    def imports(self, module: Module) -> Iterator[Import]:
        """What ``module`` imports from its own package."""
        for node, typing_only, in_function in _walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or node.level == 0:
                continue
            here = module.name.split(".") if module.name else []
            up = node.level - 1 if module.is_package else node.level
            base = [*here[: len(here) - up], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                longer = ".".join([*base, alias.name])
                target = longer if longer in self.modules else ".".join(base)
                yield Import(target, node.lineno, typing_only, in_function)


def _walk(node: ast.AST, typing_only: bool = False, in_function: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node below, with whether it stands under TYPE_CHECKING and inside a function."""
    for child in ast.iter_child_nodes(node):
        yield child, typing_only, in_function
        typing = typing_only or (
            isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        )
        function = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, typing, function)


# --- the package ---------------------------------------------------------------------------------------


def relative_imports(tree: Tree) -> list[str]:
    """A copy has another name, so a module finds its neighbours by dots."""
    return [
        module.at(line, f"imports {name} by name: use a relative import")
        for module in tree.modules.values()
        for line, name in absolute_imports(module.tree)
        if name.split(".")[0] == tree.folder.name
    ]


def absolute_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every absolutely imported module and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def no_cycle(tree: Tree) -> list[str]:
    """Modules import each other in one direction."""
    edges = {
        module.name: {i.target for i in tree.imports(module) if not i.typing_only} - {module.name}
        for module in tree.modules.values()
    }
    findings = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = [*path[path.index(name) :], name]
            findings.append(tree.modules[name].at(1, "import cycle: " + " -> ".join(n or "the door" for n in circle)))
        elif name not in done and name in edges:
            for target in sorted(edges[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return findings


def walls(tree: Tree) -> list[str]:
    """Rooms import only what stands below them; nobody imports the doors from inside."""
    findings = []
    for module in tree.modules.values():
        if module.room in COMMAND_LINE or module.name == "":
            continue
        if module.room not in ROOMS:
            findings.append(module.at(1, f"{module.room} is a new room: say in the rules what it may import"))
            continue
        for found in tree.imports(module):
            target = tree.modules.get(found.target)
            if target is None:
                findings.append(module.at(found.line, f"imports {found.target}, which does not exist"))
            elif target.name == "" or (target.is_package and target.room == module.room):
                findings.append(module.at(found.line, "imports its own door: name the module that defines it"))
            elif target.room not in ROOMS[module.room] | {module.room} and (module.name, target.room) not in GAPS:
                findings.append(module.at(found.line, f"{module.room} may not import {target.room}"))
    return findings


def no_import_in_function(tree: Tree) -> list[str]:
    """What a module needs is seen at its top."""
    return [
        module.at(node.lineno, "import inside a function")
        for module in tree.library()
        for node, _, in_function in _walk(module.tree)
        if in_function and isinstance(node, ast.Import | ast.ImportFrom)
    ]


def no_assert(tree: Tree) -> list[str]:
    """python -O removes asserts, and with them whatever they guarded."""
    return [
        module.at(node.lineno, "assert: raise an error that says what to do")
        for module in tree.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]


def no_print(tree: Tree) -> list[str]:
    """A library logs; only the command line talks."""
    return [
        module.at(node.lineno, f"{node.func.id}() in library code: use the module's logger")
        for module in tree.library()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"print", "pprint", "breakpoint"}
    ]


def size_of_modules(tree: Tree) -> list[str]:
    """A module says one thing."""
    return [
        module.at(1, f"{lines} lines, more than {MODULE_LINES}")
        for module in tree.modules.values()
        if (lines := len(module.text.splitlines())) > MODULE_LINES
    ]


def size_of_functions(tree: Tree) -> list[str]:
    """A function fits on a screen."""
    return [
        module.at(node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES}")
        for module in tree.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


def licence_line(tree: Tree) -> list[str]:
    """Each file carries its licence when it is copied alone."""
    return [
        module.at(1, f"the first line is not: {LICENCE}")
        for module in tree.modules.values()
        if not module.text.startswith(LICENCE + "\n")
    ]


def nothing_left_to_do(tree: Tree) -> list[str]:
    """Open ends belong to the tracker, not to the code."""
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)  # in pieces, for the rule reads this file too
    return [
        module.at(number, f"{word} in the code")
        for module in tree.modules.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        for word in words
        if word in line
    ]


def own_name_in_no_string(tree: Tree) -> list[str]:
    """The code depends on what its package is called nowhere, so that a copy may have another name."""
    findings = []
    for module in tree.modules.values():
        docstrings = {id(text) for text in _docstrings(module.tree)}
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if not isinstance(text, str):
                continue
            for allowed in NAMED:
                text = text.replace(allowed, "")
            if tree.folder.name.lower() in text.lower():
                findings.append(module.at(node.lineno, f"the package's own name in {node.value!r}"))
    return findings


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else []:
            # a string as a statement of its own: a docstring, or one below an attribute
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


PACKAGE_RULES: list[Callable[[Tree], list[str]]] = [
    relative_imports,
    no_cycle,
    walls,
    no_import_in_function,
    no_assert,
    no_print,
    size_of_modules,
    size_of_functions,
    licence_line,
    nothing_left_to_do,
    own_name_in_no_string,
]


# --- the tests -----------------------------------------------------------------------------------------


def tests_load_the_package(tree: Tree) -> list[str]:
    """The tests name the package once, so that a host can point them at its copy."""
    return [
        module.at(line, f"imports {name} by name: use tests.load")
        for module in tree.modules.values()
        for line, name in absolute_imports(module.tree)
        if name.split(".")[0] == "ftlite"
    ]


def set_up_calls_super(tree: Tree) -> list[str]:
    """A setUp that forgets super() switches the leak guard and the watchdog off."""
    findings = []
    for module in tree.modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef) or [ast.unparse(base) for base in node.bases] == [
                "unittest.TestCase"
            ]:
                continue
            for method in node.body:
                if (
                    isinstance(method, ast.FunctionDef)
                    and method.name == "setUp"
                    and "super().setUp()" not in ast.unparse(method)
                ):
                    findings.append(module.at(method.lineno, f"{node.name}.setUp does not call super().setUp()"))
    return findings


TESTS_RULES: list[Callable[[Tree], list[str]]] = [
    tests_load_the_package,
    set_up_calls_super,
    licence_line,
    nothing_left_to_do,
]
