# SPDX-License-Identifier: BSD-3-Clause
"""The options of a collective as builtins, which is how they cross a pipe, and back. Pure; any thread may call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from .._errors import UnsupportedOp
from ._ops import FIELDS, Op, Options, c10d

__all__ = ["options_from_fields", "options_to_fields", "timeout_in"]

_UNSET_MS = -1  # what torch's options hold for "the group's timeout"
_MILLISECOND = timedelta(milliseconds=1)
_TIMEOUT_AT = {name: fields.index("timeout") for name, fields in FIELDS.items()}
_UNSET = _UNSET_MS * _MILLISECOND
_PREMUL_SUM = int(c10d.ReduceOp.PREMUL_SUM)


def options_to_fields(options: Options) -> tuple[Any, ...]:
    """The fields of ``options`` as builtins, in the order of ``FIELDS``; () for None.

    A timeout crosses as whole milliseconds (-1: the group's own), a reduction as the number of its RedOpType, with
    its factor beside it where it has one, a device as its text, a list as a tuple. None stands for a field that
    this torch does not have.

    Raises:
        UnsupportedOp: the factor of a PREMUL_SUM cannot be read, as before torch 2.7, or is a tensor.
    """
    if options is None:
        return ()
    return tuple([_to_builtin(field, getattr(options, field, None)) for field in FIELDS[type(options).__name__]])


def timeout_in(op: Op, fields: Sequence[Any]) -> float:
    """The timeout of an op's own, in seconds, of what ``options_to_fields`` gave; 0 for the group's."""
    at = _TIMEOUT_AT.get(op.options or "", -1)
    return max(0, fields[at]) / 1000 if 0 <= at < len(fields) else 0.0


def options_from_fields(name: str | None, fields: Sequence[Any]) -> Options:
    """The inverse of ``options_to_fields``: an object of torch's class ``name``, None for None."""
    if name is None:
        return None
    options = getattr(c10d, name)()
    for field, value in zip(FIELDS[name], fields):
        if value is not None and hasattr(options, field):
            setattr(options, field, _from_builtin(field, value))
    return options


def _to_builtin(field: str, value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if field == "timeout":
        return _UNSET_MS if value == _UNSET else max(_UNSET_MS, round(value / _MILLISECOND))
    if field == "reduceOp":
        kind = int(value.op)
        if kind != _PREMUL_SUM:
            return kind
        factor = getattr(value, "factor", None)
        if not isinstance(factor, float):
            raise UnsupportedOp(
                f"PREMUL_SUM with the factor {factor!r} cannot be handed to a child process: multiply the tensor first "
                "and reduce it by SUM (a float factor crosses where this torch lets it be read)",
                op="PREMUL_SUM",
            )
        return kind, factor
    return str(value) if field == "device" else tuple(value)


def _from_builtin(field: str, value: Any) -> Any:
    if field == "timeout":
        return timedelta(milliseconds=value)
    if field == "reduceOp":
        if isinstance(value, tuple):
            return c10d._make_nccl_premul_sum(value[1])
        return c10d.ReduceOp(c10d.ReduceOp.RedOpType(value))
    if field == "device":
        return torch.device(value)
    return list(value) if field == "device_ids" else value
