# SPDX-License-Identifier: BSD-3-Clause
"""The table of collectives: what each takes, which of its tensors it reads and writes, and what its options are.

Rules of this file: whatever is true of one collective and not of another stands in ``OPS`` and nowhere else, so
the interface, the in-process groups and the child groups are one generator each. The older of torch's two names
is the canonical one, the newer one an alias; an op's number is its place in the table, which both ends of a pipe
read from the same file, so entries are only ever appended. Nothing here has state: any thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch

from .._errors import UnsupportedOp

__all__ = [
    "ALIASES",
    "BY_NUMBER",
    "FIELDS",
    "OPS",
    "Op",
    "Param",
    "arrange",
    "call",
    "normalise",
    "results",
    "seen_by",
    "walk",
]

c10d: Any = torch._C._distributed_c10d  # where the option classes live in every torch; torch.distributed lacks some

Kind: TypeAlias = Literal["tensor", "tensors", "tensor_lists", "int", "ints"]
Direction: TypeAlias = Literal["in", "out", "inout"]
# What an argument may be once it is normalised: a tensor, a list of them, a list of such lists, an int, a list of ints.
Value: TypeAlias = Any
Options: TypeAlias = Any  # one of torch's option objects, or None for an op without options

_TENSOR_KINDS = ("tensor", "tensors", "tensor_lists")


@dataclass(frozen=True, slots=True)
class Param:
    """One argument of a collective. ``direction`` is None where it is no tensor; ``names`` are its keywords."""

    name: str
    kind: Kind
    direction: Direction | None
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One collective. ``options`` names torch's class of its options, ``newer`` the name that later torch gives it.

    ``has_numbers``: not all its arguments are tensors. ``receives``: its Work knows which rank it is from, afterwards.
    ``on_root`` is the same op as its root takes it, where that only reads what the others write.
    """

    name: str
    params: tuple[Param, ...]
    options: str | None
    newer: str | None
    number: int
    has_numbers: bool
    receives: bool
    on_root: Op | None = None


# The fields that each class of options may have; a torch that lacks one (asyncOp in 2.6) neither sends nor gets it.
FIELDS: dict[str, tuple[str, ...]] = {
    "AllreduceOptions": ("reduceOp", "timeout", "asyncOp"),
    "AllreduceCoalescedOptions": ("reduceOp", "timeout", "asyncOp"),
    "BroadcastOptions": ("rootRank", "rootTensor", "timeout", "asyncOp"),
    "ReduceOptions": ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp"),
    "AllgatherOptions": ("timeout", "asyncOp"),
    "GatherOptions": ("rootRank", "timeout", "asyncOp"),
    "ScatterOptions": ("rootRank", "timeout", "asyncOp"),
    "ReduceScatterOptions": ("reduceOp", "timeout", "asyncOp"),
    "AllToAllOptions": ("timeout", "asyncOp"),
    "BarrierOptions": ("device_ids", "device", "timeout", "asyncOp"),
}

# One line per collective: name, torch's later name, options, arguments. An argument is "keywords:kind:direction", or
# "keywords:kind:direction/direction on the root" where that differs.
# torch's overloads name the same argument differently; send and recv also go by the spelling of torchft.
_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("allreduce", "", "AllreduceOptions", "tensors/tensor:tensors:inout"),
    ("allreduce_coalesced", "", "AllreduceCoalescedOptions", "tensors:tensors:inout"),
    ("broadcast", "", "BroadcastOptions", "tensors/tensor/tensor_list:tensors:inout/in"),
    ("reduce", "", "ReduceOptions", "tensors/tensor:tensors:inout"),
    ("allgather", "", "AllgatherOptions", "output_tensors:tensor_lists:out input_tensors/input_tensor:tensors:in"),
    ("_allgather_base", "all_gather_single", "AllgatherOptions", "output:tensor:out input:tensor:in"),
    ("allgather_coalesced", "", "AllgatherOptions", "output_lists:tensor_lists:out input_list:tensors:in"),
    (
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
        "AllgatherOptions",
        "outputs/output_tensors:tensors:out inputs/input_tensors:tensors:in",
    ),
    ("gather", "", "GatherOptions", "output_tensors:tensor_lists:out input_tensors/input_tensor:tensors:in"),
    ("scatter", "", "ScatterOptions", "output_tensors/output_tensor:tensors:out input_tensors:tensor_lists:in"),
    (
        "reduce_scatter",
        "",
        "ReduceScatterOptions",
        "output_tensors/output:tensors:out input_tensors/input:tensor_lists:in",
    ),
    (
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "ReduceScatterOptions",
        "outputTensor/output:tensor:out inputTensor/input:tensor:in",
    ),
    (
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        "ReduceScatterOptions",
        "outputs/output_tensors:tensors:out inputs/input_tensors:tensors:in",
    ),
    ("alltoall", "", "AllToAllOptions", "output_tensors:tensors:out input_tensors:tensors:in"),
    (
        "alltoall_base",
        "all_to_all_single",
        "AllToAllOptions",
        "output/output_buffer:tensor:out input/input_buffer:tensor:in output_split_sizes:ints: input_split_sizes:ints:",
    ),
    ("barrier", "", "BarrierOptions", ""),
    ("send", "", "", "tensors:tensors:in dstRank/dst_rank:int: tag:int:"),
    ("recv", "", "", "tensors:tensors:out srcRank/src_rank:int: tag:int:"),
    ("recv_anysource", "", "", "tensors:tensors:out tag:int:"),
)


def _param(text: str, on_root: bool = False) -> Param:
    names, kind, directions = text.split(":")
    direction, _, there = directions.partition("/")
    spelled = tuple(names.split("/"))
    return Param(spelled[0], kind, (on_root and there) or direction or None, spelled)  # type: ignore[arg-type]


def _op(number: int, name: str, newer: str, options: str, texts: str) -> Op:
    params, there = (tuple(_param(text, on_root) for text in texts.split()) for on_root in (False, True))
    has_numbers = any(param.direction is None for param in params)
    receives = has_numbers and not options and params[0].direction == "out"
    op = Op(name, params, options or None, newer or None, number, has_numbers, receives)
    return op if there == params else replace(op, on_root=replace(op, params=there))


BY_NUMBER: tuple[Op, ...] = tuple(_op(number, *line) for number, line in enumerate(_TABLE))
OPS: Mapping[str, Op] = {op.name: op for op in BY_NUMBER}
ALIASES: Mapping[str, str] = {op.newer: op.name for op in BY_NUMBER if op.newer is not None}


# --- arguments -------------------------------------------------------------------------------------------


def normalise(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Value], Options]:
    """Bring the arguments of any of torch's overloads into the one form that a group's hook gets.

    Every parameter of the table comes first, in its order or by any of its names: a tensor may stand for a list of
    one, a list of tensors for a list of one list. After them follow, in any order, by position or by name (``opts``,
    ``op``, ``root``, ``timeout``), an options object, a ReduceOp, a root's rank, a timeout.

    Returns:
        The values, one per parameter, lists as new lists; and the options, an object of the op's class that the
        caller has not seen unless it is the one that it gave. None for ops without options.

    Raises:
        TypeError: an argument is missing, unknown, given twice or of a wrong type.
    """
    given = dict(kwargs)
    values = []
    for index, param in enumerate(op.params):
        if index < len(args):
            value = args[index]
        else:
            name = next((name for name in param.names if name in given), None)
            if name is None:
                raise TypeError(f"{op.name}() lacks its argument {param.name!r}")
            value = given.pop(name)
        values.append(_value(op, param, value))
    extra = args[len(op.params) :]
    return values, _options(op, extra, given)


def _value(op: Op, param: Param, value: Any) -> Value:
    kind = param.kind
    if kind == "tensors":
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in value):
            return list(value)
    elif kind == "tensor":
        if isinstance(value, torch.Tensor):
            return value
    elif kind == "tensor_lists":
        if isinstance(value, (list, tuple)):
            lists = [value] if value and isinstance(value[0], torch.Tensor) else value
            if all(isinstance(row, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in row) for row in lists):
                return [list(row) for row in lists]
    elif kind == "ints":
        return [int(each) for each in value or ()]
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError(f"{op.name}(): {param.name} is {_shown(value)}, and has to be {_EXPECTED[kind]}")


_EXPECTED: Mapping[Kind, str] = {
    "tensor": "a tensor",
    "tensors": "a list of tensors",
    "tensor_lists": "a list of lists of tensors",
    "int": "an int",
    "ints": "a list of ints",
}


def _shown(value: Any) -> str:
    """A value for a message: tensors by type alone, since their text is long and may need a device."""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {sorted({type(each).__name__ for each in value}) or 'nothing'}"
    return f"a {type(value).__name__}"


def _options(op: Op, extra: Sequence[Any], given: Mapping[str, Any]) -> Options:
    """The options object of a call, from what followed its parameters."""
    if op.options is None:
        if extra or given:
            raise TypeError(f"{op.name}() takes {[param.name for param in op.params]} and no options")
        return None
    cls = getattr(c10d, op.options)
    if len(extra) == 1 and not given and type(extra[0]) is cls:
        return extra[0]
    options: Options = None
    single: dict[str, Any] = {}
    for name, value in [*((_by_type(op, value), value) for value in extra), *given.items()]:
        field = _FIELD_OF.get(name)
        if name == "opts":
            options = _own_class(op, cls, value) if value is not None else None
        elif field is None or field not in FIELDS[op.options] or field in single:
            raise TypeError(f"{op.name}() takes no {name!r} here; its options are {', '.join(FIELDS[op.options])}")
        elif value is not None:
            single[field] = value
    if options is None:
        options = cls()
    elif single:
        options = _own_class(op, cls, options, copy=True)
    for field, value in single.items():
        setattr(options, field, value)
    return options


# Keywords of torch's overloads, and the field of the options that each sets.
_FIELD_OF = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def _by_type(op: Op, value: Any) -> str:
    """Which keyword an argument after the parameters stands for; torch's overloads can be told apart by types."""
    if isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
        return "op"
    if value is None or isinstance(value, timedelta):
        return "timeout"
    if isinstance(value, int) and not isinstance(value, bool):
        return "root"
    if type(value).__name__ in FIELDS:
        return "opts"
    raise TypeError(f"{op.name}() does not know what to do with {_shown(value)}: give {op.options} or its parts")


def _own_class(op: Op, cls: type, value: Any, copy: bool = False) -> Options:
    """``value`` as an object of ``cls``: itself, or a new one with the fields that both have."""
    if isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):  # torchft passes it by this name as well
        made = cls()
        made.reduceOp = value
        return made
    if type(value).__name__ not in FIELDS:
        raise TypeError(f"{op.name}(): opts is {_shown(value)}, and has to be {cls.__name__}")
    if type(value) is cls and not copy:
        return value
    made = cls()
    for field in FIELDS[cls.__name__]:
        if hasattr(value, field) and hasattr(made, field):
            setattr(made, field, getattr(value, field))
    return made


# --- tensors ---------------------------------------------------------------------------------------------


def walk(op: Op, values: Sequence[Value]) -> list[tuple[Direction, torch.Tensor]]:
    """Every tensor of normalised ``values`` with its direction, in order."""
    found: list[tuple[Direction, torch.Tensor]] = []
    for param, value in zip(op.params, values):
        direction = param.direction
        if direction is None:
            continue
        if param.kind == "tensor":
            found.append((direction, value))
        elif param.kind == "tensors":
            found += [(direction, tensor) for tensor in value]
        else:
            found += [(direction, tensor) for row in value for tensor in row]
    return found


def seen_by(op: Op, options: Options, rank: int) -> Op:
    """``op`` as ``rank`` has to ``walk`` its tensors: on the root of a broadcast they may be in read-only memory."""
    on_root = op.on_root
    return on_root if on_root is not None and options.rootRank == rank else op


def arrange(op: Op, values: Sequence[Value], made: Iterator[Any], hold: type = list) -> list[Value]:
    """``values`` with what comes out of ``made`` in the places of their tensors, in the order of ``walk``.

    ``hold`` is what lists become: list or tuple.
    """
    arranged: list[Value] = []
    for param, value in zip(op.params, values):
        if param.kind == "tensors":
            arranged.append(hold(islice(made, len(value))))
        elif param.kind == "tensor":
            arranged.append(next(made))
        elif param.kind == "tensor_lists":
            arranged.append(hold([hold(islice(made, len(row))) for row in value]))
        else:
            arranged.append(value if param.kind == "int" else hold(value))
    return arranged


def results(op: Op, values: Sequence[Value]) -> list[Any]:
    """What the future of a finished op holds: the tensors that it wrote, as torch's own groups return them."""
    for param, value in zip(op.params, values):
        if param.direction not in (None, "in"):
            if param.kind == "tensor":
                return [value]
            return list(value[0] if param.kind == "tensor_lists" and len(value) == 1 else value)
    return []


# --- calling ---------------------------------------------------------------------------------------------


def call(op: Op, group: Any, values: Sequence[Value], options: Options) -> Any:
    """Call ``op`` on one of torch's groups and return its Work. A group that has only the newer name will do."""
    method = getattr(group, op.name, None)
    if method is None and op.newer is not None:
        method = getattr(group, op.newer, None)
    if method is None:
        raise UnsupportedOp(f"{type(group).__name__} has no {op.name}", backend=type(group).__name__, op=op.name)
    return method(*values) if options is None else method(*values, options)
