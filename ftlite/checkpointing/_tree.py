# SPDX-License-Identifier: BSD-3-Clause
"""The structure of a state as tagged JSON: containers and plain leaves, with tensors as numbers.

No unpickler runs here and nothing is imported by name. What holds:

- ``None``, bool, str without surrogates, finite float and int of 64 bits stand for themselves; all else is
  ``[tag, ...]``.
- Types are matched exactly: a subclass (an IntEnum, a numpy scalar) is not what it derives from.
- Nodes that pytree knows besides (namedtuples, registered classes) carry their children; the receiver
  rebuilds them from its own instance at the same place, or from a namedtuple it has allowed with
  ``torch.serialization.add_safe_globals``.
- Nesting is limited on both sides, since both walk by recursion.

A *path* is the chain of keys to a leaf, as nested pairs ``(parent, key)`` that cost nothing to extend;
``show_path`` makes the text.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._errors import LayoutError

Path = tuple[Any, Any] | None
Node = Any

# Deeper than any real state by far, and far from the interpreter's limit of 1,000 frames.
MAX_DEPTH = 100
_INT_LIMIT = 1 << 63
_SURROGATE = re.compile("[\ud800-\udfff]")
MISSING: Any = object()

_FACTORIES: dict[str, Any] = {
    "none": None, "list": list, "dict": dict, "set": set, "tuple": tuple,
    "int": int, "float": float, "str": str, "bool": bool, "bytes": bytes, "complex": complex,
}  # fmt: skip
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "u", torch.Size: "size", set: "set", frozenset: "fset"}
_BUILD_SEQUENCE: dict[str, Callable[[list[Any]], Any]] = {
    "l": list, "u": tuple, "size": torch.Size, "set": set, "fset": frozenset,
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def show_path(path: Path) -> str:
    """The text of ``path``: ``['model']['layers.0.weight']``, or ``the state itself`` for its root."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(f"[{key!r}]" if not isinstance(key, _Attribute) else f".{key.name}")
    return "".join(reversed(keys)) or "the state itself"


class _Attribute:
    """A key that is a position in a registered node, shown apart from an index."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Malformed(ValueError):
    """The JSON is not what an encoder of ours writes. Internal: the manifest turns it into an error."""


# --- encoding -----------------------------------------------------------------------------------------


def encode(obj: Any, leaf: Callable[[Any, Path], Node | None], path: Path = None, depth: int = 0) -> Node:
    """The node of ``obj``. ``leaf`` gets what is not plain (tensors first) and returns its node or None.

    Raises:
        LayoutError: nesting is too deep, or ``leaf`` raises it for what cannot be carried.
    """
    kind = type(obj)
    if obj is None or kind is bool:
        return obj
    if kind is str:
        return obj if _is_text(obj) else ["s", obj.encode("utf-8", "surrogatepass").hex()]
    if kind is int:
        return obj if -_INT_LIMIT <= obj < _INT_LIMIT else ["int", hex(obj)]
    if kind is float:
        return obj if math.isfinite(obj) else ["f", struct.pack(">d", obj).hex()]
    if isinstance(obj, torch.Tensor):
        return leaf(obj, path)
    if depth >= MAX_DEPTH:
        raise LayoutError(
            f"{show_path(path)[:200]}...: containers are nested more than {MAX_DEPTH} deep, or contain themselves; "
            "flatten the state"
        )
    found = _encode_container(obj, kind, leaf, path, depth + 1)
    if found is None:
        found = _encode_plain(obj, kind)
    if found is None:
        found = _encode_registered(obj, leaf, path, depth + 1)
    return leaf(obj, path) if found is None else found


def _is_text(text: str) -> bool:
    """Whether JSON gives ``text`` back: of two surrogates side by side it makes one character."""
    return text.isascii() or _SURROGATE.search(text) is None


def _encode_container(obj: Any, kind: type, leaf: Any, path: Path, depth: int) -> Node | None:
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], [encode(item, leaf, (path, i), depth) for i, item in enumerate(obj)]]
    if kind is dict:
        if all(type(key) is str and _is_text(key) for key in obj):
            return ["d", {key: encode(value, leaf, (path, key), depth) for key, value in obj.items()}]
        return ["map", _encode_items(obj, leaf, path, depth)]
    if kind is OrderedDict:
        return ["od", _encode_items(obj, leaf, path, depth)]
    if kind is Counter:
        return ["count", _encode_items(obj, leaf, path, depth)]
    if kind is defaultdict and obj.default_factory in _FACTORY_NAMES:
        return ["dd", _FACTORY_NAMES[obj.default_factory], _encode_items(obj, leaf, path, depth)]
    if kind is deque:
        return ["dq", obj.maxlen, [encode(item, leaf, (path, i), depth) for i, item in enumerate(obj)]]
    return None


def _encode_items(obj: Any, leaf: Any, path: Path, depth: int) -> list[list[Node]]:
    def refuse_key(key: Any, where: Path) -> Node:
        raise LayoutError(
            f"{show_path(where)}: a key of type {type(key).__name__} cannot be carried; use str, int, float, bool, "
            "bytes, None or tuples of these as keys"
        )

    return [
        [encode(key, refuse_key, (path, key), depth), encode(value, leaf, (path, key), depth)]
        for key, value in obj.items()
    ]


def _encode_plain(obj: Any, kind: type) -> Node | None:
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "ba", base64.b64encode(obj).decode("ascii")]
    if kind is complex:
        return ["c", struct.pack(">dd", obj.real, obj.imag).hex()]
    if kind is torch.dtype:
        return ["dtype", str(obj).removeprefix("torch.")]
    if kind is torch.device:
        return ["dev", str(obj)]
    return None


def _one_level(obj: Any) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten(obj, is_leaf=lambda x: x is not obj)


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_registered(obj: Any) -> bool:
    """Whether pytree knows how to take ``obj`` apart, beyond the containers that have a tag of their own."""
    kind = type(obj)
    if (kind in _SEQUENCES and kind is not torch.Size) or kind in (dict, OrderedDict, defaultdict, deque):
        return False
    return not _one_level(obj)[1].is_leaf()


def _encode_registered(obj: Any, leaf: Any, path: Path, depth: int) -> Node | None:
    if not is_registered(obj):
        return None
    children, _ = _one_level(obj)
    nodes = [encode(child, leaf, (path, key), depth) for key, child in zip(_child_keys(obj, children), children)]
    return ["n", _type_name(type(obj)), nodes]


def _child_keys(obj: Any, children: list[Any]) -> list[Any]:
    names = getattr(type(obj), "_fields", None)
    if not isinstance(names, tuple) or len(names) != len(children):
        names = tuple(str(i) for i in range(len(children)))
    return [_Attribute(str(name)) for name in names]


# --- walking a node beside the receiver's own tree ------------------------------------------------------


def children(node: Node) -> Iterator[tuple[Any, Node]]:
    """The keys and nodes right below ``node``; nothing below a leaf."""
    if type(node) is not list or not node:
        return
    tag = node[0]
    if tag in _BUILD_SEQUENCE or tag == "dq":
        yield from enumerate(node[-1])
    elif tag == "d":
        yield from node[1].items()
    elif tag in ("map", "od", "dd", "count"):
        for key, value in node[-1]:
            yield build(key, None, MISSING), value
    elif tag == "n":
        yield from enumerate(node[2])


def own_children(obj: Any) -> dict[Any, Any] | None:
    """The receiver's own children of ``obj`` by the keys that ``children`` gives; None for a leaf."""
    if isinstance(obj, dict):
        return obj
    if isinstance(obj, torch.Tensor):
        return None
    if type(obj) in (list, tuple, deque, torch.Size):
        return dict(enumerate(obj))
    if is_registered(obj):
        return dict(enumerate(_one_level(obj)[0]))
    return None


# --- building -------------------------------------------------------------------------------------------


def build(node: Node, tensor: Callable[[str, int], Any] | None, own: Any, depth: int = 0, path: Path = None) -> Any:
    """The object of ``node``. ``tensor(tag, number)`` gives its tensors and blobs; None where none may be.

    ``own`` is the receiver's object at the same place, or ``MISSING``.

    Raises:
        Malformed: the node is none of ours.
        LayoutError: a registered class of which the receiver has no instance at this place.
    """
    if type(node) is not list:
        if node is None or type(node) in (str, bool, int, float):
            return node
        raise Malformed(f"a node of type {type(node).__name__}")
    if depth > MAX_DEPTH:
        raise Malformed(f"nesting deeper than {MAX_DEPTH}")
    tag, *body = node
    if tag in ("t", "p") and tensor is not None:
        return tensor(tag, body[0])
    if tag == "n":
        return _build_registered(node, tensor, own, depth + 1, path)
    mine = own_children(own) if own is not MISSING else None
    mine = {} if mine is None else mine

    def below(key: Any, child: Node) -> Any:
        return build(child, tensor, mine.get(key, MISSING), depth + 1, (path, key))

    if tag in _BUILD_SEQUENCE:
        return _BUILD_SEQUENCE[tag]([below(i, child) for i, child in enumerate(body[0])])
    if tag == "d":
        return {key: below(key, child) for key, child in body[0].items()}
    if tag == "dq":
        return deque([below(i, child) for i, child in enumerate(body[1])], maxlen=body[0])
    if tag in ("map", "od", "dd", "count"):
        items = [(build(key, None, MISSING, depth + 1), value) for key, value in body[-1]]
        pairs = [(key, below(key, value)) for key, value in items]
        if tag == "dd":
            return defaultdict(_FACTORIES[body[0]], pairs)
        return {"map": dict, "od": OrderedDict}[tag](pairs) if tag != "count" else Counter(dict(pairs))
    return _build_plain(tag, body)


def _build_plain(tag: Any, body: list[Any]) -> Any:
    if tag == "int":
        return int(body[0], 16)
    if tag == "s":
        return bytes.fromhex(body[0]).decode("utf-8", "surrogatepass")
    if tag == "f":
        return struct.unpack(">d", bytes.fromhex(body[0]))[0]
    if tag == "c":
        return complex(*struct.unpack(">dd", bytes.fromhex(body[0])))
    if tag in ("b", "ba"):
        raw = base64.b64decode(body[0], validate=True)
        return raw if tag == "b" else bytearray(raw)
    if tag == "dtype":
        return dtype_of(body[0])
    if tag == "dev":
        return torch.device(body[0])
    raise Malformed(f"an unknown tag {str(tag)[:40]!r}")


def dtype_of(name: Any) -> torch.dtype:
    """The dtype called ``name`` ("bfloat16").

    Raises:
        LayoutError: this torch has no such dtype.
    """
    if type(name) is not str or name not in DTYPES:
        raise LayoutError(
            f"the donor's state has dtype {str(name)[:40]!r}, which torch {torch.__version__} here does not know; "
            "run both replicas on a torch that has it"
        )
    return DTYPES[name]


def check(node: list[Any], own: Any, path: Path) -> None:
    """Raise, before any byte is moved, what ``build`` would raise at ``node`` itself.

    Raises:
        Malformed: (or another of ``BUILD_ERRORS``) the node is none of ours.
        LayoutError: a registered class that cannot be rebuilt here.
    """
    tag = node[0]
    if tag == "n":
        _rebuilder(node, own, path)
    elif tag == "dd":
        _FACTORIES[node[1]]
    elif tag not in _BUILD_SEQUENCE and tag not in ("d", "dq", "map", "od", "count"):
        _build_plain(tag, node[1:])


def _build_registered(node: Node, tensor: Any, own: Any, depth: int, path: Path) -> Any:
    mine, rebuild = _rebuilder(node, own, path)
    return rebuild([build(child, tensor, mine[i], depth, (path, i)) for i, child in enumerate(node[2])])


def _rebuilder(node: Node, own: Any, path: Path) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The receiver's own children beside those of ``node``, and what makes the object of new ones."""
    _, name, nodes = node
    if own is not MISSING and _type_name(type(own)) == name and is_registered(own):
        mine, spec = _one_level(own)
        if len(mine) != len(nodes):
            raise LayoutError(
                f"{show_path(path)}: the donor's {name} has {len(nodes)} fields, the receiver's {len(mine)}; "
                "make the two states alike"
            )
        return mine, lambda built: pytree.tree_unflatten(built, spec)
    for allowed in torch.serialization.get_safe_globals():
        if isinstance(allowed, type) and _type_name(allowed) == name and issubclass(allowed, tuple):
            return [MISSING] * len(nodes), lambda built, cls=allowed: cls(*built)
    raise LayoutError(
        f"{show_path(path)}: the donor has a {str(name)[:100]} here and the receiver has none to rebuild it from; "
        "give state_dict= with one at this place, or allow a namedtuple with torch.serialization.add_safe_globals"
    )


# What a malformed node can make the functions above raise, besides Malformed: for the caller's `except`.
BUILD_ERRORS = (Malformed, ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error, binascii.Error,
                RecursionError, OverflowError, RuntimeError)  # fmt: skip
