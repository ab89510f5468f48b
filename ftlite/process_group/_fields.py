# SPDX-License-Identifier: BSD-3-Clause
"""What a field of a message may be, by its name, whichever message it is in.

A frame is checked before a message is made of it, by ``type()`` and not ``isinstance()``: a bool is no number here.
Pure; any thread may call.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["CHECKS", "HANDLE_LIMIT", "INTEGERS", "INT_LIMIT", "MAX_DEPTH"]

# The deepest there is: args > a list of lists of tensors > a list > a tensor > its shape. Two to spare.
MAX_DEPTH = 6
# What C++ on the other side takes as an int64_t; larger numbers would only fail there, less clearly.
INT_LIMIT = 1 << 63
# A handle of CUDA has 64 bytes, and torch adds a few; one of torch's for expandable segments has some for each part.
HANDLE_BYTES = 64
HANDLE_LIMIT = 1 << 20
_PLACES = ("t", "d")


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_int(value: object) -> bool:
    return type(value) is int and -INT_LIMIT <= value < INT_LIMIT


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < INT_LIMIT


def _is_count_or_none(value: object) -> bool:
    return type(value) is int and -1 <= value < INT_LIMIT


def _is_duration(value: object) -> bool:
    # an int as well: 30 and 30.0 are the same time to whoever configures
    return (type(value) is float and math.isfinite(value) and value >= 0) or _is_count(value)


def _is_setting(value: object) -> bool:
    return type(value) in (str, bool, float) or _is_int(value)


def _is_handle(value: object) -> bool:
    return type(value) is bytes and HANDLE_BYTES <= len(value) <= HANDLE_LIMIT


def _is_ranks(value: object) -> bool:
    return type(value) is tuple and all(map(_is_count, value))


def _is_tensor(value: tuple[object, ...]) -> bool:
    if len(value) != 5 or value[0] not in _PLACES or type(value[4]) is not tuple:
        return False
    return all(map(_is_count, value[1:4])) and all(map(_is_count, value[4]))


def _is_args(value: object, depth: int = MAX_DEPTH) -> bool:
    if type(value) is not tuple or depth == 0:
        return False
    for one in value:
        if type(one) is tuple:
            fits = _is_tensor(one) if one and type(one[0]) is str else _is_args(one, depth - 1)
        else:
            fits = _is_int(one)
        if not fits:
            return False
    return True


def _is_options(value: object, depth: int = MAX_DEPTH) -> bool:
    if type(value) is not tuple or depth == 0:
        return False
    return all(one is None or _is_setting(one) or _is_options(one, depth - 1) for one in value)


CHECKS: dict[str, Callable[[object], bool]] = {
    "after": _is_count_or_none,
    "args": _is_args,
    "backend": _is_text,
    "broken": _is_bool,
    "device": _is_count,
    "done": _is_handle,
    "epoch": _is_count,
    "global_ranks": _is_ranks,
    "handle": _is_handle,
    "kind": _is_text,
    "nbytes": _is_count,
    "number": _is_count,
    "offset": _is_count,
    "op": _is_count,
    "op_id": _is_count,
    "options": _is_options,
    "pair": _is_count,
    "pid": _is_count,
    "rank": _is_count,
    "ready": _is_handle,
    "source": _is_count_or_none,
    "store_addr": _is_text,
    "text": _is_text,
    "timeout_s": _is_duration,
    "traceback": _is_text,
    "type": _is_text,
    "world_size": _is_count,
}

# the rules of what is always an integer of 64 bits
INTEGERS = frozenset({_is_count, _is_count_or_none})
