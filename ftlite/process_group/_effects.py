# SPDX-License-Identifier: BSD-3-Clause
"""What the link to a child asks for, to be performed by its caller, in the order that it is returned in. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from . import _messages as says

__all__ = ["Configured", "Effect", "Kill", "Released", "Send", "Settle"]


class Send(NamedTuple):
    """Write ``message`` to the child."""

    message: says.Message


class Configured(NamedTuple):
    """The one answer to ``configure``: None, the group is up; or why it never will be."""

    outcome: Exception | None


class Settle(NamedTuple):
    """The one answer to the op ``op_id``: None, it is done; or why not. ``source``: see Done."""

    op_id: int
    outcome: Exception | None
    source: int = -1


class Kill(NamedTuple):
    """Kill the child at once; ``reason`` is for the log."""

    reason: str


class Released(NamedTuple):
    """The child has the device memory ``number`` open no more."""

    number: int


Effect: TypeAlias = Send | Configured | Settle | Kill | Released
