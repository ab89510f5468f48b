# SPDX-License-Identifier: BSD-3-Clause
"""What every receiver does with a donor's document and with the objects in it, however they came.

Rules: nothing here waits or talks to a donor; what torch's loader refuses becomes an error by key. Threads: the
receiving one only.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from .. import _compat
from .._errors import LayoutError
from . import _stream, _tree
from ._manifest import Manifest
from ._plan import Plan

_logger = logging.getLogger(__name__)

_LISTED = 8  # keys in a log line


def plan_for(
    manifest: Manifest, own: Any, *, weights_only: bool, device: torch.device | None, max_bytes: int | None = None
) -> Plan:
    """The plan of a receive into ``own`` (``_tree.MISSING``: there is none), with a line about what is left alone.

    Raises:
        LayoutError, IntegrityError: as ``Plan`` does.
    """
    loader = _compat.SAFE_LOADER_IS_SOUND or not weights_only
    plan = Plan(manifest, own, device=device, max_bytes=max_bytes, loader=loader)
    log_left_alone(plan)
    return plan


def log_left_alone(plan: Plan) -> None:
    """One line about the tensors that only the receiver has."""
    if plan.only_here:
        _logger.info(
            "%d tensors that the donor does not have are left as they are: %s%s",
            len(plan.only_here),
            ", ".join(plan.only_here[:_LISTED]),
            ", ..." if len(plan.only_here) > _LISTED else "",
        )


def load_blob(data: bytes, path: _tree.Path, *, weights_only: bool, device: torch.device | None) -> Any:
    """The object that torch.save made ``data`` of.

    Raises:
        LayoutError: torch's loader refuses it; by key.
    """
    try:
        return _stream.load_object(data, weights_only=weights_only, device=device or "cpu")
    except Exception as e:  # whatever a hostile or foreign object makes the loader raise
        raise LayoutError(
            f"{_tree.show_path(path)}: torch's loader refuses what the donor sent ({_stream.first_line(e)}); allow the "
            "class with torch.serialization.add_safe_globals on both sides"
        ) from e
