# SPDX-License-Identifier: BSD-3-Clause
"""Errors to be kept: without the frames that they were raised in.

A traceback holds its frames, these their callers and the values of all variables there. An error that is kept by what
it was raised in is a cycle. Groups, tensors and their memory live until a garbage collection comes by, which trainers
put off or switch off; and where the cycle runs through a future, which is C++, until the process ends. So an error
that is kept is never raised itself. Pure; any thread may call.
"""

from __future__ import annotations

import copy
from typing import TypeVar

__all__ = ["frameless", "fresh"]

Error = TypeVar("Error", bound=BaseException)


def fresh(error: Error) -> Error:
    """Another ``error``, to be raised: it says the same, has the same cause, and no traceback yet."""
    try:
        another = copy.copy(error)
    except Exception:  # its constructor takes other arguments than it keeps
        return error
    if type(another) is not type(error):  # or worse
        return error
    another.__cause__ = error.__cause__
    another.__traceback__ = None
    return another


def frameless(error: Error) -> Error:
    """``error`` itself, which is not going to be raised, and what it came from, without their tracebacks."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:  # somebody may have tied a knot
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__cause__, one.__context__]
    return error
